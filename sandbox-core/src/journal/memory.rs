//! Histories in memory, for tests and for sandboxes that need not outlive their process.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;

use super::{Draft, Journal, JournalLock};
use crate::{Name, OwnerId, Result, SandboxEvent, SandboxId};

/// A journal that ends with its process.
#[derive(Debug)]
pub struct MemoryJournal {
    owner: OwnerId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    histories: BTreeMap<SandboxId, Vec<SandboxEvent>>,
    retired: BTreeSet<SandboxId>,
    names: HashMap<Name, SandboxId>,
    locks: HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>,
}

impl MemoryJournal {
    /// An empty one, with an owner's mark of its own.
    #[must_use]
    pub fn new() -> Self {
        Self { owner: OwnerId::new(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryJournal {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Journal for MemoryJournal {
    fn owner(&self) -> OwnerId {
        self.owner.clone()
    }

    async fn append(&self, record: Draft) -> Result<SandboxEvent> {
        let mut state = self.state();
        let history = state.histories.entry(record.sandbox.clone()).or_default();
        let event = record.into_event(history.len() as u64 + 1);
        history.push(event.clone());
        Ok(event)
    }

    async fn read(&self, sandbox: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>> {
        let state = self.state();
        let history = state.histories.get(sandbox).map(Vec::as_slice).unwrap_or_default();
        let skip = usize::try_from(after).unwrap_or(usize::MAX).min(history.len());
        Ok(history[skip..].to_vec())
    }

    async fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        Ok(self.state().histories.keys().cloned().collect())
    }

    async fn live(&self) -> Result<Vec<SandboxId>> {
        let state = self.state();
        Ok(state.histories.keys().filter(|id| !state.retired.contains(*id)).cloned().collect())
    }

    async fn retire(&self, sandbox: &SandboxId) -> Result<()> {
        self.state().retired.insert(sandbox.clone());
        Ok(())
    }

    async fn lock(&self, sandbox: &SandboxId) -> Result<JournalLock> {
        let lock = Arc::clone(self.state().locks.entry(sandbox.clone()).or_default());
        Ok(JournalLock::new(lock.lock_owned().await))
    }

    async fn claim(&self, name: &Name, sandbox: &SandboxId) -> Result<Option<SandboxId>> {
        let mut state = self.state();
        let holder = state.names.entry(name.clone()).or_insert_with(|| sandbox.clone());
        Ok((holder != sandbox).then(|| holder.clone()))
    }

    async fn resolve(&self, name: &Name) -> Result<Option<SandboxId>> {
        Ok(self.state().names.get(name).cloned())
    }

    async fn release(&self, name: &Name, sandbox: &SandboxId) -> Result<()> {
        let mut state = self.state();
        if state.names.get(name) == Some(sandbox) {
            state.names.remove(name);
        }
        Ok(())
    }
}
