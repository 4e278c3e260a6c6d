//! Clearing what is left over: sandboxes whose time is over, and instances that belong to none.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{Call, SandboxManager, Shared};
use crate::{
    BackendId, Error, Found, InstanceId, Known, Result, SandboxId, SandboxState, TurnEventSink,
    record::Intent,
};

/// What to clear. The default only reports.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct ReapPolicy {
    /// Really remove it.
    pub apply: bool,
    /// Only what is at least so old.
    pub older_than: Duration,
    /// Only what is left over like this.
    pub only: Option<LeftoverKind>,
}

/// Something that is left over.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Leftover {
    /// What it is.
    pub kind: LeftoverKind,
    /// The sandbox that it is, or was made for.
    pub sandbox: SandboxId,
    /// The instance, where it is one that belongs to no sandbox.
    pub instance: Option<InstanceId>,
    /// By which backend.
    pub backend: Option<BackendId>,
    /// Whether it was removed.
    pub removed: bool,
    /// Why it could not be.
    pub error: Option<String>,
}

/// What is left over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LeftoverKind {
    /// A sandbox whose TTL, idle limit or lease was over.
    Expired,
    /// An instance that its sandbox does not know (any more).
    Orphaned,
}

impl ReapPolicy {
    /// Remove what is found.
    #[must_use]
    pub fn apply() -> Self {
        Self { apply: true, ..Self::default() }
    }

    /// Only what is at least so old.
    #[must_use]
    pub fn older_than(mut self, age: Duration) -> Self {
        self.older_than = age;
        self
    }

    /// Only what is left over like this.
    #[must_use]
    pub fn only(mut self, kind: LeftoverKind) -> Self {
        self.only = Some(kind);
        self
    }

    fn wants(&self, kind: LeftoverKind) -> bool {
        self.only.is_none_or(|only| only == kind)
    }
}

impl SandboxManager {
    /// Finds, and by policy removes, what is left over of this journal's: sandboxes whose time is over,
    /// and instances that belong to none. What another process is at work on, and what carries another
    /// owner's mark, is never touched.
    ///
    /// # Errors
    ///
    /// If the sandboxes or a backend's instances cannot be listed. What cannot be removed is in the
    /// result.
    pub async fn reap(
        &self,
        policy: ReapPolicy,
        sink: &dyn TurnEventSink,
    ) -> Result<Vec<Leftover>> {
        self.reconcile().await?;
        let mut leftovers = Vec::new();
        if policy.wants(LeftoverKind::Expired) {
            leftovers = self.expired(policy, sink).await?;
        }
        if !policy.wants(LeftoverKind::Orphaned) {
            return Ok(leftovers);
        }
        for backend in &self.inner.backends {
            let named = |error: Error| error.with_backend(&backend.id());
            for found in backend.inventory().await.map_err(named)? {
                if found.owner == self.inner.journal.owner()
                    && age(found.created_at) >= policy.older_than
                    && let Some(leftover) = self.orphan(policy, found).await?
                {
                    leftovers.push(leftover);
                }
            }
        }
        Ok(leftovers)
    }

    /// The sandboxes whose time is over, whether or not their guest has noticed.
    async fn expired(&self, policy: ReapPolicy, sink: &dyn TurnEventSink) -> Result<Vec<Leftover>> {
        let mut leftovers = Vec::new();
        for shared in self.live().await? {
            let record = shared.record(&self.inner).await?;
            let over = record.state == SandboxState::Expired
                || record.state.is_live()
                    && record.expires_at.is_some_and(|at| at <= Timestamp::now());
            if !over || age(record.created_at) < policy.older_than {
                continue;
            }
            let mut leftover = Leftover {
                kind: LeftoverKind::Expired,
                sandbox: shared.id.clone(),
                instance: None,
                backend: record.backend.clone(),
                removed: false,
                error: None,
            };
            if policy.apply {
                let removed = self.remove_expired(&shared, sink).await;
                leftover.removed = removed.is_ok();
                leftover.error = removed.err().map(|error| error.to_string());
            }
            leftovers.push(leftover);
        }
        Ok(leftovers)
    }

    async fn remove_expired(&self, shared: &Arc<Shared>, sink: &dyn TurnEventSink) -> Result<()> {
        let record = shared.record(&self.inner).await?;
        if record.state != SandboxState::Expired {
            let mut call = Call::new(&self.inner, shared, record.consumer.clone(), sink);
            call.record(Known::Expired { reason: "its TTL was over".into() }).await?;
            call.finish(Ok(()))?;
        }
        self.handle(shared).destroy(sink).await
    }

    /// An instance as a leftover, unless its sandbox knows it.
    async fn orphan(&self, policy: ReapPolicy, found: Found) -> Result<Option<Leftover>> {
        let shared = self.inner.shared(&found.instance.sandbox);
        // A change in progress may be about to record it.
        let lock = self.inner.journal.lock(&shared.id);
        let Ok(lock) = tokio::time::timeout(Duration::from_millis(5), lock).await else {
            return Ok(None);
        };
        let _lock = lock?;
        let known = self.inner.shared(&shared.id).try_record(&self.inner).await?;
        if let Some(record) = &known {
            let current = record.instance.as_ref().map(|instance| &instance.id);
            let begun = match &record.open {
                Some(
                    Intent::Provision { instance, .. }
                    | Intent::Rewind { instance, .. }
                    | Intent::Snapshot { successor: instance, .. },
                ) => Some(instance),
                _ => None,
            };
            if current == Some(&found.instance.id) || begun == Some(&found.instance.id) {
                return Ok(None);
            }
        }
        let backend = self.inner.backend(&found.instance.backend)?;
        let mut leftover = Leftover {
            kind: LeftoverKind::Orphaned,
            sandbox: shared.id.clone(),
            instance: Some(found.instance.id.clone()),
            backend: Some(backend.id()),
            removed: false,
            error: None,
        };
        if policy.apply {
            let removed = backend.teardown(&found.instance).await;
            leftover.removed = removed.is_ok();
            leftover.error = removed.err().map(|error| error.to_string());
        }
        Ok(Some(leftover))
    }
}

fn age(since: Timestamp) -> Duration {
    let age: SignedDuration = Timestamp::now().duration_since(since);
    Duration::try_from(age).unwrap_or_default()
}
