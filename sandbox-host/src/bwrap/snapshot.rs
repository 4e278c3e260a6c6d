//! Snapshots: layers that no instance writes to any more.
//!
//! A layer is what one instance changed, for the root and for the workspace, as overlayfs wrote it. It
//! stands on the layers that the instance stood on; its `meta.json` lists them. A layer never changes, so
//! it is shared by all that stand on it, and it goes when the last of them does.
//!
//! The kernel stacks a few hundred layers at most. Before a stack grows so tall, the next snapshot's layer
//! is made of all of them together: it stands alone.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use rustix::fs::FlockOperation;
use sandbox_core::{
    BackendId, Error, ErrorKind, InstanceId, Provision, Result, SnapshotData, SnapshotId,
    SnapshotRequest, SnapshotTaken,
};
use serde::{Deserialize, Serialize};

use super::{
    ID,
    backend::Shared,
    config::State,
    copied,
    error::{at, blocking, failed, lost},
    instance::{self, InstanceDir, Marks, PARTS, private_dir, write_json},
    plan::MAX_LAYERS,
    process::Worker,
    tree,
};
use crate::size;

pub(crate) const OPERATION: &str = "snapshot";
const META: &str = "meta.json";
const NEW: &str = ".new-";
const DELETED: &str = ".deleted-";

/// How many layers a stack may have before the next snapshot is made of all of them.
const TALL: usize = 100;

/// What a layer's directory says about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Meta {
    id: SnapshotId,
    /// All layers that it takes to see the snapshot, lowest first; the last is this one.
    stack: Vec<SnapshotId>,
    created_at: Timestamp,
    /// The instance whose upper layer this was, if it was not copied: until the instance has a successor
    /// it needs this layer.
    sealed_from: Option<InstanceId>,
    /// Who made it, to tell whether it is still being made.
    worker: Worker,
}

/// The part of [`SnapshotData::data`] that is read again.
#[derive(Debug, Serialize, Deserialize)]
struct Data {
    layers: Vec<SnapshotId>,
    root: PathBuf,
    workspace: PathBuf,
}

/// The layers that a snapshot takes, lowest first.
pub(crate) fn layers_of(
    operation: &'static str,
    snapshot: &SnapshotData,
) -> Result<Vec<SnapshotId>> {
    if snapshot.backend.as_str() != ID {
        let message = format!("{} is a snapshot of the backend {}", snapshot.id, snapshot.backend);
        return Err(Error::unsupported(operation, message));
    }
    let data: Data = serde_json::from_value(snapshot.data.clone()).map_err(|error| {
        failed(operation, format!("the data of {}", snapshot.id)).with_source(error)
    })?;
    Ok(data.layers)
}

/// That all layers are there; to be called with the state's lock.
pub(crate) fn check_layers(
    operation: &'static str,
    state: &State,
    layers: &[SnapshotId],
) -> Result<()> {
    if layers.len() > MAX_LAYERS {
        return Err(too_many(operation, layers.len()));
    }
    for layer in layers {
        if !state.layers().join(layer.as_str()).is_dir() {
            let message = format!(
                "the layer {layer} is not in {}; its snapshot was deleted, or made with another state \
                 directory",
                state.root.display()
            );
            return Err(Error::new(ErrorKind::NotFound, operation, message));
        }
    }
    Ok(())
}

fn too_many(operation: &'static str, layers: usize) -> Error {
    let message = format!(
        "a sandbox would stand on {layers} layers, and the kernel takes {MAX_LAYERS}; go on from an \
         earlier snapshot, or in a new sandbox on a copy of the workspace"
    );
    Error::new(ErrorKind::LimitExceeded, operation, message)
}

/// What a fresh upper layer has to look like from outside: the topmost of those below it.
pub(crate) fn topmost(state: &State, layers: &[SnapshotId]) -> [PathBuf; 2] {
    let top = layers.last().map(|top| state.layers().join(top.as_str()));
    PARTS.map(|part| top.as_ref().map(|top| top.join(part)).unwrap_or_default())
}

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
        shared.start_again(dir, marks, &request.successor).await
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
        None => shared.provision_on(request, layers).await,
    }
}

