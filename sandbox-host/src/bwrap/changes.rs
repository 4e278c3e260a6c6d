//! What a sandbox changed: its layers against those of a snapshot.
//!
//! A change is a file of an upper layer, so nothing else has to be looked at. The guest program does that,
//! in a `bwrap` of its own: what is there is hostile, may be closed to its owner, and may be large.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use sandbox_core::{Change, ChangeKind, Error, ErrorKind, Result, Root, SnapshotData, SnapshotId};

use super::{
    accounts,
    backend::Shared,
    error::{at, blocking, failed, lost},
    helper,
    host::HostView,
    instance::{InstanceDir, Marks, PARTS},
    launch, plan, snapshot,
    staging::{Kind, Wanted},
};

const OPERATION: &str = "changes";
/// How the helper says that there are too many.
const TOO_MANY: &str = "there are more than";

/// What the instance shows that the snapshot, or a fresh instance of its spec, does not.
pub(crate) async fn changes(
    shared: &Shared,
    dir: &InstanceDir,
    since: Option<&SnapshotData>,
) -> Result<Vec<Change>> {
    let then = match since {
        Some(snapshot) => snapshot::layers_of(OPERATION, snapshot)?,
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
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let message = format!("{} ({})", said.trim(), output.status);
        let kind = match said.contains(TOO_MANY) {
            true => ErrorKind::LimitExceeded,
            false => ErrorKind::Backend,
        };
        return Err(Error::new(kind, OPERATION, message));
    }
    blocking(OPERATION, move || read(&output.stdout)).await
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
    snapshot::check_layers(OPERATION, &shared.state, &now)?;
    snapshot::check_layers(OPERATION, &shared.state, then)?;
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
    wanted.extend(spec.workspace.as_deref().map(launch::workspace));
    let with_workspace = spec.workspace.is_some();
    Ok(Prepared { now, wanted, mounts, made, with_workspace })
}

/// What the helper wrote. It is ours, but what it looked at is not: nothing is taken for granted.
fn read(output: &[u8]) -> Result<Vec<Change>> {
    let broken = || failed(OPERATION, "the helper's output is broken");
    let mut changes = Vec::new();
    for record in output.split_inclusive(|byte| *byte == 0) {
        let (kind, path) = record.split_first().ok_or_else(broken)?;
        let kind = match kind {
            b'A' => ChangeKind::Added,
            b'M' => ChangeKind::Modified,
            b'D' => ChangeKind::Deleted,
            _ => return Err(broken()),
        };
        let path = path.strip_suffix(&[0]).filter(|path| path.starts_with(b"/"));
        let path = OsString::from_vec(path.ok_or_else(broken)?.to_vec()).into();
        changes.push(Change { path, kind });
    }
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_whatever_their_paths() {
        let changes = read(b"A/a\nb\0D/\xff\0").unwrap();
        assert_eq!(changes[0], Change { path: "/a\nb".into(), kind: ChangeKind::Added });
        assert_eq!(changes[1].path, PathBuf::from(OsString::from_vec(b"/\xff".to_vec())));
        assert!(read(b"").unwrap().is_empty());
        for broken in [&b"A/a"[..], b"X/a\0", b"Aa\0", b"\0"] {
            assert!(read(broken).is_err());
        }
    }
}
