//! Where a scene's sandboxes are: on this host by bubblewrap, or in a container engine.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command as Program,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use sandbox_bwrap::BwrapBackend;
use sandbox_conformance::Check;
use sandbox_core::{Result, SandboxBackend};
use sandbox_docker::{DockerBackend, PullPolicy};

const USER: &str = "SANDBOX_FAULTS_USER";
const ENGINE: &str = "SANDBOX_FAULTS_ENGINE";
const HOST: &str = "SANDBOX_DOCKER_HOST";
const IMAGE: &str = "SANDBOX_BUSYBOX_IMAGE";

/// Where sandboxes are.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// This host; with a user whose processes are one scene's, where there can be one.
    Here { user: Option<u32> },
    /// An engine, and an image that it has.
    Engine { host: String, image: String },
}

impl Place {
    /// This host, for one scene.
    pub(crate) fn here() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let user =
            is_root().then(|| 1_910_000_000 + std::process::id() % 100_000 * 100 + count % 100);
        Self::Here { user }
    }

    /// The engine that `scripts/containers` provides; why not, where there is none and none is required.
    pub(crate) fn engine() -> std::result::Result<Self, String> {
        match (std::env::var(HOST), std::env::var(IMAGE)) {
            (Ok(host), Ok(image)) => Ok(Self::Engine { host, image }),
            _ => {
                let why = format!("{HOST} and {IMAGE} are not set; see scripts/containers");
                sandbox_conformance::left_out("docker", &why);
                Err(why)
            }
        }
    }

    /// The same for another scene.
    pub(crate) fn another(&self) -> Self {
        match self {
            Self::Here { .. } => Self::here(),
            engine @ Self::Engine { .. } => engine.clone(),
        }
    }

    /// What a process was told by [`tell`](Self::tell).
    pub(crate) fn told() -> Option<Self> {
        if std::env::var_os(ENGINE).is_some() {
            return Self::engine().ok();
        }
        Some(Self::Here { user: std::env::var(USER).ok().and_then(|user| user.parse().ok()) })
    }

    /// Tells a process that is to work on the same scene.
    pub(crate) fn tell(&self, program: &mut Program) {
        program.env_remove(USER).env_remove(ENGINE);
        match self {
            Self::Here { user: Some(user) } => program.env(USER, user.to_string()),
            Self::Here { user: None } => program,
            Self::Engine { .. } => program.env(ENGINE, "1"),
        };
    }

    /// The backend of the scene in this directory.
    pub(crate) fn backend(&self, dir: &Path) -> Result<Arc<dyn SandboxBackend>> {
        match self {
            Self::Here { user } => {
                let mut builder = BwrapBackend::builder().state_dir(dir.join("state/bwrap"));
                if let Some(user) = *user {
                    builder = builder.run_as(user, user);
                }
                Ok(Arc::new(builder.build()?))
            }
            Self::Engine { host, image } => {
                let builder = DockerBackend::builder().host(host).image(image).scope(scope(dir));
                Ok(Arc::new(builder.pull(PullPolicy::Never).build()?))
            }
        }
    }

    /// What is there of the scene in this directory, but for its files on this host.
    pub(crate) fn left(&self, dir: &Path) -> Check<Vec<String>> {
        match self {
            Self::Here { user: Some(user) } => processes(*user),
            Self::Here { user: None } => Ok(Vec::new()),
            Self::Engine { host, .. } => {
                let mut found = containers(host, dir)?;
                found.extend(images(host, dir)?);
                Ok(found)
            }
        }
    }

    /// Removes what is there of it, as well as that can be done.
    pub(crate) fn clear(&self, dir: &Path) {
        let Self::Engine { host, .. } = self else { return };
        for container in containers(host, dir).unwrap_or_default() {
            let _ = docker(host, &["rm", "--force", "--volumes", &container]);
        }
        for image in images(host, dir).unwrap_or_default() {
            let _ = docker(host, &["rmi", "--force", &image]);
        }
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// What tells one scene's containers from another's.
fn scope(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn containers(host: &str, dir: &Path) -> Check<Vec<String>> {
    let filter = format!("label=sandboxer.scope={}", scope(dir));
    docker(host, &["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"])
}

fn images(host: &str, dir: &Path) -> Check<Vec<String>> {
    let filter = format!("label=sandboxer.scope={}", scope(dir));
    docker(host, &["images", "--all", "--quiet", "--filter", &filter])
}

/// What the `docker` program says, line by line.
fn docker(host: &str, arguments: &[&str]) -> Check<Vec<String>> {
    let output = Program::new("docker").args(["--host", host]).args(arguments).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("docker {arguments:?}: {said}").into());
    }
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
}

/// A user's processes; those that have ended and are not waited for yet count too.
fn processes(user: u32) -> Check<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let is_theirs = fs::metadata(entry.path()).is_ok_and(|meta| meta.uid() == user);
        let status = entry.path().join("status");
        // A process that is not dumpable looks like root's.
        let uids = fs::read_to_string(status).unwrap_or_default();
        let theirs = format!("Uid:\t{user}\t");
        if is_theirs && entry.file_name().to_string_lossy().parse::<u32>().is_ok()
            || uids.contains(&theirs)
        {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}
