//! Moving what is in one directory into another that has things in it already.

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, fchmod, fstat, openat, renameat, statat, unlinkat},
    io::Errno,
};

use super::remove::open_directory;
use crate::{Failure, FailureKind};

/// Entries noted in one pass over a directory; more are found in the next.
const BATCH: usize = 256;

/// Two directories of the same path.
struct Level {
    from: OwnedFd,
    to: OwnedFd,
    name: CString,
    entries: Entries,
}

enum Entries {
    /// All of them, one after the other: nothing is changed.
    Look(Dir),
    /// Some of those that are left.
    Move(Vec<CString>),
}

/// Moves what is in the directory `name` of `at` into `at`, and removes it; or changes nothing, and says
/// what is in the way.
pub(super) fn merge(at: BorrowedFd<'_>, name: &CStr, shown: &Path) -> Result<(), Failure> {
    for moving in [false, true] {
        let mut path = Vec::new();
        walk(at, name, moving, &mut path).map_err(|error| {
            let path: PathBuf =
                path.iter().map(|part: &CString| OsStr::from_bytes(part.to_bytes())).collect();
            error.about(&shown.join(path))
        })?;
    }
    Ok(())
}

enum Obstacle {
    Directory,
    NoDirectory,
    Filesystem,
    System(io::Error),
}

impl From<Errno> for Obstacle {
    fn from(error: Errno) -> Self {
        Self::System(error.into())
    }
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl Obstacle {
    fn about(self, path: &Path) -> Failure {
        let path = path.display();
        let message = match self {
            Self::System(error) => return Failure::system(&format!("write {path}"), &error),
            Self::Directory => format!("{path} is a directory; a file does not replace it"),
            Self::NoDirectory => format!("{path} is no directory; a directory does not replace it"),
            Self::Filesystem => {
                format!("{path} is on another filesystem; transfer to it by itself")
            }
        };
        Failure::new(FailureKind::WrongType, message)
    }
}

fn walk(
    at: BorrowedFd<'_>,
    name: &CStr,
    moving: bool,
    path: &mut Vec<CString>,
) -> Result<(), Obstacle> {
    let device = fstat(at)?.st_dev;
    let mut levels = vec![Level::new(at, name, at.try_clone_to_owned()?, moving)?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.next()? else {
            let Some(done) = levels.pop() else { break };
            let above = levels.last().map_or(at, |level| level.from.as_fd());
            if moving {
                unlinkat(above, &done.name, AtFlags::REMOVEDIR)?;
            }
            path.pop();
            continue;
        };
        path.push(name);
        let Some(name) = path.last() else { break };
        let from = statat(&level.from, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_directory = FileType::from_raw_mode(from.st_mode) == FileType::Directory;
        let there = match statat(&level.to, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) => Some(there),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error.into()),
        };
        let is_there = there.as_ref().map(|stat| FileType::from_raw_mode(stat.st_mode));
        match is_there {
            Some(FileType::Directory) if is_directory => {
                if there.is_some_and(|stat| stat.st_dev != device) {
                    return Err(Obstacle::Filesystem);
                }
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let to = openat(&level.to, name, flags, Mode::empty())?;
                let next = Level::new(level.from.as_fd(), name, to, moving)?;
                levels.push(next);
                continue;
            }
            Some(FileType::Directory) => return Err(Obstacle::Directory),
            Some(_) if is_directory => return Err(Obstacle::NoDirectory),
            _ => {}
        }
        if moving {
            move_one(level, name, is_directory)?;
        }
        path.pop();
    }
    Ok(())
}

/// Moves one entry; a directory that its owner may not write to as well.
fn move_one(level: &Level, name: &CStr, is_directory: bool) -> Result<(), Obstacle> {
    match renameat(&level.from, name, &level.to, name) {
        Err(Errno::ACCESS) if is_directory => {}
        moved => return Ok(moved?),
    }
    let stat = statat(&level.from, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let directory = open_directory(level.from.as_fd(), name)?;
    renameat(&level.from, name, &level.to, name)?;
    Ok(fchmod(&directory, Mode::from_raw_mode(stat.st_mode))?)
}

impl Level {
    fn new(above: BorrowedFd<'_>, name: &CStr, to: OwnedFd, moving: bool) -> io::Result<Self> {
        let from = open_directory(above, name)?;
        let entries =
            if moving { Entries::Move(Vec::new()) } else { Entries::Look(Dir::read_from(&from)?) };
        Ok(Self { from, to, name: name.to_owned(), entries })
    }

    fn next(&mut self) -> io::Result<Option<CString>> {
        match &mut self.entries {
            Entries::Look(entries) => next_name(entries),
            Entries::Move(names) => {
                if names.is_empty() {
                    let mut entries = Dir::read_from(&self.from)?;
                    while names.len() < BATCH {
                        let Some(name) = next_name(&mut entries)? else { break };
                        names.push(name);
                    }
                }
                Ok(names.pop())
            }
        }
    }
}

fn next_name(entries: &mut Dir) -> io::Result<Option<CString>> {
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}
