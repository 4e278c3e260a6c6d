//! Containers that somebody else made.

use std::process::Command;

use crate::support::{Cli, backends, said};

/// A container of somebody else's, removed when this is dropped.
struct Lent {
    name: String,
}

impl Lent {
    fn run() -> Self {
        let name = format!("sandbox-test-lent-{}", std::process::id());
        let image = std::env::var("SANDBOX_TEST_IMAGE").unwrap();
        docker(&["run", "--detach", "--network=none", "--name", &name, &image, "sleep", "9999"]);
        Self { name }
    }

    fn sh(&self, text: &str) -> String {
        docker(&["exec", &self.name, "sh", "-c", text])
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = engine(&["rm", "--force", &self.name]).output();
    }
}

fn engine(args: &[&str]) -> Command {
    let mut docker = Command::new("docker");
    docker.arg("--host").arg(std::env::var_os("SANDBOX_DOCKER_HOST").unwrap()).args(args);
    docker
}

fn docker(args: &[&str]) -> String {
    let said = said(&engine(args).output().unwrap());
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.stdout
}

#[test]
fn a_container_is_attached_used_and_left_as_it_was() {
    if !backends().contains(&"ext.docker") {
        return;
    }
    let cli = Cli::new("ext.docker");
    let lent = Lent::run();
    lent.sh("echo theirs > /own");
    let said = cli.fails(1, &["attach", "--container", "no-such-container"]);
    assert!(said.contains("no-such-container"), "{said}");
    cli.fails(1, &["attach", "--container", &lent.name, "--backend", "ext.bwrap"]);
    let status = cli.json(&["attach", "--container", &lent.name, "--project", "shop"]);
    assert_eq!(status["state"], "ready");
    assert_eq!(status["extension_id"], "ext.docker");
    assert_eq!(status["consumer"]["project"], "shop");
    let id = status["sandbox_id"].as_str().unwrap();
    assert_eq!(cli.json(&["list"])[0]["sandbox_id"], id);

    assert_eq!(cli.run(&["exec", id, "--", "cat", "/own"]).stdout, "theirs\n");
    let file = cli.path("file");
    std::fs::write(&file, "brought\n").unwrap();
    cli.json(&["cp", file.to_str().unwrap(), &format!("{id}:/brought")]);
    assert_eq!(lent.sh("cat /brought"), "brought\n");
    cli.json(&["spawn", id, "--", "sleep", "8887"]);
    for refused in [&["stop", id][..], &["snapshot", id], &["destroy", id]] {
        let said = cli.fails(1, refused);
        assert!(said.contains("borrowed"), "{said}");
    }

    assert_eq!(cli.json(&["detach", id])["state"], "destroyed");
    assert_eq!(cli.json(&["detach", id])["state"], "destroyed", "twice is no error");
    assert_eq!(cli.json(&["list"]), serde_json::json!([]));
    let left = lent.sh("cat /own; ls -A /; cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
    assert!(left.starts_with("theirs\n"), "{left}");
    assert!(left.contains("sleep 9999"), "its own program runs on: {left}");
    assert!(!left.contains("8887") && !left.contains("sandbox"), "{left}");
}
