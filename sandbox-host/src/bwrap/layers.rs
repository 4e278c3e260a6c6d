//! Layers: what snapshots are, on disk.
//!
//! A layer is what one instance changed, for the root and for the workspace, as overlayfs wrote it. It
//! stands on the layers that the instance stood on; its `meta.json` lists them. A layer never changes, so
//! it is shared by all that stand on it, and it goes when the last of them does.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use rustix::fs::FlockOperation;
use sandbox_core::{BackendId, Error, ErrorKind, InstanceId, Result, SnapshotData, SnapshotId};
use serde::{Deserialize, Serialize};

use super::{
    ID,
    error::{at, failed, lost},
    instance::{self, InstanceDir, Marks, PARTS, private_dir, write_json},
    plan::MAX_LAYERS,
    process::Worker,
    state::State,
    tree,
};
use crate::size;

pub(crate) const OPERATION: &str = "snapshot";
const META: &str = "meta.json";
pub(crate) const NEW: &str = ".new-";
const DELETED: &str = ".deleted-";

/// What a layer's directory says about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Meta {
    id: SnapshotId,
    /// All layers that it takes to see the snapshot, lowest first; the last is this one.
    pub(crate) stack: Vec<SnapshotId>,
    created_at: Timestamp,
    /// The instance whose upper layer this was, if it was not copied: until the instance has a successor
    /// it needs this layer.
    pub(crate) sealed_from: Option<InstanceId>,
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

/// What the history says of a snapshot on these layers.
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

/// Makes an upper layer a layer of its own, or goes on with that if it was begun.
pub(crate) fn seal(
    state: &State,
    dir: &InstanceDir,
    layers: &[SnapshotId],
    begun: bool,
) -> Result<()> {
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
pub(crate) fn unseal(state: &State, dir: &InstanceDir, id: &SnapshotId) -> Result<()> {
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

pub(crate) fn read_meta(path: &Path) -> io::Result<Option<Meta>> {
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