pub(crate) fn describe(
    state: &State,
    id: &SnapshotId,
    layers: &[SnapshotId],
) -> Result<SnapshotData> {
    let layer = state.layers().join(id.as_str());
    let [root, workspace] = PARTS.map(|part| layer.join(part));
    let data = serde_json::to_value(Data { layers: layers.to_vec(), root, workspace })
        .map_err(|error| failed(OPERATION, "the snapshot's data").with_source(error))?;
    Ok(SnapshotData { id: id.clone(), backend: BackendId::new(ID), size: None, data })
}

/// Makes a layer's directory, under the name of one that is not whole yet.
pub(crate) fn begin(
    state: &State,
    layers: &[SnapshotId],
    sealed_from: Option<InstanceId>,
) -> Result<PathBuf> {
    let Some(id) = layers.last() else { return Err(failed(OPERATION, "no layer to make")) };
    let path = state.layers().join(format!("{NEW}{id}"));
    let make = || {
        private_dir(&path)?;
        // For the user that sandboxes run as.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711))?;
        let meta = Meta {
            id: id.clone(),
            stack: layers.to_vec(),
            created_at: Timestamp::now(),
            sealed_from,
            worker: Worker::this()?,
        };
        write_json(&path.join(META), &meta)
    };
    make().map_err(at(OPERATION, &path))?;
    Ok(path)
}

fn seal(state: &State, dir: &InstanceDir, layers: &[SnapshotId], begun: bool) -> Result<()> {
    let path = match layers.last() {
        Some(id) if begun => state.layers().join(format!("{NEW}{id}")),
        _ => begin(state, layers, Some(dir.id.clone()))?,
    };
    finish_seal(dir, &path).map_err(at(OPERATION, &path))
}

/// Moves what is left to move, and gives the layer its name.
fn finish_seal(dir: &InstanceDir, path: &Path) -> io::Result<()> {
    for part in PARTS {
        match fs::rename(dir.upper(part), path.join(part)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.join(part).is_dir() => {}
            result => result?,
        }
    }
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    fs::rename(path, path.with_file_name(name.trim_start_matches(NEW)))
}

/// Takes a seal back.
fn unseal(state: &State, dir: &InstanceDir, id: &SnapshotId) -> Result<()> {
    let whole = state.layers().join(id.as_str());
    // Not whole from here on, so that a crash in between is seen.
    let path = state.layers().join(format!("{NEW}{id}"));
    fs::rename(&whole, &path).map_err(at(OPERATION, &whole))?;
    for part in PARTS {
        fs::rename(path.join(part), dir.upper(part)).map_err(at(OPERATION, &path))?;
    }
    tree::remove(&path).map_err(at(OPERATION, &path))
}

/// What a crash between a seal and the old instance's removal leaves behind: an instance without an
/// upper layer. The layer then becomes the topmost of those it stands on; says whether that was so.
pub(crate) fn adopt_sealed(state: &State, dir: &InstanceDir, marks: &mut Marks) -> Result<bool> {
    if PARTS.iter().all(|part| dir.upper(part).is_dir()) {
        return Ok(false);
    }
    for (path, meta) in metas(state)? {
        if meta.sealed_from.as_ref() == Some(&dir.id) && !marks.layers.contains(&meta.id) {
            if is_new(&path) {
                finish_seal(dir, &path).map_err(at("start", &path))?;
            }
            marks.layers = meta.stack;
            return Ok(true);
        }
    }
    Err(lost("start", format!("the files of the instance {} are gone", dir.id)))
}

