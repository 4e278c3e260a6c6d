//! Engines, and a manager on one.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_core::{CollectSink, SandboxManager, TurnId};
use sandbox_docker::{DockerBackend, DockerBackendBuilder, PullPolicy};
use tempfile::TempDir;

/// How long to wait for what must come. Nothing measures it; it tells a hang.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// An engine and its images; `None`, and a word about it, where there is none and none is required.
pub(crate) fn given() -> Option<Given> {
    let variable = |name| std::env::var(name).ok();
    let found = (variable("SANDBOX_DOCKER_HOST"), variable("SANDBOX_BUSYBOX_IMAGE"));
    if let (Some(host), Some(busybox)) = found {
        return Some(Given { host, busybox });
    }
    sandbox_conformance::left_out("docker", "see scripts/containers");
    None
}

/// The engine that is given.
pub(crate) struct Given {
    pub(crate) host: String,
    pub(crate) busybox: String,
}

/// A manager with a state and a scope of its own.
pub(crate) struct Scene {
    pub(crate) host: String,
    pub(crate) dir: TempDir,
    pub(crate) backend: DockerBackend,
    pub(crate) manager: SandboxManager,
    pub(crate) sink: CollectSink,
}

impl Scene {
    pub(crate) async fn new(host: &str, image: &str) -> Self {
        Self::with(host, image, |builder| builder).await
    }

    pub(crate) async fn with(
        host: &str,
        image: &str,
        more: impl FnOnce(DockerBackendBuilder) -> DockerBackendBuilder,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        let scope = dir.path().file_name().unwrap().to_string_lossy().into_owned();
        let builder =
            DockerBackend::builder().host(host).scope(scope).image(image).pull(PullPolicy::Never);
        let backend = more(builder).build().unwrap();
        let manager = SandboxManager::builder()
            .state_dir(dir.path().join("state"))
            .shared_backend(Arc::new(backend.clone()))
            .build()
            .await
            .unwrap();
        let sink = CollectSink::new(TurnId::new("turn"));
        Self { host: host.to_owned(), dir, backend, manager, sink }
    }

    /// A directory with one file, for a workspace.
    pub(crate) fn repository(&self) -> PathBuf {
        let path = self.dir.path().join("repository");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("README"), "v1\n").unwrap();
        path
    }

    pub(crate) fn docker(&self, arguments: &[&str]) -> String {
        docker(&self.host, arguments).unwrap()
    }

    /// The container of the only sandbox.
    pub(crate) async fn container(&self) -> String {
        use sandbox_core::SandboxBackend;
        let found = self.backend.inventory().await.unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].instance.data["container"].as_str().unwrap().to_owned()
    }

    /// What of this scope is there: containers and images.
    pub(crate) fn leftovers(&self) -> String {
        let scope = self.dir.path().file_name().unwrap().to_string_lossy().into_owned();
        let filter = format!("label=sandboxer.scope={scope}");
        let containers =
            self.docker(&["ps", "--all", "--quiet", "--filter", &filter, "--format", "{{.Names}}"]);
        let images = self.docker(&[
            "images",
            "--all",
            "--filter",
            &filter,
            "--format",
            "{{.Repository}}:{{.Tag}}",
        ]);
        containers + &images
    }
}

/// Runs the `docker` program.
pub(crate) fn docker(host: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("docker").args(["--host", host]).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    Err(format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// An engine of a test's own, ended with it.
pub(crate) struct Engine {
    dir: TempDir,
    daemon: Option<Child>,
}

impl Engine {
    /// Starts one; with a small disk it has 96 MiB.
    pub(crate) fn start(small_disk: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir_in("/tmp").unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        if small_disk {
            let mounted = Command::new("mount")
                .args(["-t", "tmpfs", "-o", "size=96m", "tmpfs"])
                .arg(&data)
                .status()
                .unwrap();
            assert!(mounted.success());
        }
        let mut engine = Self { dir, daemon: None };
        engine.restart();
        engine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn host(&self) -> String {
        format!("unix://{}", self.path("docker.sock").display())
    }

    /// Kills the daemon and nothing else.
    pub(crate) fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.daemon = Some(self.spawn());
        let begin = Instant::now();
        while docker(&self.host(), &["version"]).is_err() {
            assert!(begin.elapsed() < SOON, "{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
            // One that was started while the former one's containerd was still ending gives up.
            if let Ok(Some(_)) = self.daemon.as_mut().unwrap().try_wait() {
                self.daemon = Some(self.spawn());
            }
        }
    }

    fn spawn(&self) -> Child {
        let log =
            std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let _ = std::fs::remove_file(self.path("docker.pid"));
        Command::new("dockerd")
            .args(["--host", &self.host(), "--live-restore", "--log-level", "warn"])
            .args(["--bridge", "none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"])
            .arg("--config-file")
            .arg(self.path("config.json"))
            .arg("--data-root")
            .arg(self.path("data"))
            .arg("--exec-root")
            .arg(self.path("exec"))
            .arg("--pidfile")
            .arg(self.path("docker.pid"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Brings an image in from another engine.
    pub(crate) fn take(&self, from: &str, image: &str) {
        let archive = self.path("image.tar");
        docker(from, &["save", "--output", archive.to_str().unwrap(), image]).unwrap();
        docker(&self.host(), &["load", "--input", archive.to_str().unwrap()]).unwrap();
        std::fs::remove_file(archive).unwrap();
    }
}

/// Whether this is a containerd that has not ended, whoever has to reap it.
fn is_containerd(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    stat.is_ok_and(|stat| {
        stat.contains("(containerd)")
            && !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z")
    })
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Ok(all) = docker(&self.host(), &["ps", "--all", "--quiet"]) {
            for container in all.split_whitespace() {
                let _ = docker(&self.host(), &["rm", "--force", container]);
            }
        }
        if let Some(mut daemon) = self.daemon.take() {
            let _ = Command::new("kill").arg(daemon.id().to_string()).status();
            let _ = daemon.wait();
        }
        // One that outlived a daemon that was killed may outlive the next one too.
        let pid = std::fs::read_to_string(self.path("exec/containerd/containerd.pid"));
        let pid = pid.unwrap_or_default().trim().to_owned();
        let begin = Instant::now();
        while is_containerd(&pid) && begin.elapsed() < SOON {
            let _ = Command::new("kill").arg(&pid).stderr(Stdio::null()).status();
            std::thread::sleep(Duration::from_millis(50));
        }
        // Whatever they left mounted keeps the directory from being removed.
        for _ in 0..3 {
            let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
            let below = |line: &&str| line.contains(self.dir.path().to_str().unwrap_or("\0"));
            for line in mounts.lines().filter(below).collect::<Vec<_>>().into_iter().rev() {
                let target = line.split(' ').nth(1).unwrap_or_default();
                let _ = Command::new("umount").arg(target).stderr(Stdio::null()).status();
            }
        }
    }
}
