//! Taking snapshots: the instance's upper layer becomes a layer that nothing writes to any more, or is copied.
//!
//! The kernel stacks a few hundred layers at most. Before a stack grows so tall, the next snapshot's layer
//! is made of all of them together: it stands alone.

use sandbox_core::{Provision, Result, SnapshotId, SnapshotRequest, SnapshotTaken};

use super::{
    copied,
    error::{at, blocking, failed, lost},
    instance::{InstanceDir, Marks},
    layers::{Meta, NEW, OPERATION, describe, read_meta, seal, unseal},
    provision,
    shared::Shared,
    state::State,
    tree,
};

/// How many layers a stack may have before the next snapshot is made of all of them.
const TALL: usize = 100;

/// Takes a snapshot, in constant time if the instance may be replaced. The same request a second time
/// finishes what the first, interrupted, left undone.
pub(crate) async fn take(shared: &Shared, request: &SnapshotRequest) -> Result<SnapshotTaken> {
    let dir = InstanceDir::of(&shared.state, &request.instance.id);
    let found = {
        let (shared, dir, id) = (shared.clone(), dir.clone(), request.snapshot.clone());
        blocking(OPERATION, move || look(&shared.state, &dir, &id)).await?
    };
    let layers = match &found.layer {
        Some(meta) if meta.sealed_from.is_none() => {
            let data = describe(&shared.state, &request.snapshot, &meta.stack)?;
            let successor = move_onto(shared, &dir, &found, &meta.stack, request).await;
            return Ok(SnapshotTaken { data, successor });
        }
        Some(meta) => meta.stack.clone(),
        None => {
            let gone = || lost(OPERATION, format!("the instance {} is gone", dir.id));
            let marks = found.marks.as_ref().ok_or_else(gone)?;
            if marks.layers.len() >= TALL {
                let stack = vec![request.snapshot.clone()];
                let data =
                    copied::copy(shared, &dir, marks, stack.clone(), &request.snapshot).await?;
                let successor = move_onto(shared, &dir, &found, &stack, request).await;
                return Ok(SnapshotTaken { data, successor });
            }
            let mut layers = marks.layers.clone();
            layers.push(request.snapshot.clone());
            if !(request.idle && found.runs) {
                let data = copied::copy(shared, &dir, marks, layers, &request.snapshot).await?;
                return Ok(SnapshotTaken { data, successor: None });
            }
            layers
        }
    };
    // Not to be left half way, where the instance would be stopped and its files a layer.
    let (shared, request) = (shared.clone(), request.clone());
    let whole = tokio::spawn(async move { replace(&shared, &dir, found, layers, request).await });
    whole.await.map_err(|error| failed(OPERATION, "replacing the instance").with_source(error))?
}

/// After a snapshot that stands on fewer layers than the instance, the instance is replaced by one on
/// the snapshot, unless something runs in it. Without that every further snapshot would be as much work. If
/// it does not succeed, the instance goes on as it is.
async fn move_onto(
    shared: &Shared,
    dir: &InstanceDir,
    found: &Before,
    stack: &[SnapshotId],
    request: &SnapshotRequest,
) -> Option<sandbox_core::Instance> {
    match &found.marks {
        Some(marks) if stack.len() > marks.layers.len() => return None,
        Some(_) if !(request.idle && found.runs) => return None,
        Some(_) => {}
        // It was replaced already, before a crash.
        None => {
            let next = InstanceDir::of(&shared.state, &request.successor.instance);
            if !next.exists() {
                return None;
            }
        }
    }
    let (shared, dir, stack) = (shared.clone(), dir.clone(), stack.to_vec());
    let next = request.successor.clone();
    // Not to be left half way, with two instances.
    let whole = tokio::spawn(async move {
        let made = successor(&shared, &next, stack).await;
        if made.is_ok() {
            let shared = shared.clone();
            if let Err(error) = blocking(OPERATION, move || dir.remove(&shared.state)).await {
                tracing::warn!(%error, "the instance before the snapshot could not be removed");
            }
        }
        made
    });
    match whole.await {
        Ok(Ok(successor)) => Some(successor),
        Ok(Err(error)) => {
            tracing::warn!(%error, "an instance on many layers could not be replaced by one on few");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the replacement of an instance was broken off");
            None
        }
    }
}

