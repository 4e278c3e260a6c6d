//! Snapshots and rewinds.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_guest::{Request, Response};

use super::{
    Inner, Recorder, SandboxManager, Shared,
    create::provision_and_greet,
    ends,
    life::remove_old,
    shared::{connect, refuse_borrowed, running_instance},
};
use crate::{
    Error, ErrorKind, Instance, InstanceId, InstanceState, Known, Result, SandboxBackend,
    SandboxState, Snapshot, SnapshotId, SnapshotRequest,
    guest::{Link, unexpected},
    record::Record,
};

/// How long a backend may hold a sandbox up for a snapshot whose harness has ended.
const HELD_UP: Duration = Duration::from_secs(60);

impl SandboxManager {
    /// The snapshot of this id, whichever sandbox it is of.
    ///
    /// # Errors
    ///
    /// `NotFound` if no sandbox of this journal has it.
    pub async fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot> {
        Ok(self.find_snapshot(id).await?.1)
    }

    /// The snapshot of this id, and the sandbox that it is of.
    pub(super) async fn find_snapshot(&self, id: &SnapshotId) -> Result<(Arc<Shared>, Snapshot)> {
        for sandbox in self.inner.journal.live().await? {
            let shared = self.inner.shared(&sandbox);
            let Ok(Some(record)) = shared.try_record(&self.inner).await else {
                continue;
            };
            if let Some(found) = record.snapshots.iter().find(|snapshot| snapshot.id == *id) {
                return Ok((shared, found.clone()));
            }
        }
        let message = format!("there is no snapshot {id} in this journal");
        Err(Error::new(ErrorKind::NotFound, "find the snapshot", message))
    }
}

/// Takes a snapshot.
pub(crate) async fn snapshot(recorder: Recorder, label: String) -> Result<Snapshot> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    refuse_borrowed(&*shared.record(&inner).await?, "snapshot")?;
    // Finds out whether it is lost before anything is recorded.
    shared.link(&inner).await?;
    let _lock = inner.journal.lock(&shared.id).await?;
    let link = shared.link_locked(&inner).await?;
    let record = shared.record(&inner).await?;
    let snapshot = SnapshotId::new();
    let from = record.based_on_data();
    let successor = inner.provision_again(&shared, &record, record.generation, from);
    recorder
        .record(Known::SnapshotRequested {
            snapshot: snapshot.clone(),
            label: label.clone(),
            successor: successor.instance.clone(),
        })
        .await?;
    let request = SnapshotRequest::new(
        running_instance(&record)?.clone(),
        snapshot.clone(),
        false,
        successor,
    );
    match take(&inner, &shared, &link, request).await {
        Ok(taken) => {
            let parent = record.based_on.clone();
            let event = recorder
                .record(Known::Snapshotted {
                    snapshot: snapshot.clone(),
                    label: label.clone(),
                    parent: parent.clone(),
                    data: taken.data.clone(),
                    instance: taken.successor,
                })
                .await?;
            Ok(Snapshot {
                id: snapshot,
                sandbox: shared.id.clone(),
                label,
                parent,
                taken_at: event.at,
                data: taken.data,
            })
        }
        Err(error) => {
            recorder.failed("snapshot", &error).await?;
            if error.kind() == ErrorKind::Lost {
                recorder.record(Known::Lost { reason: error.to_string() }).await?;
            }
            Err(error)
        }
    }
}

/// Freezes, lets the backend take it, and lets go on: the same guest, or its successor.
async fn take(
    inner: &Arc<Inner>,
    shared: &Arc<Shared>,
    link: &Link,
    mut request: SnapshotRequest,
) -> Result<crate::SnapshotTaken> {
    let backend = inner.backend(&request.instance.backend)?;
    request.idle = match link.call(Request::Freeze).await? {
        Response::Frozen { idle } => idle,
        other => return Err(unexpected(&other)),
    };
    let taken = backend.snapshot(&request).await.map_err(|error| error.with_backend(&backend.id()));
    match &taken {
        Ok(taken) if taken.successor.is_some() => {
            shared.unlink().await;
            if let Some(instance) = &taken.successor {
                let next = connect(&*backend, instance).await?;
                let next = shared.put_to_use(inner, next, &request.successor.spec).await?;
                shared.relink(Some(next)).await;
            }
        }
        // Whether it was taken or not, they must go on; if they cannot, the connection's end thaws them.
        _ => {
            if link.call(Request::Thaw).await.is_err() {
                shared.unlink().await;
            }
        }
    }
    taken
}

