//! For a harness that runs as root: showing its files to the unprivileged user that sandboxes run as.
//!
//! That user can neither reach what lies below a directory such as `/root`, nor does it own a source
//! repository of root's. So each source is mounted once more, detached, while the harness is root; for
//! what belongs to others the mount is *idmapped*: files of the source's owner appear as the sandbox
//! user's, and files that the sandbox user makes there become the owner's. The files themselves stay as
//! they are. Between fork and exec the mounts are attached in a mount namespace that only bwrap sees.
//!
//! A harness that is not root needs none of this: its sandboxes run as itself.

use std::{
    collections::HashMap,
    ffi::CString,
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::CWD,
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
};
use sandbox_core::{Access, Error, Result};

use super::{run_as::RunAs, sys};

/// Where mounts are attached: a directory that every user can reach and that bwrap does not need as it
/// is on the host, as it lays out its own root there too.
const STAGE: &str = "/tmp";
/// One more than the highest id there is.
const END_OF_IDS: u32 = u32::MAX;

/// A path of this host that bwrap has to mount.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// For messages: `workspace`, `mount`.
    pub(crate) what: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) kind: Kind,
}

/// Whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The backend's, and owned as it has to be.
    Ours,
    /// Somebody's directory that is shown through an overlay: what is mounted below it does not count.
    Below,
    /// Somebody's file or directory that is shown itself.
    Shown(Access),
}

/// Paths as bwrap shall name them.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    pub(crate) paths: Vec<PathBuf>,
    /// For a root harness: what its child has to do before it starts bwrap.
    pub(crate) stage: Option<sys::Stage>,
}

/// Stages for one user.
#[derive(Debug, Default)]
pub(crate) struct Stager {
    run_as: Option<RunAs>,
    /// By the owner that they show as the sandbox's user.
    namespaces: Mutex<HashMap<(u32, u32), Arc<OwnedFd>>>,
}

impl Stager {
    pub(crate) fn new(run_as: Option<RunAs>) -> Self {
        Self { run_as, namespaces: Mutex::default() }
    }

    /// Makes these paths reachable.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the sandbox's user cannot be given a source, with what to do.
    pub(crate) fn stage(&self, operation: &'static str, wanted: &[Wanted]) -> Result<Staged> {
        let Some(run_as) = self.run_as else {
            let paths = wanted.iter().map(|wanted| wanted.path.clone()).collect();
            return Ok(Staged { paths, stage: None });
        };
        let mut mounts = Vec::new();
        let mut paths = Vec::new();
        for (index, wanted) in wanted.iter().enumerate() {
            let failed = |error| {
                let what = format!("the {} {}", wanted.what, wanted.path.display());
                Error::io(operation, what, error)
            };
            let metadata = fs::metadata(&wanted.path).map_err(failed)?;
            let mount = self.detached(operation, wanted, &metadata, run_as)?;
            let path = format!("{STAGE}/{index}");
            let name = CString::new(path.as_str()).map_err(|error| failed(error.into()))?;
            mounts.push((mount, name, metadata.is_dir()));
            paths.push(path.into());
        }
        let at = CString::new(STAGE).unwrap_or_default();
        let stage = sys::Stage { at, mounts, uid: run_as.uid, gid: run_as.gid };
        Ok(Staged { paths, stage: Some(stage) })
    }

    fn detached(
        &self,
        operation: &'static str,
        wanted: &Wanted,
        metadata: &fs::Metadata,
        run_as: RunAs,
    ) -> Result<OwnedFd> {
        let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        if matches!(wanted.kind, Kind::Shown(_)) {
            flags |= OpenTreeFlags::AT_RECURSIVE;
        }
        let mount = open_tree(CWD, &wanted.path, flags)
            .map_err(|error| cannot_mount(operation, wanted, run_as, error))?;
        let owner = (metadata.uid(), metadata.gid());
        if wanted.kind == Kind::Ours || owner == (run_as.uid, run_as.gid) {
            return Ok(mount);
        }
        let mapped = self
            .namespace(owner, run_as)
            .and_then(|namespace| sys::map_owners(mount.as_fd(), namespace.as_fd()));
        match mapped {
            Ok(()) => Ok(mount),
            // As it is, everybody may look at it.
            Err(_) if wanted.kind == Kind::Shown(Access::ReadOnly) && is_public(metadata) => {
                Ok(mount)
            }
            Err(error) => Err(cannot_map(operation, wanted, run_as, error)),
        }
    }

    fn namespace(&self, owner: (u32, u32), run_as: RunAs) -> io::Result<Arc<OwnedFd>> {
        let mut namespaces = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(namespace) = namespaces.get(&owner) {
            return Ok(namespace.clone());
        }
        let uids = id_map(owner.0, run_as.uid);
        let gids = id_map(owner.1, run_as.gid);
        let namespace = Arc::new(sys::user_namespace(&uids, &gids)?);
        namespaces.insert(owner, namespace.clone());
        Ok(namespace)
    }
}

/// Whether everybody can read it, as far as can be told from the top.
fn is_public(metadata: &fs::Metadata) -> bool {
    let needed = if metadata.is_dir() { 0o005 } else { 0o004 };
    metadata.permissions().mode() & needed == needed
}

fn cannot_mount(operation: &'static str, wanted: &Wanted, run_as: RunAs, error: Errno) -> Error {
    let mut message = format!(
        "mounting the {} {} for the user that sandboxes run as ({})",
        wanted.what,
        wanted.path.display(),
        run_as.uid
    );
    if error == Errno::PERM {
        message.push_str(
            "; this root may not mount (it has no CAP_SYS_ADMIN), as in a container: run the harness as an \
             ordinary user there, or start the container with --cap-add SYS_ADMIN",
        );
    }
    Error::io(operation, message, error.into())
}

fn cannot_map(operation: &'static str, wanted: &Wanted, run_as: RunAs, error: io::Error) -> Error {
    let message = format!(
        "the {} {} belongs to another user than the one that sandboxes run as ({}), and its filesystem \
         cannot be mounted with other owners (an idmapped mount); copy it to another filesystem such as \
         ext4, xfs, btrfs or tmpfs, or run the harness as the user that it belongs to",
        wanted.what,
        wanted.path.display(),
        run_as.uid,
    );
    Error::unsupported(operation, message).with_source(error)
}

/// A map, in the form of `/proc/<pid>/uid_map`, that shows `owner` as `user` and every other id but
/// these two as itself.
fn id_map(owner: u32, user: u32) -> String {
    let (low, high) = (owner.min(user), owner.max(user));
    let mut lines = format!("{owner} {user} 1\n");
    let between = low.saturating_add(1);
    for (first, end) in [(0, low), (between, high), (high.saturating_add(1), END_OF_IDS)] {
        if first < end {
            lines.push_str(&format!("{first} {first} {}\n", end - first));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_becomes_the_sandboxs_user_and_nobody_else_does() {
        assert_eq!(
            id_map(0, 1_900_000_000),
            "0 1900000000 1\n1 1 1899999999\n1900000001 1900000001 2394967294\n"
        );
        assert_eq!(id_map(1000, 5), "1000 5 1\n0 0 5\n6 6 994\n1001 1001 4294966294\n");
    }

    #[test]
    fn an_ordinary_harness_names_paths_as_they_are() {
        let wanted = [Wanted { what: "workspace", path: "/a b".into(), kind: Kind::Below }];
        let staged = Stager::new(None).stage("provision", &wanted).unwrap();
        assert_eq!(staged.paths, [PathBuf::from("/a b")]);
        assert!(staged.stage.is_none());
    }
}