/// Removes a snapshot, or has it removed when nothing needs its layer any more.
pub(crate) fn delete(state: &State, snapshot: &SnapshotData) -> Result<()> {
    const OPERATION: &str = "delete snapshot";
    let layers = state.layers();
    if !layers.join(snapshot.id.as_str()).exists() {
        // It may have been broken off.
        return collect(state);
    }
    {
        let _lock =
            state.lock(FlockOperation::LockExclusive).map_err(at(OPERATION, &state.root))?;
        let sign = layers.join(format!("{DELETED}{}", snapshot.id));
        fs::write(&sign, []).map_err(at(OPERATION, &sign))?;
    }
    collect(state)
}

/// What a snapshot's layer takes on disk, in bytes. A directory that its owner made unreadable, and that
/// an ordinary harness therefore cannot look into, counts as itself.
pub(crate) fn size_of(state: &State, snapshot: &SnapshotId) -> Result<u64> {
    const OPERATION: &str = "measure the snapshot";
    let layer = state.layers().join(snapshot.as_str());
    if !layer.is_dir() {
        let message = format!("there is no layer {snapshot} in {}", state.root.display());
        return Err(Error::new(ErrorKind::NotFound, OPERATION, message));
    }
    size::measure(&layer).map_err(at(OPERATION, &layer))
}

/// Removes deleted layers that nothing needs any more, and copies that a crash left half done.
pub(crate) fn collect(state: &State) -> Result<()> {
    const OPERATION: &str = "remove layers";
    let layers = state.layers();
    let names = |prefix: &str| -> Result<Vec<String>> {
        let mut found = Vec::new();
        let entries = match fs::read_dir(&layers) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            entries => entries.map_err(at(OPERATION, &layers))?,
        };
        for entry in entries {
            let name = entry.map_err(at(OPERATION, &layers))?.file_name();
            let name = name.to_str().unwrap_or_default();
            found.extend(name.strip_prefix(prefix).map(str::to_owned));
        }
        Ok(found)
    };
    for name in names(NEW)? {
        let path = layers.join(format!("{NEW}{name}"));
        let meta = read_meta(&path).map_err(at(OPERATION, &path))?;
        if meta.is_some_and(|meta| meta.sealed_from.is_none() && !meta.worker.runs()) {
            tree::remove(&path).map_err(at(OPERATION, &path))?;
        }
    }
    let deleted = names(DELETED)?;
    if deleted.is_empty() {
        return Ok(());
    }
    let _lock = state.lock(FlockOperation::LockExclusive).map_err(at(OPERATION, &state.root))?;
    let mut needed: BTreeSet<SnapshotId> = BTreeSet::new();
    for (_, meta) in metas(state)? {
        if !deleted.iter().any(|name| name == meta.id.as_str()) {
            needed.extend(meta.stack);
        }
    }
    for (dir, marks) in instance::all(state)? {
        needed.extend(marks.layers);
        // An instance whose upper layer is one of these by now.
        needed.extend(metas(state)?.into_iter().filter_map(|(_, meta)| {
            (meta.sealed_from.as_ref() == Some(&dir.id)).then_some(meta.id)
        }));
    }
    for name in deleted.iter().filter(|name| !needed.iter().any(|id| id.as_str() == *name)) {
        let path = layers.join(name);
        tree::remove(&path).map_err(at(OPERATION, &path))?;
        let sign = layers.join(format!("{DELETED}{name}"));
        fs::remove_file(&sign).map_err(at(OPERATION, &sign))?;
    }
    Ok(())
}

/// Every layer here, those that are being made too.
fn metas(state: &State) -> Result<Vec<(PathBuf, Meta)>> {
    let layers = state.layers();
    let mut found = Vec::new();
    for entry in fs::read_dir(&layers).map_err(at(OPERATION, &layers))? {
        let path = entry.map_err(at(OPERATION, &layers))?.path();
        if let Some(meta) = read_meta(&path).map_err(at(OPERATION, &path))? {
            found.push((path, meta));
        }
    }
    Ok(found)
}

fn read_meta(path: &Path) -> io::Result<Option<Meta>> {
    match fs::read(path.join(META)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn is_new(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(NEW))
}
