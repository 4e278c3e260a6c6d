//! Putting a manager together.

use std::{path::PathBuf, sync::Arc};

use super::{Inner, SandboxManager};
use crate::{
    Error, ErrorKind, FileJournal, Journal, ProfileCatalog, Result, SandboxBackend, Secrets,
    backend::default_state_dir,
    route::{Measurements, Probes},
    secret::NoSecrets,
};

/// Puts a [`SandboxManager`] together.
#[derive(Debug, Default)]
#[must_use]
pub struct ManagerBuilder {
    state_dir: Option<PathBuf>,
    journal: Option<Arc<dyn Journal>>,
    backends: Vec<Arc<dyn SandboxBackend>>,
    profiles: Option<ProfileCatalog>,
    secrets: Option<Arc<dyn Secrets>>,
}

impl ManagerBuilder {
    /// Keep the journal in this directory. The default is the user's state directory.
    pub fn state_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.state_dir = Some(dir.into());
        self
    }

    /// Use this journal instead of one in a directory.
    pub fn journal(mut self, journal: impl Journal + 'static) -> Self {
        self.journal = Some(Arc::new(journal));
        self
    }

    /// Add a backend. The first one makes the sandboxes of requests that name none.
    pub fn backend(self, backend: impl SandboxBackend + 'static) -> Self {
        self.shared_backend(Arc::new(backend))
    }

    /// The same for a backend that others use too.
    pub fn shared_backend(mut self, backend: Arc<dyn SandboxBackend>) -> Self {
        self.backends.push(backend);
        self
    }

    /// The profiles that requests can name. The default is those that are shipped.
    pub fn profiles(mut self, profiles: ProfileCatalog) -> Self {
        self.profiles = Some(profiles);
        self
    }

    /// Where secrets come from. Without this there are none.
    pub fn secrets(mut self, secrets: impl Secrets + 'static) -> Self {
        self.secrets = Some(Arc::new(secrets));
        self
    }

    /// Opens the journal and settles what a crash may have left open.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` without a backend, or with two of one id, or with both a directory and a journal;
    /// `PermissionDenied` and the like if the state directory cannot be used.
    pub async fn build(self) -> Result<SandboxManager> {
        let invalid = |message: &str| Error::new(ErrorKind::InvalidSpec, "build", message);
        if self.backends.is_empty() {
            return Err(invalid("a manager needs a backend"));
        }
        for (n, backend) in self.backends.iter().enumerate() {
            if self.backends[..n].iter().any(|other| other.id() == backend.id()) {
                return Err(invalid(&format!("two backends are called {}", backend.id())));
            }
        }
        let mut measurements = Measurements::default();
        let journal = match (self.journal, self.state_dir) {
            (Some(_), Some(_)) => {
                return Err(invalid("give a journal or a state directory, not both"));
            }
            (Some(journal), None) => journal,
            (None, dir) => {
                let dir = dir.map_or_else(default_state_dir, Ok)?;
                measurements = Measurements::in_dir(dir.join("measurements"));
                Arc::new(FileJournal::open(dir.join("journal"))?)
            }
        };
        let profiles = self.profiles.map_or_else(ProfileCatalog::shipped, Ok)?;
        let inner = Inner {
            journal,
            backends: self.backends,
            profiles,
            secrets: self.secrets.unwrap_or_else(|| Arc::new(NoSecrets)),
            probes: Probes::default(),
            measurements,
            known: Default::default(),
        };
        let manager = SandboxManager { inner: Arc::new(inner) };
        manager.reconcile().await?;
        Ok(manager)
    }
}