/// Finishes a snapshot that a harness was in the middle of when it ended.
pub(super) async fn finish(
    recorder: &Recorder,
    record: &Record,
    snapshot: &SnapshotId,
    label: &str,
    successor: &InstanceId,
) -> Result<()> {
    let (inner, shared) = (&recorder.inner, &recorder.shared);
    let Some(instance) = &record.instance else { return Ok(()) };
    let backend = inner.backend(&instance.backend)?;
    let from = record.based_on_data();
    let mut next = inner.provision_again(shared, record, record.generation, from);
    next.instance = successor.clone();
    // Where nothing runs it is idle; a guest that runs is asked.
    let request = SnapshotRequest::new(instance.clone(), snapshot.clone(), true, next.clone());
    let link = reach(&*backend, instance).await?;
    let runs = link.is_some();
    let taken = match &link {
        Some(link) => take(inner, shared, link, request).await,
        None => backend.snapshot(&request).await,
    };
    let taken = match taken {
        Ok(taken) => taken,
        Err(error) => {
            recorder.failed("snapshot", &error).await?;
            return Ok(());
        }
    };
    let replaced = taken.successor.is_some();
    recorder
        .record(Known::Snapshotted {
            snapshot: snapshot.clone(),
            label: label.to_owned(),
            parent: record.based_on.clone(),
            data: taken.data,
            instance: taken.successor,
        })
        .await?;
    let what = "a snapshot that a harness had begun was finished".to_owned();
    let generation = record.generation;
    let instance = if runs || replaced {
        None
    } else {
        next.instance = instance.id.clone();
        Some(backend.start(instance, &next).await?)
    };
    let snapshot = Some(snapshot.clone());
    recorder.record(Known::Recovered { what, instance, snapshot, generation }).await?;
    Ok(())
}

/// The guest of a sandbox that a snapshot was begun of, if it runs. An engine may still be at the snapshot that
/// the harness which has ended had asked it for, and holds the sandbox up meanwhile.
async fn reach(backend: &dyn SandboxBackend, instance: &Instance) -> Result<Option<Link>> {
    let begun = Instant::now();
    loop {
        match backend.inspect(instance).await? {
            InstanceState::Running => match connect(backend, instance).await {
                Ok(link) => return Ok(Some(link)),
                Err(error) => {
                    let held_up = backend.inspect(instance).await? == InstanceState::Paused;
                    if !held_up || begun.elapsed() > HELD_UP * 2 {
                        return Err(error);
                    }
                }
            },
            // Whoever holds it up does not let go any more.
            InstanceState::Paused if begun.elapsed() > HELD_UP => backend.resume(instance).await?,
            InstanceState::Paused => {}
            _ => return Ok(None),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Gives the sandbox the filesystem of one of its snapshots: makes before it breaks.
pub(crate) async fn rewind(recorder: Recorder, snapshot: SnapshotId) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    let Some(target) = record.snapshots.iter().find(|kept| kept.id == snapshot) else {
        let message = format!("it has no snapshot {snapshot}");
        return Err(Error::new(ErrorKind::NotFound, "rewind", message));
    };
    if !matches!(record.state, SandboxState::Stopped | SandboxState::Paused | SandboxState::Lost) {
        running_instance(&record)?;
    }
    let generation = record.generation + 1;
    let from = Some(target.data.clone());
    let provision = inner.provision_again(&shared, &record, generation, from);
    recorder
        .record(Known::RewindRequested {
            snapshot: snapshot.clone(),
            instance: provision.instance.clone(),
            generation,
        })
        .await?;
    let backend = inner.backend(&target.data.backend)?;
    let made = match provision_and_greet(&recorder, &backend, &provision).await {
        Ok(made) => made,
        Err(error) => {
            recorder.failed("rewind", &error).await?;
            return Err(error);
        }
    };
    let (instance, link) = made.0.parts().await;
    ends::collect(&recorder, &record).await;
    // From this record on, the new one is the sandbox.
    recorder.record(Known::Rewound { snapshot, instance, generation }).await?;
    shared.relink(link).await;
    remove_old(&inner, &record).await;
    ends::lose(&recorder).await
}

/// Removes a snapshot. What others build on stays usable.
pub(crate) async fn delete(recorder: Recorder, snapshot: SnapshotId) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if !record.snapshots.iter().any(|kept| kept.id == snapshot) {
        let message = format!("it has no snapshot {snapshot}");
        return Err(Error::new(ErrorKind::NotFound, "delete the snapshot", message));
    }
    if record.based_on.as_ref() == Some(&snapshot) {
        let message = format!(
            "the sandbox runs from the snapshot {snapshot}; take another or rewind to another first"
        );
        return Err(Error::new(ErrorKind::Conflict, "delete the snapshot", message));
    }
    recorder.record(Known::SnapshotDeleteRequested { snapshot: snapshot.clone() }).await?;
    finish_deleting(&recorder, &record, &snapshot).await
}

/// What is left to do once the intent is recorded; it may be done again.
pub(super) async fn finish_deleting(
    recorder: &Recorder,
    record: &Record,
    snapshot: &SnapshotId,
) -> Result<()> {
    if let Some(target) = record.snapshots.iter().find(|kept| kept.id == *snapshot) {
        let backend = recorder.inner.backend(&target.data.backend)?;
        if let Err(error) = backend.delete_snapshot(&target.data).await {
            recorder.failed("delete the snapshot", &error).await?;
            return Err(error.with_backend(&backend.id()));
        }
    }
    recorder.record(Known::SnapshotDeleted { snapshot: snapshot.clone() }).await?;
    Ok(())
}

/// Which snapshots to keep when there are many. What fits none of the rules goes; the one that the
/// sandbox runs from always stays.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Retention {
    /// The newest so many.
    pub keep_last: usize,
    /// Those with a label.
    pub keep_labelled: bool,
    /// Of what the former keep, the newest that together measure at most so much, in bytes.
    pub max_total_size: Option<u64>,
}

