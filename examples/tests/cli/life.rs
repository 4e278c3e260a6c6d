//! Making sandboxes and what happens to them.

use std::fs;

use serde_json::json;

use crate::support::{HOST, on_each};

#[test]
fn a_status_is_the_documented_one() {
    on_each(|cli| {
        let asks = ["--actor", "agt", "--project", "glas-harness", "--run-id", "r1", "--ttl", "4h"];
        let status = cli.create("main", &asks);
        let mut keys: Vec<&str> = status.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "consumer",
                "created_at",
                "expires_at",
                "extension_id",
                "generation",
                "latest_snapshot",
                "name",
                "profile_id",
                "reachability",
                "ready_at",
                "sandbox_id",
                "state",
                "ttl",
                "updated_at",
                "workspace",
            ]
        );
        assert_eq!(status["name"], "main");
        assert_eq!(status["generation"], 1);
        assert_eq!(status["extension_id"], cli.backend);
        assert_eq!(status["state"], "ready");
        assert_eq!(status["ttl"], "4h");
        assert_eq!(status["workspace"], "/workspace");
        assert_eq!(
            status["consumer"],
            json!({"actor": "agt", "project": "glas-harness", "run_id": "r1"})
        );
        let dir = if cli.backend == "ext.ssh" { "remote_dir" } else { "workspace_dir" };
        assert_eq!(status["reachability"][dir], "/workspace");
        assert_eq!(cli.json(&["get", "main"])["sandbox_id"], status["sandbox_id"]);
        // Who asked is never told inside.
        assert_eq!(cli.sh("main", "env | grep -c glas-harness || true"), "0");
    });
}

#[test]
fn a_name_is_one_sandbox() {
    on_each(|cli| {
        let first = cli.create("main", &[]);
        assert_eq!(cli.create("main", &[])["sandbox_id"], first["sandbox_id"]);
        let (repo, on) = (format!("repo={}", cli.repo().display()), cli.on());
        let mut other = vec!["create", "--name", "main", "--input", &repo, "--ttl", "1h"];
        other.extend(on.iter().map(String::as_str));
        let said = cli.fails(1, &other);
        assert!(said.contains("lifetime.ttl_seconds"), "{said}");
        assert_eq!(cli.json(&["list"]).as_array().unwrap().len(), 1);
    });
}

#[test]
fn a_profile_makes_a_sandbox() {
    on_each(|cli| {
        let (repo, on) = (format!("repo={}", cli.repo().display()), cli.on());
        let mut create = vec!["create", "--profile", "agent-dev", "--input", &repo];
        create.extend(on.iter().map(String::as_str));
        let status = cli.json(&create);
        assert_eq!(status["profile_id"], "profile.agent-dev");
        assert_eq!(status["ttl"], "4h");
        let id = status["sandbox_id"].as_str().unwrap();
        assert_eq!(cli.sh(id, "cat README"), "v1");
        let longest = cli.json(&[&create[..], &["--ttl", "30d"]].concat());
        assert_eq!(longest["ttl"], "1d", "capped at the maximum");
        let said = cli.fails(1, &["create", "--profile", "nope"]);
        assert!(said.contains("profile.agent-dev"), "{said}");
        let profiles = cli.path("profiles");
        fs::create_dir(&profiles).unwrap();
        let text = "id: profile.elsewhere\nversion: \"1\"\nextension: ext.nowhere\n";
        fs::write(profiles.join("elsewhere.yaml"), text).unwrap();
        let dir = profiles.to_string_lossy().into_owned();
        let said = cli.fails(1, &["--profiles-dir", &dir, "create", "--profile", "elsewhere"]);
        assert!(said.contains("no such backend"), "{said}");
    });
}

#[test]
fn setup_gets_its_secrets_and_fails_with_its_output() {
    on_each(|cli| {
        let profiles = cli.path("profiles");
        fs::create_dir(&profiles).unwrap();
        let text = format!(
            "id: profile.s\nversion: \"1\"\nextension: {}\nimage: {}\nplacement: {{prefer: [{HOST}]}}\n\
             setup:\n  secret_refs: [CLI_TEST_TOKEN]\n  \
             commands: ['test \"$CLI_TEST_TOKEN\" = sesame', 'echo $SANDBOX_INPUT_REF > ref; exit $CODE']\n",
            cli.backend,
            std::env::var("SANDBOX_TEST_IMAGE").unwrap_or_else(|_| "unused".into()),
        );
        fs::write(profiles.join("s.yaml"), text.replace("$CODE", "0")).unwrap();
        fs::write(
            profiles.join("f.yaml"),
            text.replace("profile.s", "profile.f").replace("$CODE", "7"),
        )
        .unwrap();
        let create = |profile: &str, secret: bool| {
            let dir = profiles.to_string_lossy().into_owned();
            let args =
                ["--profiles-dir", &dir, "create", "--profile", profile, "--input", "ref=dev"];
            let mut command = cli.command(&args);
            if secret {
                command.env("SANDBOXER_SECRET_CLI_TEST_TOKEN", "sesame");
            }
            crate::support::said(&command.output().unwrap())
        };
        let said = create("s", false);
        assert_eq!(said.code, 1);
        assert!(said.stderr.contains("CLI_TEST_TOKEN"), "{said:?}");
        assert!(cli.run(&["history", "x"]).stdout.is_empty());
        let said = create("s", true);
        assert_eq!(said.code, 0, "{said:?}");
        let status: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
        assert_eq!(cli.sh(status["sandbox_id"].as_str().unwrap(), "cat ref"), "dev");
        let said = create("f", true);
        assert_eq!(said.code, 1);
        assert!(said.stderr.contains("exited with 7"), "{said:?}");
    });
}

