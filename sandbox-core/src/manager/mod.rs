//! The manager: makes, finds and forks sandboxes.

mod archive;
mod attach;
mod builder;
mod call;
mod create;
pub(crate) mod egress;
pub(crate) mod ends;
mod fresh;
mod life;
mod lifetime;
mod reap;
mod reconcile;
mod setup;
mod shared;
mod snapshots;
mod watch;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

pub(crate) use attach::detach;
pub use builder::ManagerBuilder;
pub(crate) use call::{Call, Recorder};
pub(crate) use fresh::Fresh;
pub(crate) use life::{destroy, pause, recreate, resume, start, stop};
pub(crate) use lifetime::{extend_ttl, renew_lease};
pub use reap::{Leftover, LeftoverKind, ReapPolicy};
pub(crate) use shared::{Repeats, Shared, running_instance};
pub use snapshots::Retention;
pub(crate) use snapshots::{delete, prune, rewind, size, snapshot};
pub use watch::Watch;

use crate::{
    BackendId, Capabilities, CreateSandbox, Error, ErrorKind, Journal, Name, ProfileCatalog,
    Result, Sandbox, SandboxBackend, SandboxEvent, SandboxId, SandboxInfo, Secrets, SnapshotId,
    TurnEventSink,
    info::info,
    record::Record,
    route::{Measurements, Probes},
};

/// Makes, finds and forks sandboxes, and keeps their history. Cheap to clone.
///
/// Everything that a manager knows is in its journal: any number of managers, in any number of
/// processes, can work on one state directory at once.
#[derive(Debug, Clone)]
pub struct SandboxManager {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) backends: Vec<Arc<dyn SandboxBackend>>,
    pub(crate) profiles: ProfileCatalog,
    pub(crate) secrets: Arc<dyn Secrets>,
    pub(crate) probes: Probes,
    pub(crate) measurements: Measurements,
    known: Mutex<HashMap<SandboxId, Arc<Shared>>>,
}

impl SandboxManager {
    pub(crate) fn of(inner: Arc<Inner>) -> Self {
        Self { inner }
    }

    /// Begins to put one together.
    pub fn builder() -> ManagerBuilder {
        ManagerBuilder::default()
    }

    /// Makes a new sandbox without a name.
    ///
    /// Returns when its guest has answered. Dropping the future undoes what was begun.
    ///
    /// # Errors
    ///
    /// `InvalidSpec`, `NotFound` or `Unsupported` before anything is made; otherwise what the backend
    /// says, and then nothing is left of it but its history.
    pub async fn create(
        &self,
        request: CreateSandbox,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        self.create_new(None, request, sink).await
    }

    /// The sandbox of this name: the one that there is, or a new one.
    ///
    /// Of many callers at once, in many processes, one makes it and all get it. What counts as the same
    /// is the *requested* spec: a sandbox that was rewound is the same and stays as it is. A stopped one
    /// is started.
    ///
    /// # Errors
    ///
    /// `SpecMismatch` if there is one with another spec (the message names the fields, the sandbox is
    /// untouched); `Lost` if its instance is gone; otherwise as [`create`](Self::create).
    pub async fn acquire(
        &self,
        name: &str,
        request: CreateSandbox,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let name: Name = name.parse()?;
        self.acquire_named(name, request, sink).await
    }

    /// A handle to the sandbox of this id or name, whatever state it is in.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none in this journal.
    pub async fn open(&self, id_or_name: &str) -> Result<Sandbox> {
        let id = if id_or_name.starts_with("sbx_") {
            id_or_name.parse()?
        } else {
            let name: Name = id_or_name.parse()?;
            self.inner.journal.resolve(&name).await?.ok_or_else(|| {
                let message = format!("there is no sandbox named {name} in this journal");
                Error::new(ErrorKind::NotFound, "open", message)
            })?
        };
        let shared = self.inner.shared(&id);
        shared.record(&self.inner).await?;
        Ok(self.handle(&shared))
    }

    /// Every sandbox that has not come to its end, oldest first. Does not read the others' histories.
    ///
    /// # Errors
    ///
    /// `Journal` if they cannot be listed. One whose own history cannot be read is left out, with a
    /// warning.
    pub async fn list(&self) -> Result<Vec<SandboxInfo>> {
        let mut found = self.infos(self.inner.journal.live().await?).await;
        found.retain(|info| info.state.is_live());
        Ok(found)
    }

    /// Every sandbox of this journal, oldest first, destroyed ones and those that were never made too.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub async fn list_all(&self) -> Result<Vec<SandboxInfo>> {
        Ok(self.infos(self.inner.journal.sandboxes().await?).await)
    }

    async fn infos(&self, ids: Vec<SandboxId>) -> Vec<SandboxInfo> {
        let mut found = Vec::new();
        for id in ids {
            match self.inner.shared(&id).try_record(&self.inner).await {
                Ok(Some(record)) => found.push(info(&record)),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "left out of the list"),
            }
        }
        found
    }

    /// Makes a new sandbox from a snapshot of another: its files, the spec of that sandbox, and an
    /// identity of its own.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such snapshot; otherwise as [`create`](Self::create).
    pub async fn fork(
        &self,
        snapshot: &SnapshotId,
        name: Option<&str>,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let name = name.map(str::parse).transpose()?;
        self.fork_snapshot(snapshot, name, sink).await
    }

    /// A sandbox's records after this `seq` (0: all), in order.
    ///
    /// # Errors
    ///
    /// `Journal` if they cannot be read.
    pub async fn history(&self, id: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>> {
        self.inner.journal.read(id, after).await
    }

    /// What each backend can do on this host, or why it can do nothing. Looks now; routing believes it
    /// for a minute.
    pub async fn backends(&self) -> Vec<(BackendId, Result<Capabilities>)> {
        let mut found = Vec::new();
        for backend in &self.inner.backends {
            found.push((backend.id(), self.inner.probes.now(backend).await));
        }
        found
    }

    /// The profiles that requests can name.
    #[must_use]
    pub fn profiles(&self) -> &ProfileCatalog {
        &self.inner.profiles
    }

    fn handle(&self, shared: &Arc<Shared>) -> Sandbox {
        Sandbox::new(Arc::clone(&self.inner), Arc::clone(shared))
    }

    /// The live sandboxes' records.
    async fn live(&self) -> Result<Vec<Arc<Shared>>> {
        let mut live = Vec::new();
        for id in self.inner.journal.live().await? {
            let shared = self.inner.shared(&id);
            match shared.try_record(&self.inner).await {
                Ok(Some(record)) if record.state.is_live() => live.push(shared),
                Ok(Some(record)) => self.forget(&record).await,
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "a history cannot be read"),
            }
        }
        Ok(live)
    }

    /// Does what was left to do for a sandbox that has come to its end: its name is free, and nobody need
    /// read its history again.
    async fn forget(&self, record: &Record) {
        if let Err(error) = self.inner.forget(record).await {
            tracing::warn!(%error, "a sandbox that has ended is still looked at");
        }
    }
}

impl Inner {
    /// Frees the name of a sandbox that has come to its end, and its place among the living.
    async fn forget(&self, record: &Record) -> Result<()> {
        if let Some(name) = &record.name {
            self.journal.release(name, &record.id).await?;
        }
        self.journal.retire(&record.id).await
    }

    pub(crate) fn shared(&self, id: &SandboxId) -> Arc<Shared> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(id.clone()).or_insert_with(|| Arc::new(Shared::new(id.clone()))))
    }
}
