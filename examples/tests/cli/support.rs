//! Running the command line as its users do: each call a process of its own, on one state directory.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

/// A state directory, a repository, and the backend that is to be used.
pub(crate) struct Cli {
    dir: tempfile::TempDir,
    pub(crate) backend: &'static str,
}

/// How a call ended and what it said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Where the hosts of `scripts/hosts` are.
const HOSTS: &str = "SANDBOX_SSH_HOSTS";

/// The host that is used for every story.
pub(crate) const HOST: &str = "near";

/// The backends that can be tried here: `scripts/containers` names a container engine and an image,
/// `scripts/hosts` other hosts. What must be tried is tried, or this fails.
pub(crate) fn backends() -> Vec<&'static str> {
    let mut backends = vec!["ext.bwrap"];
    for (backend, variable) in [("ext.docker", "SANDBOX_DOCKER_HOST"), ("ext.ssh", HOSTS)] {
        match std::env::var_os(variable) {
            Some(_) => backends.push(backend),
            None => assert!(!is_required(backend), "{backend} is required: {variable} is not set"),
        }
    }
    backends
}

/// Whether a backend is one that the suite must not skip.
fn is_required(backend: &str) -> bool {
    let listed = std::env::var("SANDBOX_CONFORMANCE_REQUIRED").unwrap_or_default();
    let subjects = listed.split(',').filter_map(|entry| entry.split(':').next());
    subjects.into_iter().any(|subject| format!("ext.{subject}") == backend)
}

/// The directory of `scripts/hosts`, if it has been told.
pub(crate) fn hosts() -> Option<PathBuf> {
    backends().contains(&"ext.ssh").then(|| PathBuf::from(std::env::var_os(HOSTS).unwrap()))
}

/// Runs a story on every backend.
pub(crate) fn on_each(story: impl Fn(&Cli)) {
    for backend in backends() {
        println!("on {backend}");
        let cli = Cli::new(backend);
        story(&cli);
    }
}

impl Cli {
    pub(crate) fn new(backend: &'static str) -> Self {
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        let cli = Self { dir, backend };
        let repo = cli.repo();
        fs::create_dir_all(repo.join("src")).unwrap();
        fs::write(repo.join("README"), "v1\n").unwrap();
        fs::write(repo.join("src/main.c"), "int main(void) { return 0; }\n").unwrap();
        fs::write(repo.join("notes.txt"), "not a program\n").unwrap();
        cli
    }

    pub(crate) fn repo(&self) -> PathBuf {
        self.dir.path().join("repo with spaces")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What `create` is told, to use the backend.
    pub(crate) fn on(&self) -> Vec<String> {
        let mut on = vec!["--backend".to_owned(), self.backend.to_owned()];
        match self.backend {
            "ext.docker" => {
                on.extend(["--image".to_owned(), std::env::var("SANDBOX_TEST_IMAGE").unwrap()]);
            }
            "ext.ssh" => on.extend(["--host", HOST].map(str::to_owned)),
            _ => {}
        }
        on
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxer"));
        command
            .args(args)
            .env("SANDBOXER_STATE_DIR", self.dir.path().join("state"))
            .env_remove("SANDBOXER_PROFILES")
            .env_remove("SANDBOXER_HOST")
            .env_remove("SANDBOXER_ACCEPT_ACCOUNT")
            .env_remove("SANDBOXER_SSH_CONFIG")
            .env_remove("DOCKER_HOST")
            .env_remove("DOCKER_CONTEXT")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(host) = std::env::var_os("SANDBOX_DOCKER_HOST") {
            command.env("DOCKER_HOST", host);
        }
        if let Some(hosts) = std::env::var_os(HOSTS) {
            command.env("SANDBOXER_SSH_CONFIG", Path::new(&hosts).join("config"));
        }
        command
    }

    /// Runs a call to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Said {
        said(&self.command(args).output().unwrap())
    }

    /// Runs a call that must succeed; its document.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let said = self.run(args);
        assert_eq!(said.code, 0, "{args:?}: {said:?}");
        serde_json::from_str(&said.stdout)
            .unwrap_or_else(|_| panic!("{args:?} is no JSON: {said:?}"))
    }

    /// Runs a call that must fail with this code; what it says.
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let said = self.run(args);
        assert_eq!(said.code, code, "{args:?}: {said:?}");
        said.stderr
    }

    /// Runs a call with this standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Output {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || {
            let _ = stdin.write_all(&input);
        });
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        output
    }

    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).spawn().unwrap()
    }

    /// A sandbox of the repository; its status.
    pub(crate) fn create(&self, name: &str, more: &[&str]) -> Value {
        let input = format!("repo={}", self.repo().display());
        let on = self.on();
        let mut args = vec!["create", "--name", name, "--input", &input];
        args.extend(on.iter().map(String::as_str));
        args.extend(more);
        self.json(&args)
    }

    /// What shell text says in a sandbox.
    pub(crate) fn sh(&self, id: &str, text: &str) -> String {
        let said = self.run(&["exec", id, "--", "sh", "-c", text]);
        assert_eq!(said.code, 0, "{text}: {said:?}");
        said.stdout.trim_end().to_owned()
    }

    /// Waits until something holds.
    pub(crate) fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed().as_secs() < 60, "it does not come: {what}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// What is told of the backends, with the host for those that have hosts.
    pub(crate) fn probes(&self) -> Value {
        match hosts() {
            Some(_) => self.json(&["backends", "--host", HOST]),
            None => self.json(&["backends"]),
        }
    }

    /// Whether the backend has a feature here.
    pub(crate) fn has(&self, feature: &str) -> bool {
        let all = self.probes();
        let mine = all.as_array().unwrap().iter().find(|b| b["extension_id"] == self.backend);
        mine.unwrap()["features"][feature]["level"] == "full"
    }
}

impl Drop for Cli {
    fn drop(&mut self) {
        let listed = self.run(&["list"]);
        let found: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
        let ids = found.as_array().into_iter().flatten();
        let ids: Vec<&str> = ids.filter_map(|status| status["sandbox_id"].as_str()).collect();
        if !ids.is_empty() {
            let said = self.run(&[&["destroy"], &ids[..]].concat());
            if !std::thread::panicking() {
                assert_eq!(said.code, 0, "{said:?}");
            }
        }
    }
}

pub(crate) fn said(output: &Output) -> Said {
    Said {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Writes a file that can be executed.
#[allow(dead_code, reason = "not every story has one")]
pub(crate) fn script(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
