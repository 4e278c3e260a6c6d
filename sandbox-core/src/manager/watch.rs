//! Following a history as it grows.

use std::{sync::Arc, time::Duration};

use super::{Inner, SandboxManager, Shared};
use crate::{Result, SandboxEvent, SandboxId};

/// How often other processes' records are looked for.
const POLL: Duration = Duration::from_millis(100);

/// A history, record after record; see [`SandboxManager::watch`].
#[derive(Debug)]
pub struct Watch {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    seen: u64,
    ready: std::collections::VecDeque<SandboxEvent>,
}

impl SandboxManager {
    /// Follows a sandbox's history from this `seq` on (0: from its beginning), whichever process
    /// writes it.
    #[must_use]
    pub fn watch(&self, id: &SandboxId, after: u64) -> Watch {
        Watch {
            inner: Arc::clone(&self.inner),
            shared: self.inner.shared(id),
            seen: after,
            ready: Default::default(),
        }
    }
}

impl Watch {
    /// The next record, waiting for it. Safe to cancel.
    ///
    /// # Errors
    ///
    /// `Journal` if the history cannot be read.
    pub async fn next(&mut self) -> Result<SandboxEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.seen = event.seq;
                return Ok(event);
            }
            let arrived = self.shared.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            let new = self.inner.journal.read(&self.shared.id, self.seen).await?;
            if new.is_empty() {
                // Ours are announced; others' have to be looked for.
                let _ = tokio::time::timeout(POLL, arrived).await;
            }
            self.ready.extend(new);
        }
    }
}
