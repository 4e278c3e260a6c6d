//! What a sandbox changed: its layers against those of a snapshot.
//!
//! A change is a file of an upper layer, so nothing else has to be looked at. The guest program does that,
//! in a `bwrap` of its own: what is there is hostile, may be closed to its owner, and may be large.

use std::path::{Path, PathBuf};

use sandbox_core::{Change, Error, ErrorKind, Result, Root, SnapshotData, SnapshotId};

use crate::changes;

use super::{
    accounts,
    error::{at, blocking, lost},
    helper,
    host::HostView,
    instance::{InstanceDir, Marks, PARTS},
    launch, layers, plan,
    shared::Shared,
    staging::{Kind, Wanted},
};

const OPERATION: &str = "changes";

/// What the instance shows that the snapshot, or a fresh instance of its spec, does not.
pub(crate) async fn changes(
    shared: &Shared,
    dir: &InstanceDir,
    since: Option<&SnapshotData>,
) -> Result<Vec<Change>> {
    let then = match since {
        Some(snapshot) => layers::layers_of(OPERATION, snapshot)?,
        None => Vec::new(),
    };
    let prepared = {
        let (shared, dir, then) = (shared.clone(), dir.clone(), then.clone());
        blocking(OPERATION, move || prepare(&shared, &dir, &then)).await?
    };
    let Prepared { now, wanted, mounts, made, with_workspace } = prepared;
    let output = helper::run_helper(shared, OPERATION, wanted, move |paths| {
        let [guest, upper, layers, root, more @ ..] = paths else { return Vec::new() };
        let workspace = more.first().filter(|_| with_workspace).map(PathBuf::as_path);
        let sources = helper::Compared { guest, upper, layers, root, workspace };
        helper::changes_arguments(&sources, &now, &then, &mounts, made.as_deref())
    })
    .await?;
    blocking(OPERATION, move || changes::told(OPERATION, &output)).await
}

struct Prepared {
    now: Vec<SnapshotId>,
    /// In the order of [`helper::Compared`].
    wanted: Vec<Wanted>,
    mounts: Vec<PathBuf>,
    made: Option<PathBuf>,
    with_workspace: bool,
}

fn prepare(shared: &Shared, dir: &InstanceDir, then: &[SnapshotId]) -> Result<Prepared> {
    let marks = dir.marks().map_err(at(OPERATION, &dir.fs()))?;
    let gone = || lost(OPERATION, format!("the instance {} is gone", dir.id));
    let Marks { request, layers: now, run_as, .. } = marks.ok_or_else(gone)?;
    if !PARTS.iter().all(|part| dir.upper(part).is_dir()) {
        let message = "a snapshot of it was broken off; start the sandbox, which settles that";
        return Err(Error::new(ErrorKind::Conflict, OPERATION, message));
    }
    layers::check_layers(OPERATION, &shared.state, &now)?;
    layers::check_layers(OPERATION, &shared.state, then)?;
    let view = HostView::look(Path::new("/")).map_err(at(OPERATION, Path::new("/")))?;
    let spec = &request.spec;
    let accounts = match &spec.root {
        Root::Directory(root) => accounts::missing(root).map_err(at(OPERATION, root))?,
        _ => Vec::new(),
    };
    let (mounts, made) = plan::not_its_doing(spec, &view, &accounts);
    let ours = |path| Wanted { what: "sandbox's part", path, kind: Kind::Ours };
    let mut wanted = vec![
        ours(shared.guest_dir()?),
        ours(dir.fs().join("upper")),
        ours(shared.state.layers()),
        launch::root(shared, spec, &view, run_as)?,
    ];
    // One that is bound has nothing in any layer.
    let workspace = launch::workspace(spec).filter(|workspace| workspace.kind == Kind::Below);
    let with_workspace = workspace.is_some();
    wanted.extend(workspace);
    Ok(Prepared { now, wanted, mounts, made, with_workspace })
}
