//! What every command works with.

use std::{io::IsTerminal, path::PathBuf, process::ExitCode};

use sandbox_core::{
    EnvSecrets, Error, ErrorKind, ProfileCatalog, Sandbox, SandboxManager, default_state_dir,
};

use crate::{
    backends::{Backends, Hosts},
    progress::{ProgressSink, Pulls, Uploads},
};

/// The settings of this call.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) profiles_dir: Option<PathBuf>,
    pub(crate) ssh_config: Option<PathBuf>,
    pub(crate) compose: String,
    pub(crate) compose_env: Vec<String>,
    pub(crate) quiet: bool,
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

    /// Tells how the fetching of images goes on.
    pub(crate) fn pulls(&self) -> Pulls {
        Pulls::new(!self.quiet, std::io::stderr().is_terminal())
    }

    /// Tells how the sending of workspaces goes on.
    pub(crate) fn uploads(&self) -> Uploads {
        Uploads::new(!self.quiet, std::io::stderr().is_terminal())
    }

    /// A manager on the state directory, for the sandboxes that there are.
    pub(crate) async fn manager(&self) -> Result<SandboxManager, Fail> {
        self.manager_on(&Hosts::default()).await
    }

    /// A manager on the state directory that can make sandboxes on these hosts.
    pub(crate) async fn manager_on(&self, hosts: &Hosts) -> Result<SandboxManager, Fail> {
        let Backends { there, missing } = self.backends(hosts).await?;
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
