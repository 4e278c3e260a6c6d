//! Where a file or tree is written, and how it gets to its place.

use std::{
    ffi::{CStr, CString},
    fs,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, statat},
    io::Errno,
};

use super::{merge, remove::remove_at};
use crate::{Existing, Failure, FailureKind};

/// Where something is being made, and where it will be.
#[derive(Debug)]
pub(super) struct Place {
    /// The directory that it is made in.
    directory: OwnedFd,
    /// What it becomes in that directory; nothing if it is merged with that directory.
    name: Option<CString>,
    /// What it is called until then.
    temporary: CString,
    made: bool,
    /// Something that is no directory has the name, and stays unless it is replaced by another such.
    file_there: bool,
    shown: PathBuf,
}

impl Place {
    /// Looks at the destination, before anything is made there.
    pub(super) fn find(path: &Path, existing: Existing, parents: bool) -> Result<Self, Failure> {
        let failed = |error| Failure::system(&format!("write {}", path.display()), &error);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let place = |directory, name| Self {
            directory,
            name,
            temporary: temporary(),
            made: false,
            file_there: false,
            shown: path.to_owned(),
        };
        if existing == Existing::Merge
            && let Ok(directory) = openat(CWD, path, flags, Mode::empty())
        {
            return Ok(place(directory, None));
        }
        let Some(name) = path.file_name() else {
            let message = format!("{} is no name that something can be put under", path.display());
            return Err(Failure::new(FailureKind::Invalid, message));
        };
        let name = CString::new(name.as_bytes()).map_err(|error| failed(error.into()))?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if parents {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        let directory =
            openat(CWD, parent, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let is_there = statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if existing == Existing::Refuse && is_there {
            return Err(in_the_way(path));
        }
        let file_there = existing == Existing::Merge && is_there;
        Ok(Self { file_there, ..place(directory, Some(name)) })
    }

    /// The directory that the thing itself is made in.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    pub(super) fn shown(&self) -> &Path {
        &self.shown
    }

    /// Where the thing itself is to be made, if it may be what it is.
    pub(super) fn begin(&mut self, directory: bool) -> Result<CString, Failure> {
        let path = self.shown.display();
        let message = if self.name.is_none() && !directory {
            format!("{path} is a directory; a file does not replace it")
        } else if self.file_there && directory {
            format!("{path} is no directory; a directory does not replace it")
        } else {
            self.made = true;
            return Ok(self.temporary.clone());
        };
        Err(Failure::new(FailureKind::WrongType, message))
    }

    /// What there is to remove.
    pub(super) fn temporary(&self) -> Option<(BorrowedFd<'_>, &CStr)> {
        self.made.then_some((self.directory.as_fd(), &self.temporary))
    }

    /// Puts what was made in its place.
    pub(super) fn install(&mut self, existing: Existing) -> Result<(), Failure> {
        let at = self.directory.as_fd();
        let moved = match (&self.name, existing) {
            (None, _) => return merge::merge(at, &self.temporary, &self.shown),
            (Some(name), Existing::Merge) => renameat(at, &self.temporary, at, name),
            (Some(name), Existing::Refuse) => match rename_new(at, &self.temporary, name) {
                Err(Errno::EXIST | Errno::NOTEMPTY) => return Err(in_the_way(&self.shown)),
                moved => moved,
            },
            (Some(name), Existing::Replace) => replace(at, &self.temporary, name),
        };
        moved.map_err(|error| {
            Failure::system(&format!("write {}", self.shown.display()), &error.into())
        })?;
        // After an exchange, what was there before is left under the temporary name.
        self.made = existing == Existing::Replace;
        Ok(())
    }
}

fn in_the_way(path: &Path) -> Failure {
    Failure::new(FailureKind::AlreadyExists, format!("{} exists already", path.display()))
}

/// Renames if nothing has the name.
fn rename_new(at: BorrowedFd<'_>, from: &CStr, to: &CStr) -> rustix::io::Result<()> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{RenameFlags, renameat_with};
        match renameat_with(at, from, at, to, RenameFlags::NOREPLACE) {
            // Not on this filesystem.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            moved => return moved,
        }
    }
    match statat(at, to, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Err(Errno::EXIST),
        Err(Errno::NOENT) => renameat(at, from, at, to),
        Err(error) => Err(error),
    }
}

/// Renames, whatever has the name. What had it has the other name afterwards, or is gone.
fn replace(at: BorrowedFd<'_>, from: &CStr, to: &CStr) -> rustix::io::Result<()> {
    match rename_new(at, from, to) {
        Err(Errno::EXIST | Errno::NOTEMPTY) => {}
        moved => return moved,
    }
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    {
        use rustix::fs::{RenameFlags, renameat_with};
        match renameat_with(at, from, at, to, RenameFlags::EXCHANGE) {
            // Not on this filesystem, or not with a directory of an overlay's lower layers.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP | Errno::XDEV) => {}
            moved => return moved,
        }
    }
    remove_at(at, to).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    renameat(at, from, at, to)
}

/// A name that nothing has: of this process, at this time, for the how-manieth time.
fn temporary() -> CString {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = format!("{}{}-{time}-{count}", super::TEMPORARY, std::process::id());
    CString::new(name).unwrap_or_default()
}
