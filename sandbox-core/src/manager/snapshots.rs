//! Snapshots and rewinds.

use std::sync::Arc;

use sandbox_guest::{Request, Response};

use super::{
    Inner, Recorder, SandboxManager, Shared,
    create::provision_and_greet,
    shared::{connect, running_instance},
};
use crate::{
    Error, ErrorKind, Known, Result, SandboxState, Snapshot, SnapshotId, SnapshotRequest,
    guest::{Link, unexpected},
    record::Record,
};

impl SandboxManager {
    /// The snapshot of this id, and the sandbox that it is of.
    pub(super) async fn find_snapshot(&self, id: &SnapshotId) -> Result<(Arc<Shared>, Snapshot)> {
        for sandbox in self.inner.journal.sandboxes().await? {
            let shared = self.inner.shared(&sandbox);
            let Ok(Some(record)) = shared.try_record(&self.inner).await else {
                continue;
            };
            if let Some(found) = record.snapshots.iter().find(|snapshot| snapshot.id == *id) {
                return Ok((shared, found.clone()));
            }
        }
        let message = format!("there is no snapshot {id} in this journal");
        Err(Error::new(
            ErrorKind::NotFound,
            "find the snapshot",
            message,
        ))
    }
}

/// Takes a snapshot.
pub(crate) async fn snapshot(recorder: Recorder, label: String) -> Result<Snapshot> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    // Finds out whether it is lost before anything is recorded.
    let link = shared.link(&inner).await?;
    let record = shared.record(&inner).await?;
    let snapshot = SnapshotId::new();
    let mut successor = inner.provision(&shared, record.spec.clone(), record.generation, None);
    successor.from = record.based_on_data();
    recorder
        .record(Known::SnapshotRequested {
            snapshot: snapshot.clone(),
            label: label.clone(),
            successor: successor.instance.clone(),
        })
        .await?;
    let request = SnapshotRequest::new(
        running_instance(&record)?,
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
            let operation = "snapshot".to_owned();
            recorder
                .record(Known::Failed {
                    operation,
                    error: error.to_string(),
                })
                .await?;
            if error.kind() == ErrorKind::Lost {
                recorder
                    .record(Known::Lost {
                        reason: error.to_string(),
                    })
                    .await?;
            }
            Err(error)
        }
    }
}

/// Freezes, lets the backend take it, and lets go on: the same guest, or its successor.
async fn take(
    inner: &Inner,
    shared: &Shared,
    link: &Link,
    mut request: SnapshotRequest,
) -> Result<crate::SnapshotTaken> {
    let backend = inner.backend(&request.instance.backend)?;
    request.idle = match link.call(Request::Freeze).await? {
        Response::Frozen { idle } => idle,
        other => return Err(unexpected(&other)),
    };
    let taken = backend
        .snapshot(&request)
        .await
        .map_err(|error| error.with_backend(&backend.id()));
    match &taken {
        Ok(taken) if taken.successor.is_some() => {
            shared.unlink().await;
            if let Some(instance) = &taken.successor {
                shared.relink(connect(&*backend, instance).await?).await;
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

/// Gives the sandbox the filesystem of one of its snapshots: makes before it breaks.
pub(crate) async fn rewind(recorder: Recorder, snapshot: SnapshotId) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    let Some(target) = record.snapshots.iter().find(|kept| kept.id == snapshot) else {
        let message = format!("it has no snapshot {snapshot}");
        return Err(Error::new(ErrorKind::NotFound, "rewind", message));
    };
    let possible = [
        SandboxState::Ready,
        SandboxState::Stopped,
        SandboxState::Lost,
    ];
    if !possible.contains(&record.state) {
        running_instance(&record)?;
    }
    let generation = record.generation + 1;
    let provision = inner.provision(
        &shared,
        record.spec.clone(),
        generation,
        Some(target.data.clone()),
    );
    recorder
        .record(Known::RewindRequested {
            snapshot: snapshot.clone(),
            instance: provision.instance.clone(),
            generation,
        })
        .await?;
    let backend = inner.backend(&target.data.backend)?;
    let made = match provision_and_greet(&*backend, &provision).await {
        Ok(made) => made,
        Err(error) => {
            let operation = "rewind".to_owned();
            recorder
                .record(Known::Failed {
                    operation,
                    error: error.to_string(),
                })
                .await?;
            return Err(error);
        }
    };
    let (instance, link, _) = made;
    // From this record on, the new one is the sandbox.
    recorder
        .record(Known::Rewound {
            snapshot,
            instance,
            generation,
        })
        .await?;
    shared.relink(link).await;
    if let Some(old) = record.instance {
        let old_backend = inner.backend(&old.backend)?;
        if let Err(error) = old_backend.teardown(&old).await {
            // It is not the sandbox's any more; whoever reaps finds it by its marks.
            tracing::warn!(%error, "the instance before the rewind could not be removed");
        }
    }
    Ok(())
}

impl Record {
    /// The data of the snapshot that the present filesystem came from.
    fn based_on_data(&self) -> Option<crate::SnapshotData> {
        let id = self.based_on.as_ref()?;
        self.snapshots
            .iter()
            .find(|snapshot| snapshot.id == *id)
            .map(|found| found.data.clone())
    }
}
