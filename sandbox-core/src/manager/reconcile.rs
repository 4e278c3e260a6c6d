//! Settling what a crash left open: by what the backend says is there.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{
    Recorder, SandboxManager, ends,
    life::{self, finish_destroying},
    lifetime, snapshots,
};
use crate::{
    Error, Instance, InstanceState, Known, Result, SandboxState,
    record::{Intent, Record},
};

/// How many sandboxes are settled at the same time.
const AT_ONCE: usize = 32;

const VANISHED: &str = "the harness ended in the middle of it";

impl SandboxManager {
    /// Settles every change that was begun and not ended by a process that is gone, and records
    /// instances that vanished as lost. What another process is at work on is left to it.
    ///
    /// [`ManagerBuilder::build`](crate::ManagerBuilder::build) does this first of all.
    ///
    /// # Errors
    ///
    /// `Journal` if the sandboxes cannot be listed. What cannot be settled now (a backend that cannot be
    /// reached) stays open, with a warning.
    pub async fn reconcile(&self) -> Result<()> {
        // A place that does not answer holds up nothing but what is there.
        let mut live = self.live().await?.into_iter();
        let mut settling = JoinSet::new();
        loop {
            for shared in live.by_ref().take(AT_ONCE - settling.len()) {
                let manager = self.clone();
                settling.spawn(async move { manager.reconcile_one(&shared).await });
            }
            match settling.join_next().await {
                None => return Ok(()),
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => tracing::warn!(%error, "not settled"),
                Some(Err(error)) => tracing::warn!(%error, "not settled"),
            }
        }
    }

    async fn reconcile_one(&self, shared: &Arc<super::Shared>) -> Result<()> {
        let record = shared.record(&self.inner).await?;
        if record.open.is_none()
            && record.lost_processes().next().is_none()
            && !matches!(record.state, SandboxState::Ready | SandboxState::Paused)
        {
            return Ok(());
        }
        // A change in progress holds the lock; whoever holds it is alive.
        let lock = self.inner.journal.lock(&shared.id);
        let Ok(lock) = tokio::time::timeout(std::time::Duration::from_millis(5), lock).await else {
            return Ok(());
        };
        let _lock = lock?;
        let record = shared.record(&self.inner).await?;
        let recorder = Recorder::of_nobody(&self.inner, shared, record.consumer.clone());
        match &record.open {
            Some(intent) => settle(&recorder, &record, intent).await?,
            None => notice_loss(&recorder, &record).await?,
        }
        ends::lose(&recorder).await
    }
}

async fn settle(recorder: &Recorder, record: &Record, intent: &Intent) -> Result<()> {
    let inner = &recorder.inner;
    match intent {
        Intent::Create => never_made(recorder, record, "create").await?,
        Intent::Attach { backend, external, instance } => {
            remove(recorder, backend, instance, external.clone().into()).await?;
            never_made(recorder, record, "attach").await?;
        }
        Intent::Provision { backend, instance } => {
            remove(recorder, backend, instance, serde_json::Value::Null).await?;
            if record.instance.is_none() {
                return never_made(recorder, record, "create").await;
            }
            recorder.failed("recreate", &VANISHED).await?;
            notice_loss(recorder, &*shared_record(recorder).await?).await?;
        }
        Intent::Rewind { instance, snapshot, .. } => {
            let backend = record.snapshots.iter().find(|kept| kept.id == *snapshot);
            if let Some(backend) = backend.map(|kept| kept.data.backend.clone()) {
                remove(recorder, &backend, instance, serde_json::Value::Null).await?;
            }
            recorder.failed("rewind", &VANISHED).await?;
            notice_loss(recorder, &*shared_record(recorder).await?).await?;
        }
        Intent::Snapshot { snapshot, label, successor } => {
            snapshots::finish(recorder, record, snapshot, label, successor).await?;
            notice_loss(recorder, &*shared_record(recorder).await?).await?;
        }
        Intent::Stop | Intent::Start => {
            let Some(instance) = &record.instance else {
                return Ok(());
            };
            // Stopping is where both are safe: nothing runs that nobody knows of.
            inner.backend(&instance.backend)?.stop(instance).await?;
            recorder.record(Known::Stopped).await?;
        }
        Intent::DeleteSnapshot { snapshot } => {
            snapshots::finish_deleting(recorder, record, snapshot).await?;
        }
        Intent::Destroy => {
            finish_destroying(inner, &recorder.shared, record).await?;
            ends::lose(recorder).await?;
            recorder.record(Known::Destroyed).await?;
            inner.journal.retire(&record.id).await?;
        }
    }
    Ok(())
}

/// Ends a sandbox of which nothing was there yet.
async fn never_made(recorder: &Recorder, record: &Record, operation: &str) -> Result<()> {
    recorder.failed(operation, &VANISHED).await?;
    recorder.inner.forget(record).await
}

async fn shared_record(recorder: &Recorder) -> Result<Arc<Record>> {
    recorder.shared.record(&recorder.inner).await
}

/// Removes an instance of which only the id is known, and where it was to be if that is somebody else's place.
async fn remove(
    recorder: &Recorder,
    backend: &crate::BackendId,
    id: &crate::InstanceId,
    data: serde_json::Value,
) -> Result<()> {
    let backend = recorder.inner.backend(backend)?;
    let instance = Instance {
        id: id.clone(),
        sandbox: recorder.shared.id.clone(),
        backend: backend.id(),
        data,
    };
    backend.teardown(&instance).await
}

async fn notice_loss(recorder: &Recorder, record: &Record) -> Result<()> {
    if !matches!(record.state, SandboxState::Ready | SandboxState::Paused) {
        return Ok(());
    }
    let Some(instance) = &record.instance else {
        return Ok(());
    };
    let backend = recorder.inner.backend(&instance.backend)?;
    let named = |error: Error| error.with_backend(&backend.id());
    let reason = match backend.inspect(instance).await.map_err(named)? {
        InstanceState::Gone => "its instance is gone",
        InstanceState::Stopped => "its instance has ended",
        // Whoever paused it, or let it go on, ended before that was recorded.
        InstanceState::Running if record.state == SandboxState::Paused => {
            return recorder.record(Known::Resumed).await.map(drop);
        }
        InstanceState::Paused if record.state == SandboxState::Ready => {
            return recorder.record(Known::Paused).await.map(drop);
        }
        InstanceState::Running | InstanceState::Paused => return Ok(()),
    };
    if let Some(over) = lifetime::is_over(record) {
        recorder.record(Known::Expired { reason: over.into() }).await?;
        return Ok(());
    }
    recorder.record(Known::Lost { reason: reason.into() }).await?;
    life::recover(recorder, record).await
}
