//! Helper programs: the guest program's small tools, each run once in a `bwrap` of its own that sees
//! nothing but what it works on.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use sandbox_core::{Result, SnapshotId};

use crate::tool;

use super::{
    host::INSIDE_ID,
    instance::PARTS,
    plan::{Line, WORKSPACE},
    programs::find_program,
    shared::Shared,
    staging::Wanted,
};

/// Runs a helper to its end, without the harness's environment and descriptors. Dropping the future kills
/// it; so does the harness's end.
pub(crate) async fn run_helper(
    shared: &Shared,
    operation: &'static str,
    wanted: Vec<Wanted>,
    arguments: impl FnOnce(&[PathBuf]) -> Vec<OsString> + Send + 'static,
) -> Result<std::process::Output> {
    let shared = shared.clone();
    tool::run(operation, "bwrap", move || {
        let staged = shared.stager.stage(operation, &wanted)?;
        let mut command = Command::new(find_program(&shared.program)?);
        command.args(arguments(&staged.paths));
        Ok((command, staged.stage))
    })
    .await
}

/// The directories that a helper looks for changes in.
#[derive(Debug)]
pub(crate) struct Compared<'a> {
    pub(crate) guest: &'a Path,
    /// The instance's `fs/upper`.
    pub(crate) upper: &'a Path,
    pub(crate) layers: &'a Path,
    pub(crate) root: &'a Path,
    pub(crate) workspace: Option<&'a Path>,
}

/// bwrap's arguments for a helper that compares what an instance on the layers `now` shows with what one
/// on the layers `then` would, both lowest first. It sees nothing else, and may read what its own user
/// forbade itself to read.
pub(crate) fn changes_arguments(
    sources: &Compared<'_>,
    now: &[SnapshotId],
    then: &[SnapshotId],
    mounts: &[PathBuf],
    made: Option<&Path>,
) -> Vec<OsString> {
    let mut line = helper(sources.guest);
    line.mount("--ro-bind", sources.upper, "/upper");
    line.mount("--ro-bind", sources.layers, "/layers");
    line.mount("--ro-bind", sources.root, "/base/root");
    match sources.workspace {
        Some(workspace) => line.mount("--ro-bind", workspace, "/base/workspace"),
        None => line.words(["--dir", "/base/workspace"]),
    }
    line.words(["--", "/guest/guest", "changes"]);
    let shared = now.iter().zip(then).take_while(|(now, then)| now == then).count();
    for (part, at) in [("root", ""), ("workspace", WORKSPACE)] {
        line.words(["part", at]);
        line.words(["now", &format!("/upper/{part}")]);
        for (word, layers) in
            [("now", &now[shared..]), ("then", &then[shared..]), ("both", &now[..shared])]
        {
            for layer in layers.iter().rev() {
                line.words([word, &format!("/layers/{layer}/{part}")]);
            }
        }
        line.words(["both", &format!("/base/{part}")]);
        if then.is_empty() {
            line.words(["root-mode", "755"]);
        }
        for (word, paths) in [("hidden", mounts), ("made", made.map(Path::to_owned).as_slice())] {
            for path in paths {
                // All that is below the workspace is in the workspace's overlay.
                let below = path.strip_prefix(WORKSPACE).ok();
                let path = match part {
                    "workspace" => below.filter(|below| *below != Path::new("")),
                    _ => Some(path.as_path()),
                };
                if let Some(path) = path {
                    line.0.extend([word.into(), Path::new("/").join(path).into()]);
                }
            }
        }
    }
    line.0
}

/// bwrap's arguments for a helper that copies a layer, blind to everything else. It may read what its
/// own user forbade itself to read, such as a directory of mode 000.
pub(crate) fn copy_arguments(guest: &Path, from: &Path, to: &Path) -> Vec<OsString> {
    let mut line = helper(guest);
    line.mount("--ro-bind", from, "/from");
    line.mount("--bind", to, "/to");
    line.words(["--", "/guest/guest", "copy-tree"]);
    line.0
}

/// bwrap's arguments for a helper that makes one layer of an instance's upper one and of all that it
/// stands on, lowest first. Its parts come to be in `upper` below
/// `to`.
pub(crate) fn merge_arguments(
    guest: &Path,
    upper: &Path,
    to: &Path,
    layers: &Path,
    stack: &[SnapshotId],
) -> Vec<OsString> {
    let mut line = helper(guest);
    line.mount("--ro-bind", upper, "/from");
    line.mount("--ro-bind", layers, "/layers");
    line.mount("--bind", to, "/to");
    line.words(["--", "/guest/guest", "merge-layers"]);
    for (index, part) in PARTS.iter().enumerate() {
        if index > 0 {
            line.words(["--"]);
        }
        line.words([&format!("/to/upper/{part}"), &format!("/from/{part}")]);
        for layer in stack.iter().rev() {
            line.words([&format!("/layers/{layer}/{part}")]);
        }
    }
    line.0
}

fn helper(guest: &Path) -> Line {
    let mut line = Line::default();
    line.words(["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts"]);
    line.words(["--unshare-cgroup-try", "--unshare-net", "--die-with-parent"]);
    let id = INSIDE_ID.to_string();
    line.words(["--uid", &id, "--gid", &id, "--clearenv"]);
    line.words(["--cap-add", "CAP_DAC_OVERRIDE", "--cap-add", "CAP_DAC_READ_SEARCH"]);
    line.mount("--ro-bind", guest, "/guest");
    line
}
