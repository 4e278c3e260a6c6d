//! Workspaces that move between this machine, containers and other hosts.
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, in functions that clippy cannot tell as such"
)]

use std::{io::Write, os::unix::fs::PermissionsExt, path::PathBuf};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    BackendId, Command, CreateSandbox, ErrorKind, Network, SandboxManager, Suppressed,
};
use sandbox_docker::{DockerBackend, PullPolicy};
use sandbox_ssh::SshBackend;

/// What is in the workspace when it is exported.
const CHANGE: &str = "mkdir -p dir; echo 1 > dir/deep; ln -s nowhere link; echo > run; chmod 750 run; \
                      echo > one; ln one two; touch -d @1000000000 one; echo v2 > README; \
                      head -c 3000000 /dev/zero | tr '\\0' x > large";
const LOOK: &str = "cat README dir/deep; readlink link; stat -c %a run; ls -A; \
                    [ one -ef two ] && echo same; stat -c %Y one; tr -d x < large; stat -c %s large";
const SEEN: &str = "v2\n1\nnowhere\n750\nREADME\ndir\nlarge\nlink\none\nrun\ntwo\nsame\n\
                    1000000000\n3000000\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_moves_between_this_machine_and_another_host() {
    let Some(hosts) = hosts() else { return };
    let scene = Scene::new();
    let bwrap = BwrapBackend::builder().state_dir(scene.path("bwrap")).build().unwrap();
    let builder = SandboxManager::builder().state_dir(scene.path("state"));
    let manager = builder.backend(bwrap).backend(scene.ssh(&hosts)).build().await.unwrap();
    for (from, to) in [("bwrap", "ssh"), ("ssh", "bwrap"), ("ssh", "ssh")] {
        moves(&manager, &scene, from, to).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_moves_between_a_container_and_another_host() {
    let Some(hosts) = hosts() else { return };
    let variable = |name| std::env::var(name).ok();
    let given = (variable("SANDBOX_DOCKER_HOST"), variable("SANDBOX_BUSYBOX_IMAGE"));
    let (Some(engine), Some(image)) = given else {
        return sandbox_conformance::left_out("docker", "see scripts/containers");
    };
    let scene = Scene::new();
    let scope = scene.dir.path().file_name().unwrap().to_string_lossy().into_owned();
    let builder =
        DockerBackend::builder().host(engine).scope(scope).image(image).pull(PullPolicy::Never);
    let docker = builder.build().unwrap();
    let builder = SandboxManager::builder().state_dir(scene.path("state"));
    let manager = builder.backend(docker).backend(scene.ssh(&hosts)).build().await.unwrap();
    for (from, to) in [("docker", "ssh"), ("ssh", "docker")] {
        moves(&manager, &scene, from, to).await;
    }
}

/// A workspace on one backend is exported, and imported on another.
async fn moves(manager: &SandboxManager, scene: &Scene, from: &str, to: &str) {
    let on = |name: &str| CreateSandbox::new().network(Network::Deny).backend(BackendId::new(name));
    let request = on(from).workspace(scene.repository());
    let source = manager.create(request, &Suppressed).await.unwrap();
    let run = source.exec(Command::shell(CHANGE), &Suppressed).await.unwrap();
    assert!(run.outcome.is_success(), "{}", run.stderr.text());
    let snapshot = source.snapshot("", &Suppressed).await.unwrap();
    source.exec(Command::shell("echo v3 > README"), &Suppressed).await.unwrap();
    let mut archive = Vec::new();
    manager.export(&snapshot.id, &mut archive, &Suppressed).await.unwrap();
    assert_eq!(manager.list().await.unwrap().len(), 1, "what was made in passing is gone");
    let made = manager.import(Some("moved"), on(to), &archive[..], &Suppressed).await.unwrap();
    let run = made.exec(Command::shell(LOOK), &Suppressed).await.unwrap();
    assert_eq!(run.stdout.text(), SEEN, "{from} to {to}: {}", run.stderr.text());
    // It is a sandbox like another.
    let taken = made.snapshot("imported", &Suppressed).await.unwrap();
    made.rewind(&taken.id, &Suppressed).await.unwrap();
    let run = made.exec(Command::shell(LOOK), &Suppressed).await.unwrap();
    assert_eq!(run.stdout.text(), SEEN, "{from} to {to}, rewound: {}", run.stderr.text());
    made.destroy(&Suppressed).await.unwrap();
    // Half an archive is no workspace, and leaves none.
    let cut = &archive[..archive.len() / 2];
    let error = manager.import(None, on(to), cut, &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{error}");
    source.destroy(&Suppressed).await.unwrap();
    assert_eq!(manager.list().await.unwrap().len(), 0);
    for backend in [from, to] {
        let left = scene.instances(backend);
        assert!(left.is_empty(), "{backend} has {left:?}");
    }
}

/// Where the hosts are; `None`, and a word about it, where there are none.
fn hosts() -> Option<PathBuf> {
    let hosts = std::env::var_os("SANDBOX_SSH_HOSTS").map(PathBuf::from);
    if hosts.is_none() {
        let _ = std::io::stderr().write_all(b"skipped: SANDBOX_SSH_HOSTS is not set\n");
    }
    hosts
}

struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn ssh(&self, hosts: &std::path::Path) -> SshBackend {
        let builder = SshBackend::builder().host("near").config_file(hosts.join("config"));
        builder.state_dir(self.path("host")).program_dir(hosts.join("cache")).build().unwrap()
    }

    /// A directory with one file, for a workspace.
    fn repository(&self) -> PathBuf {
        let path = self.path("repository");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("README"), "v1\n").unwrap();
        path
    }

    /// What a backend keeps of instances on this machine's disk.
    fn instances(&self, backend: &str) -> Vec<std::ffi::OsString> {
        let dir = match backend {
            "bwrap" => self.path("bwrap/instances"),
            "ssh" => self.path("host/bwrap/instances"),
            _ => return Vec::new(),
        };
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }
}
