//! Sandboxes on other hosts: how a host is named, and what is refused there.

use std::{fs, os::unix::fs::MetadataExt};

use serde_json::Value;

use crate::support::{Cli, HOST, hosts, said};

/// A state directory whose sandboxes are on hosts, if there are some.
fn on_hosts() -> Option<Cli> {
    hosts().map(|_| Cli::new("ext.ssh"))
}

/// Writes a profile whose sandboxes are on a host, and says what names it.
fn profile(cli: &Cli, host: &str, rest: &str) -> [String; 4] {
    let dir = cli.path("profiles");
    fs::create_dir_all(&dir).unwrap();
    let text = format!(
        "id: profile.placed\nversion: \"1\"\nextension: ext.ssh\nplacement: {{prefer: [{host}]}}\n{rest}"
    );
    fs::write(dir.join("placed.yaml"), text).unwrap();
    ["--profiles-dir", dir.to_str().unwrap(), "--profile", "placed"].map(str::to_owned)
}

fn create(named: &[String; 4]) -> Vec<&str> {
    [vec!["create"], named.iter().map(String::as_str).collect()].concat()
}

#[test]
fn the_variable_and_the_profile_name_a_host_and_the_option_wins() {
    let Some(cli) = on_hosts() else { return };
    let repo = format!("repo={}", cli.repo().display());
    let mut command = cli.command(&["create", "--profile", "agent-dev", "--input", &repo]);
    let said = said(&command.env("SANDBOXER_HOST", HOST).output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    let status: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(status["extension_id"], "ext.ssh");
    assert_eq!(status["reachability"]["host"], HOST);
    assert!(said.stderr.contains("sandboxer: bringing 3 files, "), "{said:?}");
    // Calls that name no host find it.
    assert_eq!(cli.sh(status["sandbox_id"].as_str().unwrap(), "cat README"), "v1");

    let placed = profile(&cli, HOST, "");
    assert_eq!(cli.json(&create(&placed))["reachability"]["host"], HOST);
    let elsewhere = profile(&cli, "no-such-host.invalid", "");
    let said = cli.fails(1, &create(&elsewhere));
    assert!(said.contains("no-such-host.invalid"), "{said}");
    let asked = cli.json(&[&create(&elsewhere)[..], &["--host", HOST]].concat());
    assert_eq!(asked["reachability"]["host"], HOST);
}

#[test]
fn what_is_no_host_is_refused() {
    let Some(cli) = on_hosts() else { return };
    let mark = cli.path("mark");
    let option = format!("--host=-oProxyCommand=touch {}", mark.display());
    let said = cli.fails(1, &["create", "--backend", "ext.ssh", &option]);
    assert!(said.contains("begins like an option"), "{said}");
    assert!(!mark.exists());
    let said = cli.fails(1, &["create", "--backend", "ext.ssh"]);
    assert!(said.contains("no host is named"), "{said}");
    let said = cli.fails(1, &["create", "--backend", "ext.bwrap", "--host", HOST]);
    assert!(said.contains("has no hosts to choose from"), "{said}");
}

#[test]
fn an_account_is_isolation_only_where_that_was_accepted() {
    let Some(cli) = on_hosts() else { return };
    // Only root can have that host.
    if fs::metadata(hosts().unwrap().join("config")).unwrap().uid() != 0 {
        return;
    }
    let placed = profile(&cli, "account", "network: {default: allow}\n");
    let said = cli.fails(1, &create(&placed));
    assert!(said.contains("account offers no isolation"), "{said}");
    let accepted = [&create(&placed)[..], &["--accept-account-as-isolation"]].concat();
    let id = cli.json(&accepted)["sandbox_id"].as_str().unwrap().to_owned();
    // From then on nothing need be accepted again.
    cli.sh(&id, "echo one > file");
    let snapshot = cli.json(&["snapshot", &id])["snapshot_id"].clone();
    cli.sh(&id, "echo two > file");
    cli.json(&["rewind", &id, snapshot.as_str().unwrap()]);
    assert_eq!(cli.sh(&id, "cat file"), "one");
    let seen = cli.json(&["inspect", "host"]);
    let seen = seen["instances"].as_array().unwrap().iter().any(|found| found["sandbox"] == *id);
    assert!(seen, "it is in the inventory");
    let mut command = cli.command(&create(&placed));
    let said =
        crate::support::said(&command.env("SANDBOXER_ACCEPT_ACCOUNT", "no").output().unwrap());
    assert_eq!(said.code, 1, "{said:?}");
}

#[test]
fn what_a_killed_call_left_on_a_host_is_removed_by_the_next() {
    let Some(cli) = on_hosts() else { return };
    let placed = profile(&cli, HOST, "setup: {commands: ['sleep 86397']}\n");
    let mut making = cli.start(&create(&placed));
    let mine = || {
        let ids: Vec<Value> = fs::read_dir(cli.path("state/journal/history"))
            .into_iter()
            .flatten()
            .map(|file| file.unwrap().file_name().to_str().unwrap().replace(".jsonl", "").into())
            .collect();
        let seen = cli.json(&["inspect", "host"]);
        let seen = seen["instances"].as_array().unwrap().clone();
        seen.into_iter().filter(|found| ids.contains(&found["sandbox"])).count()
    };
    cli.until("an instance that is being set up", || mine() == 1);
    making.kill().unwrap();
    making.wait().unwrap();
    assert_eq!(cli.json(&["list"]), serde_json::json!([]));
    assert_eq!(mine(), 0);
}
