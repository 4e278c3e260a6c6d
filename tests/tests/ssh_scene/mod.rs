//! A harness for the hosts of `scripts/hosts`, with a configuration of its own, by which its processes can
//! be told.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::{
    fs,
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command as HostCommand,
    time::{Duration, Instant},
};

use sandbox_core::{Command, Sandbox, SandboxManager, Suppressed};
use sandbox_ssh::{SshBackend, SshBackendBuilder};
use tempfile::TempDir;

/// Where the hosts are; `scripts/hosts env` says it.
pub(crate) const HOSTS: &str = "SANDBOX_SSH_HOSTS";
/// How long to wait for what must come. Nothing measures it; it tells a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Says why a test is not run.
pub(crate) fn skip(why: &str) {
    let _ = std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes());
}

pub(crate) struct Scene {
    pub(crate) hosts: PathBuf,
    pub(crate) dir: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Option<Self> {
        let Some(hosts) = std::env::var_os(HOSTS).map(PathBuf::from) else {
            sandbox_conformance::left_out("ssh", &format!("{HOSTS} is not set"));
            return None;
        };
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        let text = fs::read_to_string(hosts.join("config")).unwrap();
        fs::write(dir.path().join("config"), text).unwrap();
        Some(Self { hosts, dir })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A backend whose state on the host is this scene's.
    pub(crate) fn builder(&self, host: &str) -> SshBackendBuilder {
        let builder = SshBackend::builder()
            .host(host)
            .config_file(self.path("config"))
            .keep_alive(Duration::from_secs(1), 3);
        if host != "account" {
            return builder.state_dir(self.path("host")).program_dir(self.hosts.join("cache"));
        }
        let state = self.path("account");
        let _ = fs::create_dir(&state);
        self.give(&state);
        builder.state_dir(state).program_dir(self.hosts.join("home"))
    }

    /// Whether this host is there: all but `near` take root.
    pub(crate) fn has(&self, host: &str) -> bool {
        let root = fs::metadata("/proc/self").is_ok_and(|this| this.uid() == 0);
        let there = match host {
            "near" => true,
            "far" => self.hosts.join("link").exists(),
            _ => self.hosts.join("home").exists(),
        };
        assert!(there || !root, "root's hosts have {host}");
        if !there {
            skip(&format!("there is no host {host} here"));
        }
        there
    }

    /// Makes something the ordinary account's.
    pub(crate) fn give(&self, path: &Path) {
        let home = fs::metadata(self.hosts.join("home")).unwrap();
        std::os::unix::fs::chown(path, Some(home.uid()), Some(home.gid())).unwrap();
        fs::set_permissions(self.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    }

    pub(crate) async fn manager(&self, backend: SshBackend) -> SandboxManager {
        let builder = SandboxManager::builder().state_dir(self.path("state"));
        builder.backend(backend).build().await.unwrap()
    }

    /// A directory with a file in it.
    pub(crate) fn repository(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("README"), "v1\n").unwrap();
        path
    }

    /// The processes of `ssh` that use this configuration.
    pub(crate) fn connections(&self) -> Vec<u32> {
        let config = self.path("config");
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap() {
            let Some(pid) = entry.unwrap().file_name().to_str().and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            let ssh = words.first().is_some_and(|word| word.ends_with(b"ssh"));
            if ssh && words.contains(&config.as_os_str().as_encoded_bytes()) {
                found.push(pid);
            }
        }
        found
    }

    pub(crate) async fn until_no_connection(&self) {
        until("no connection", || self.connections().is_empty()).await;
    }

    /// Cuts the link to `far` until what went over it has noticed, and mends it.
    pub(crate) async fn cut(&self) {
        let link = fs::read_to_string(self.hosts.join("link")).unwrap().trim().to_owned();
        let before = self.connections();
        assert!(!before.is_empty());
        set(&link, "down");
        let cut = Cut(link);
        // New ones are tried all the while.
        let gone = || self.connections().iter().all(|pid| !before.contains(pid));
        until("the end of a connection", gone).await;
        drop(cut);
    }
}

/// A link that is cut, until this is dropped.
struct Cut(String);

impl Drop for Cut {
    fn drop(&mut self) {
        set(&self.0, "up");
    }
}

fn set(link: &str, state: &str) {
    let done = HostCommand::new("ip").args(["link", "set", link, state]).status().unwrap();
    assert!(done.success());
}

pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "it does not come: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(done) => done,
        Err(_) => panic!("it hangs: {what}"),
    }
}

pub(crate) async fn sh(sandbox: &Sandbox, text: &str) -> String {
    let run = sandbox.exec(Command::shell(text), &Suppressed).await.unwrap();
    assert!(run.outcome.is_success(), "{text}: {:?} {}", run.outcome, run.stderr.text());
    run.stdout.text().trim_end().to_owned()
}
