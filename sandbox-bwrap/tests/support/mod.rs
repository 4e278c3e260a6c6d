//! What the tests share: a backend with a state directory of its own, and running commands in its
//! sandboxes the way a person would, through the command line that `reachability` gives.
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, in functions that clippy cannot tell as such"
)]

use std::{
    future::Future,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    CreateSandbox, Instance, MemoryJournal, OwnerId, Provision, Run, SandboxBackend, SandboxId,
    SandboxManager, SnapshotData, SnapshotRequest, SnapshotTaken, Suppressed,
};
use tempfile::TempDir;

/// Set in the processes in which a test runs a second time, as an ordinary user.
const ORDINARY: &str = "SANDBOX_TEST_ORDINARY";
const ORDINARY_ID: &str = "61234";

pub(crate) struct Place {
    pub(crate) backend: BwrapBackend,
    /// For the test's own files, with an awkward name.
    pub(crate) dir: PathBuf,
    pub(crate) state: PathBuf,
    _all: TempDir,
}

/// Runs a test as whoever runs the tests and, if that is root, as an ordinary user too.
pub(crate) fn as_everybody<F: Future<Output = ()>>(name: &str, test: impl FnOnce(Place) -> F) {
    here(test);
    if is_root() {
        as_an_ordinary_user(name);
    }
}

/// Runs a test as whoever runs the tests.
pub(crate) fn here<F: Future<Output = ()>>(test: impl FnOnce(Place) -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let place = Place::new();
    let state = place.state.clone();
    runtime.block_on(test(place));
    // Nothing of an instance is left, whatever the test did.
    let instances = std::fs::read_dir(state.join("instances"));
    let left: Vec<_> = instances.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

pub(crate) fn is_root() -> bool {
    Command::new("id").arg("-u").output().unwrap().stdout == b"0\n"
}

/// Runs the same test in a process of an ordinary user.
pub(crate) fn as_an_ordinary_user(name: &str) {
    let place = TempDir::new().unwrap();
    open_up(place.path());
    // The tests' own folder may be where only root gets to.
    let program = place.path().join("tests");
    // By another process: a program that this one wrote could be open in a child of another thread's.
    let own = std::env::current_exe().unwrap();
    assert!(Command::new("cp").args([&own, &program]).status().unwrap().success());
    let status = Command::new("setpriv")
        .args([&format!("--reuid={ORDINARY_ID}"), &format!("--regid={ORDINARY_ID}")])
        .args(["--clear-groups", "--"])
        .arg(&program)
        .args(["--exact", name, "--nocapture"])
        .env(ORDINARY, "1")
        .env("HOME", "/nonexistent")
        .current_dir("/")
        .status()
        .unwrap();
    assert!(status.success(), "as an ordinary user: {status}");
}

fn open_up(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

impl Place {
    fn new() -> Self {
        let all = TempDir::new().unwrap();
        let dir = all.path().join("a dir, with: marks");
        std::fs::create_dir(&dir).unwrap();
        let state = all.path().join("state");
        let backend = BwrapBackend::builder().state_dir(&state).build().unwrap();
        Self { backend, dir, state, _all: all }
    }

    pub(crate) fn request(spec: CreateSandbox) -> Provision {
        Provision::new(SandboxId::new(), OwnerId::new(), spec.spec)
    }

    pub(crate) async fn up(&self, spec: CreateSandbox) -> (Instance, Provision) {
        let request = Self::request(spec);
        (self.backend.provision(&request).await.unwrap(), request)
    }

    pub(crate) async fn down(&self, instance: &Instance) {
        self.backend.teardown(instance).await.unwrap();
    }

    /// An idle snapshot, with the instance that succeeds.
    pub(crate) async fn sealed(
        &self,
        instance: &Instance,
        request: &Provision,
    ) -> (SnapshotData, Instance) {
        let taken = self.snapshot(instance, request, true).await;
        (taken.data, taken.successor.unwrap())
    }

    pub(crate) async fn snapshot(
        &self,
        instance: &Instance,
        request: &Provision,
        idle: bool,
    ) -> SnapshotTaken {
        let mut successor = request.clone();
        successor.instance = sandbox_core::InstanceId::new();
        let id = sandbox_core::SnapshotId::new();
        let request = SnapshotRequest::new(instance.clone(), id, idle, successor);
        self.backend.snapshot(&request).await.unwrap()
    }

    /// Runs a shell line inside; the first line of the result is its exit code if that is not 0.
    pub(crate) async fn sh(&self, instance: &Instance, line: &str) -> String {
        let output = self.run(instance, line).await;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {}\n{stdout}{stderr}", output.status);
        stdout.trim_end().to_owned()
    }

    /// Runs a shell line as a process of the guest's, in a sandbox of its own.
    pub(crate) async fn run_in(&self, spec: CreateSandbox, line: &str) -> Run {
        let manager = SandboxManager::builder()
            .journal(MemoryJournal::new())
            .backend(self.backend.clone())
            .build()
            .await
            .unwrap();
        let sandbox = manager.create(spec, &Suppressed).await.unwrap();
        let run = sandbox.exec(sandbox_core::Command::shell(line), &Suppressed).await.unwrap();
        sandbox.destroy(&Suppressed).await.unwrap();
        run
    }

    pub(crate) async fn run(&self, instance: &Instance, line: &str) -> Output {
        let reach = self.backend.reachability(instance).await.unwrap();
        let hint = reach.report().local_exec_hint.unwrap();
        let enter = hint.strip_suffix("/bin/sh").unwrap();
        let quoted = line.replace('\'', r"'\''");
        Command::new("sh").arg("-c").arg(format!("{enter} /bin/sh -c '{quoted}'")).output().unwrap()
    }
}
