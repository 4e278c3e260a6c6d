//! Looking at sandboxes.

use std::process::Command;

use serde_json::Value;

use crate::support::{on_each, said};

#[test]
fn sandboxes_are_listed_by_who_asked() {
    on_each(|cli| {
        cli.create("a", &["--actor", "agt", "--project", "one"]);
        cli.create("b", &["--actor", "atm", "--project", "two"]);
        let names = |args: &[&str]| {
            let listed = cli.json(&[&["list"], args].concat());
            let names =
                listed.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_owned());
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["a", "b"]);
        assert_eq!(names(&["--actor", "agt"]), ["a"]);
        assert_eq!(names(&["--project", "two"]), ["b"]);
        assert_eq!(names(&["--state", "ready"]), ["a", "b"]);
        assert_eq!(names(&["--state", "stopped"]), [""; 0]);
        cli.fails(2, &["list", "--state", "sleepy"]);
    });
}

#[test]
fn the_history_is_told_and_followed() {
    on_each(|cli| {
        let id = cli.create("main", &[])["sandbox_id"].as_str().unwrap().to_owned();
        let kinds = |text: &str| -> Vec<String> {
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.map(|event| event["kind"].as_str().unwrap().to_owned()).collect()
        };
        let whole = cli.run(&["history", "main"]).stdout;
        assert_eq!(kinds(&whole), ["requested", "provisioning", "ready"]);
        assert!(whole.lines().next().unwrap().contains("\"turn\":\"sandboxer-"), "{whole}");
        let follower = cli.start(&["history", "main", "--after", "3", "--follow"]);
        cli.sh("main", "true");
        cli.json(&["destroy", "main"]);
        let followed = said(&follower.wait_with_output().unwrap());
        assert_eq!(followed.code, 0);
        assert_eq!(
            kinds(&followed.stdout),
            ["process_started", "process_exited", "destroying", "destroyed"]
        );
        assert_eq!(kinds(&cli.run(&["history", &id]).stdout).len(), 7);
    });
}

#[test]
fn the_hint_works_when_it_is_pasted() {
    on_each(|cli| {
        let status = cli.create("main", &[]);
        let shown = cli.json(&["reachability", "show", "main"]);
        for (key, value) in status["reachability"].as_object().unwrap() {
            assert_eq!(&shown[key], value, "the same fields");
        }
        let hints = ["ssh_one_liner", "local_exec_hint"];
        assert_eq!(hints.iter().filter(|hint| shown[**hint].is_string()).count(), 1, "{shown}");
        cli.sh("main", "echo from inside > /workspace/mark");
        let hint = hints.iter().find_map(|hint| shown[*hint].as_str()).unwrap();
        // As it would be pasted: into a shell on a terminal.
        let typed = "cat /workspace/mark\nexit\n";
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", hint, "/dev/null"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), typed.as_bytes()).unwrap();
        let said = said(&child.wait_with_output().unwrap());
        assert!(said.stdout.contains("from inside"), "{hint}: {said:?}");
        // Everything before its last word runs any other command.
        let (without, after) = hint.rsplit_once("/bin/sh").unwrap();
        let without = without.replace(" --tty", "").replacen("ssh -t ", "ssh ", 1);
        let run = |rest: &str| {
            // What a host's shell sees once more is in quotes.
            let rest = if after.is_empty() { rest.to_owned() } else { rest.replace('\'', r"'\''") };
            let line = format!("{without}{rest}{after}");
            crate::support::said(&Command::new("sh").args(["-c", &line]).output().unwrap())
        };
        assert_eq!(run("/bin/cat /workspace/mark").stdout, "from inside\n", "{hint}");
        assert_eq!(run("/bin/sh -c 'exit 7'").code, 7, "{hint}");
    });
}

#[test]
fn what_it_uses_is_told() {
    on_each(|cli| {
        cli.create("main", &[]);
        let stats = cli.json(&["stats", "main"]);
        assert!(stats["usage"]["pids"].as_u64().is_some(), "{stats}");
    });
}
