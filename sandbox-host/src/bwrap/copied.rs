//! Layers that are copies: of the upper layer of an instance in which something runs, or of all layers of
//! a stack that has grown tall.

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
};

use sandbox_core::{Result, SnapshotData, SnapshotId};

use crate::cleanup;

use super::{
    error::{at, blocking, failed},
    helper,
    instance::{InstanceDir, Marks, PARTS, private_dir},
    layers::{OPERATION, begin, describe},
    run_as::RunAs,
    shared::Shared,
    staging::{Kind, Wanted},
    tree,
};

/// Copies the instance's upper layer, or merges it with all that it stands on if the new one stands alone.
/// The instance's processes stand still meanwhile.
pub(crate) async fn copy(
    shared: &Shared,
    dir: &InstanceDir,
    marks: &Marks,
    layers: Vec<SnapshotId>,
    id: &SnapshotId,
) -> Result<SnapshotData> {
    let upper = dir.fs().join("upper");
    let run_as = marks.run_as;
    let below = if layers.len() > marks.layers.len() { Vec::new() } else { marks.layers.clone() };
    let merges = !below.is_empty();
    let (wanted, half) = {
        let (shared, layers) = (shared.clone(), layers.clone());
        blocking(OPERATION, move || {
            let path = begin(&shared.state, &layers, None)?;
            let half = Half(path.clone());
            let to = path.join("copy");
            let make = |dir: &Path| {
                private_dir(dir)?;
                match run_as {
                    Some(RunAs { uid, gid }) => chown(dir, Some(uid), Some(gid)),
                    None => Ok(()),
                }
            };
            make(&to).map_err(at(OPERATION, &to))?;
            if merges {
                make(&to.join("upper")).map_err(at(OPERATION, &to))?;
            }
            let guest = shared.guest_dir()?;
            let ours = |path| Wanted { what: "snapshot's part", path, kind: Kind::Ours };
            Ok((vec![ours(guest), ours(upper), ours(to), ours(shared.state.layers())], half))
        })
        .await?
    };
    let output = helper::run_helper(shared, OPERATION, wanted, move |paths| {
        let [guest, from, to, layers] = paths else { return Vec::new() };
        if merges {
            return helper::merge_arguments(guest, from, to, layers, &below);
        }
        let mut arguments = helper::copy_arguments(guest, from, to);
        arguments.extend(["/from".into(), "/to/upper".into()]);
        arguments
    })
    .await?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let message = format!("copying the files: {} ({})", said.trim(), output.status);
        return Err(failed(OPERATION, message));
    }
    let (state, id) = (shared.state.clone(), id.clone());
    blocking(OPERATION, move || {
        let path = half.0.clone();
        let finish = || {
            for part in PARTS {
                fs::rename(path.join("copy/upper").join(part), path.join(part))?;
            }
            tree::remove(&path.join("copy"))?;
            fs::rename(&path, state.layers().join(id.as_str()))
        };
        finish().map_err(at(OPERATION, &path))?;
        describe(&state, &id, &layers)
    })
    .await
}

/// A layer that is being copied; what is left of it is removed with this.
struct Half(PathBuf);

impl Drop for Half {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.0);
        if path.exists() {
            // Its removal may take long, and this may be an asynchronous task.
            let _ = cleanup::spawn(move || {
                let _ = tree::remove(&path);
            });
        }
    }
}