#[test]
fn it_is_stopped_started_recreated_and_destroyed() {
    on_each(|cli| {
        let id = cli.create("main", &[])["sandbox_id"].as_str().unwrap().to_owned();
        cli.sh("main", "echo kept > file");
        let stopped = cli.json(&["stop", "main"]);
        assert_eq!(stopped["state"], "stopped");
        assert_eq!(stopped["reachability"], serde_json::Value::Null);
        let said = cli.fails(125, &["exec", "main", "--", "true"]);
        assert!(said.contains("start it first"), "{said}");
        assert_eq!(cli.json(&["start", "main"])["state"], "ready");
        assert_eq!(cli.sh("main", "cat file"), "kept");
        assert_eq!(cli.json(&["recreate", "main"])["generation"], 2);
        assert_eq!(cli.sh("main", "cat README; test -e file || echo gone"), "v1\ngone");
        assert_eq!(cli.json(&["destroy", "main"])[0]["state"], "destroyed");
        assert_eq!(cli.json(&["destroy", &id])[0]["state"], "destroyed", "twice is no error");
        assert_eq!(cli.json(&["get", &id])["state"], "destroyed", "its record stays");
        cli.fails(1, &["get", "main"]);
        assert_eq!(cli.json(&["list"]), json!([]));
        assert_eq!(cli.json(&["list", "--state", "destroyed"])[0]["sandbox_id"], id.as_str());
    });
}

#[test]
fn it_is_paused_and_goes_on_where_that_can_be_had() {
    on_each(|cli| {
        cli.create("main", &[]);
        if !cli.has("pause") {
            let said = cli.fails(1, &["pause", "main"]);
            assert!(said.contains("pause"), "{said}");
            assert_eq!(cli.json(&["get", "main"])["state"], "ready");
            return;
        }
        assert_eq!(cli.json(&["pause", "main"])["state"], "paused");
        cli.fails(125, &["exec", "main", "--", "true"]);
        assert_eq!(cli.json(&["resume", "main"])["state"], "ready");
        cli.sh("main", "true");
    });
}

#[test]
fn its_time_is_extended_and_when_it_is_over_it_is_removed_only_if_asked() {
    on_each(|cli| {
        let repo = format!("repo={}", cli.repo().display());
        let before = cli.create("long", &["--ttl", "1h"]);
        let after = cli.json(&["extend-ttl", "long", "--duration", "1h"]);
        assert!(after["expires_at"].as_str() > before["expires_at"].as_str());
        cli.fails(2, &["extend-ttl", "long", "--duration", "1 hour"]);
        let on = cli.on();
        let mut profile = vec!["create", "--profile", "sandbox-canary", "--input", &repo];
        profile.extend(on.iter().map(String::as_str));
        let canary = cli.json(&profile)["sandbox_id"].as_str().unwrap().to_owned();
        let said = cli.fails(1, &["extend-ttl", &canary, "--duration", "1h"]);
        assert!(said.contains("maximum"), "{said}");

        let short =
            cli.create("short", &["--ttl", "1s"])["sandbox_id"].as_str().unwrap().to_owned();
        cli.until("an expired sandbox", || {
            let listed = cli.json(&["expire"]);
            listed.as_array().unwrap().iter().any(|left| left["sandbox"] == short.as_str())
        });
        let stale = cli.json(&["inspect", "stale"]);
        assert_eq!(stale[0]["kind"], "expired");
        assert_eq!(stale[0]["removed"], false);
        assert_eq!(cli.json(&["expire", "--apply"])[0]["removed"], true);
        assert_eq!(cli.json(&["get", &short])["state"], "destroyed");
        assert_eq!(cli.json(&["get", "long"])["state"], "ready");
        assert_eq!(cli.json(&["reap-stale", "--older-than", "1h", "--apply"]), json!([]));
        let host = cli.json(&["inspect", "host"]);
        // There may be others' on a host.
        let mut mine = vec![before["sandbox_id"].clone(), canary.into()];
        mine.sort_by_key(ToString::to_string);
        let found = host["instances"].as_array().unwrap().iter().map(|one| one["sandbox"].clone());
        let mut found: Vec<_> = found.filter(|id| mine.contains(id) || *id == short).collect();
        found.sort_by_key(ToString::to_string);
        assert_eq!(found, mine, "{host}");
    });
}