/// What is there before a snapshot is taken.
struct Before {
    marks: Option<Marks>,
    runs: bool,
    /// Of the snapshot itself, if it has been begun or made already.
    layer: Option<Meta>,
    /// Whether that is whole.
    whole: bool,
}

fn look(state: &State, dir: &InstanceDir, id: &SnapshotId) -> Result<Before> {
    let layers = state.layers();
    let (path, new) = (layers.join(id.as_str()), layers.join(format!("{NEW}{id}")));
    let whole = path.exists();
    let meta = read_meta(if whole { &path } else { &new }).map_err(at(OPERATION, &path))?;
    // A copy that is not whole is begun anew.
    let layer = meta.filter(|meta| whole || meta.sealed_from.is_some());
    if layer.is_none() && new.exists() {
        tree::remove(&new).map_err(at(OPERATION, &new))?;
    }
    let read = dir.marks().and_then(|marks| Ok((marks, dir.guest()?.is_some())));
    let (marks, runs) = read.map_err(at(OPERATION, &dir.fs()))?;
    Ok(Before { marks, runs, layer, whole })
}

/// Makes the instance's upper layer the snapshot, and a new instance on top of it.
async fn replace(
    shared: &Shared,
    dir: &InstanceDir,
    before: Before,
    layers: Vec<SnapshotId>,
    request: SnapshotRequest,
) -> Result<SnapshotTaken> {
    let id = request.snapshot.clone();
    if !before.whole {
        let (shared, dir, layers) = (shared.clone(), dir.clone(), layers.clone());
        let begun = before.layer.is_some();
        blocking(OPERATION, move || {
            // Nothing runs there that could write. That the kernel takes the guest's mounts apart, which
            // takes longer the more files there are, need not be waited for before the successor starts,
            // but only before the snapshot is called one.
            dir.condemn().map_err(at(OPERATION, &dir.fs()))?;
            seal(&shared.state, &dir, &layers, begun)
        })
        .await?;
    }
    let data = describe(&shared.state, &id, &layers)?;
    let why = match successor(shared, &request.successor, layers).await {
        Ok(successor) => {
            let (shared, dir) = (shared.clone(), dir.clone());
            blocking(OPERATION, move || {
                dir.kill().map_err(at(OPERATION, &dir.fs()))?;
                // What is left of the old one is for the inventory if this fails: the snapshot is taken.
                if let Err(error) = dir.remove(&shared.state) {
                    tracing::warn!(%error, "the instance before the snapshot could not be removed");
                }
                Ok(())
            })
            .await?;
            return Ok(SnapshotTaken { data, successor: Some(successor) });
        }
        Err(why) => why,
    };
    let restored = async {
        let gone = || lost(OPERATION, format!("the instance {} is gone", dir.id));
        let marks = before.marks.ok_or_else(gone)?;
        {
            let (shared, dir, id) = (shared.clone(), dir.clone(), id.clone());
            blocking(OPERATION, move || {
                dir.kill().map_err(at(OPERATION, &dir.fs()))?;
                unseal(&shared.state, &dir, &id)
            })
            .await?;
        }
        provision::start_again(shared, dir, marks, &request.successor).await
    };
    match restored.await {
        Ok(_) => Err(why),
        Err(error) => {
            let message = format!(
                "the new instance did not come up ({why}), and neither did the old one again ({error}); \
                 its files are kept in {}",
                shared.state.root.display()
            );
            Err(lost(OPERATION, message).with_source(why))
        }
    }
}

/// The instance that takes the old one's place; perhaps it is there already.
async fn successor(
    shared: &Shared,
    request: &Provision,
    layers: Vec<SnapshotId>,
) -> Result<sandbox_core::Instance> {
    let dir = InstanceDir::of(&shared.state, &request.instance);
    let there = blocking(OPERATION, {
        let (shared, dir) = (shared.clone(), dir.clone());
        move || {
            let read = dir.marks().and_then(|marks| Ok((marks, dir.guest()?)));
            match read.map_err(at(OPERATION, &dir.fs()))? {
                (Some(marks), Some(guest)) => dir.describe(&marks, Some(&guest)).map(Some),
                _ => dir.remove(&shared.state).map(|()| None),
            }
        }
    });
    match there.await? {
        Some(instance) => Ok(instance),
        None => provision::on_layers(shared, request, layers).await,
    }
}
