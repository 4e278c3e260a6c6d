//! What every command works with.

use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    EnvSecrets, Error, ErrorKind, ProfileCatalog, Sandbox, SandboxBackend, SandboxManager,
    default_state_dir,
};
use sandbox_docker::DockerBackend;
use sha2::{Digest, Sha256};

use crate::progress::{ProgressSink, Pulls};

/// Where a container engine listens if nobody says otherwise.
const DOCKER_SOCKET: &str = "/var/run/docker.sock";

/// The settings of this call.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) profiles_dir: Option<PathBuf>,
    pub(crate) quiet: bool,
}

/// The backends that this host has the programs for, and why the others are not among them.
#[derive(Debug, Default)]
pub(crate) struct Backends {
    pub(crate) there: Vec<Arc<dyn SandboxBackend>>,
    pub(crate) missing: Vec<(&'static str, Error)>,
}

impl Backends {
    fn add<B: SandboxBackend + 'static>(&mut self, id: &'static str, made: Result<B, Error>) {
        match made {
            Ok(backend) => self.there.push(Arc::new(backend)),
            Err(error) => self.missing.push((id, error)),
        }
    }
}

/// Why a call failed, and what it exits with.
#[derive(Debug)]
pub(crate) struct Fail {
    pub(crate) code: u8,
    message: String,
}

impl Fail {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The same with another code.
    pub(crate) fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    pub(crate) fn tell(self) -> ExitCode {
        eprintln!("sandboxer: {}", self.message);
        ExitCode::from(self.code)
    }
}

impl From<Error> for Fail {
    fn from(error: Error) -> Self {
        Self::new(1, error.to_string())
    }
}

impl From<std::io::Error> for Fail {
    fn from(error: std::io::Error) -> Self {
        Self::new(1, error.to_string())
    }
}

impl App {
    pub(crate) fn state_dir(&self) -> Result<PathBuf, Fail> {
        match &self.state_dir {
            Some(dir) => Ok(std::path::absolute(dir)?),
            None => Ok(default_state_dir()?),
        }
    }

    pub(crate) fn profiles(&self) -> Result<ProfileCatalog, Fail> {
        let shipped = ProfileCatalog::shipped()?;
        match &self.profiles_dir {
            Some(dir) => Ok(shipped.overlaid_by(ProfileCatalog::from_dir(dir)?)),
            None => Ok(shipped),
        }
    }

    pub(crate) fn backends(&self) -> Result<Backends, Fail> {
        let state = self.state_dir()?;
        let mut backends = Backends::default();
        let bwrap = BwrapBackend::builder().state_dir(state.join("bwrap")).build();
        backends.add("ext.bwrap", bwrap);
        backends.add("ext.docker", self.docker(&state));
        Ok(backends)
    }

    /// The container engine that the `docker` program would use, if there is one.
    fn docker(&self, state: &Path) -> Result<DockerBackend, Error> {
        let named = ["DOCKER_HOST", "DOCKER_CONTEXT"].iter().any(|v| std::env::var_os(v).is_some());
        if !named && !Path::new(DOCKER_SOCKET).exists() {
            let message = format!(
                "there is no container engine: neither DOCKER_HOST nor DOCKER_CONTEXT is set, and there is \
                 no {DOCKER_SOCKET}"
            );
            return Err(Error::new(ErrorKind::Unavailable, "connect", message));
        }
        // State directories see nothing of each other's containers.
        use std::os::unix::ffi::OsStrExt;
        let digest = Sha256::digest(state.as_os_str().as_bytes());
        let scope: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let pulls = self.pulls();
        DockerBackend::builder()
            .scope(format!("sandboxer-{scope}"))
            .on_pull(move |progress| pulls.tell(progress))
            .build()
    }

    /// Tells how the fetching of images goes on.
    fn pulls(&self) -> Pulls {
        Pulls::new(!self.quiet, std::io::stderr().is_terminal())
    }

    /// A manager on the state directory.
    pub(crate) async fn manager(&self) -> Result<SandboxManager, Fail> {
        let Backends { there, missing } = self.backends()?;
        if there.is_empty() {
            let why: Vec<String> = missing.iter().map(|(id, why)| format!("{id}: {why}")).collect();
            return Err(Fail::new(1, format!("no backend can be used here: {}", why.join("; "))));
        }
        let mut builder = SandboxManager::builder()
            .state_dir(self.state_dir()?)
            .profiles(self.profiles()?)
            .secrets(EnvSecrets);
        for backend in there {
            builder = builder.shared_backend(backend);
        }
        Ok(builder.build().await?)
    }

    /// The sandbox of this id or name.
    pub(crate) async fn open(&self, id_or_name: &str) -> Result<Sandbox, Fail> {
        Ok(self.manager().await?.open(id_or_name).await?)
    }

    /// A sink that tells on standard error what goes on.
    pub(crate) fn sink(&self) -> ProgressSink {
        ProgressSink::new(!self.quiet, std::io::stderr().is_terminal())
    }
}

/// A usage error that only the sandbox could tell.
pub(crate) fn usage(message: impl Into<String>) -> Fail {
    Fail::new(2, message)
}

/// Whether an error says that there is no such thing.
pub(crate) fn is_missing(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound
}
