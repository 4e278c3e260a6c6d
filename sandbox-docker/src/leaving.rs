//! Containers that the engine is removing while nobody waits for that.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandbox_core::{Result, SandboxId};
use tokio::task::JoinHandle;

type Removal = JoinHandle<Result<()>>;

/// Of each sandbox the removal that is under way, if one is.
#[derive(Default)]
pub(crate) struct Leaving(Mutex<HashMap<SandboxId, Removal>>);

impl Leaving {
    /// There is none of this sandbox: [`wait_for`](Self::wait_for) was called before.
    pub(crate) fn add(&self, sandbox: &SandboxId, removal: Removal) {
        let mut all = self.all();
        all.retain(|_, removal| !removal.is_finished());
        all.insert(sandbox.clone(), removal);
    }

    pub(crate) async fn wait_for(&self, sandbox: &SandboxId) {
        let removal = self.all().remove(sandbox);
        if let Some(removal) = removal {
            // If it failed, that was told.
            let _ = removal.await;
        }
    }

    pub(crate) async fn wait_for_all(&self) {
        let all: Vec<Removal> = self.all().drain().map(|(_, removal)| removal).collect();
        for removal in all {
            let _ = removal.await;
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<SandboxId, Removal>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