impl Retention {
    /// The snapshots to be removed, oldest first.
    fn surplus(&self, record: &Record, sizes: &HashMap<SnapshotId, u64>) -> Vec<SnapshotId> {
        let mut total = 0_u64;
        let mut surplus = Vec::new();
        for (age, snapshot) in record.snapshots.iter().rev().enumerate() {
            let wanted = age < self.keep_last || self.keep_labelled && !snapshot.label.is_empty();
            total = total.saturating_add(sizes.get(&snapshot.id).copied().unwrap_or(0));
            let fits = self.max_total_size.is_none_or(|max| total <= max);
            if !(wanted && fits) && record.based_on.as_ref() != Some(&snapshot.id) {
                surplus.push(snapshot.id.clone());
            }
        }
        surplus.reverse();
        surplus
    }
}

/// How much a snapshot adds to the one below it, in bytes.
pub(crate) async fn size(inner: &Inner, snapshot: &Snapshot) -> Result<u64> {
    match snapshot.data.size {
        Some(size) => Ok(size),
        None => inner.backend(&snapshot.data.backend)?.snapshot_size(&snapshot.data).await,
    }
}

/// Removes what a policy does not keep, and says what that was.
pub(crate) async fn prune(recorder: Recorder, policy: Retention) -> Result<Vec<SnapshotId>> {
    let record = recorder.shared.record(&recorder.inner).await?;
    let mut sizes = HashMap::new();
    if policy.max_total_size.is_some() {
        for snapshot in &record.snapshots {
            sizes.insert(snapshot.id.clone(), size(&recorder.inner, snapshot).await?);
        }
    }
    let surplus = policy.surplus(&record, &sizes);
    for snapshot in &surplus {
        delete(recorder.clone(), snapshot.clone()).await?;
    }
    Ok(surplus)
}

impl Record {
    /// The data of the snapshot that the present filesystem came from.
    fn based_on_data(&self) -> Option<crate::SnapshotData> {
        let id = self.based_on.as_ref()?;
        self.snapshots.iter().find(|snapshot| snapshot.id == *id).map(|found| found.data.clone())
    }
}
