//! Copying a directory tree exactly: an overlay's upper layer keeps its meaning, sparse files stay
//! sparse, and hard links within the tree stay links. Memory grows only with the hard links.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid,
        XattrFlags, chmod, chownat, fchmod, fchown, fgetxattr, flistxattr, fsetxattr, fstat,
        futimens, linkat, mkdirat, mknodat, openat, readlinkat, statat, symlinkat, utimensat,
    },
    io::Errno,
};

use super::{base::errno_text, copy_data::copy_data, tree_remove};

/// A directory, and the one that becomes its copy.
pub(crate) struct Pair {
    pub(crate) source: OwnedFd,
    pub(crate) target: OwnedFd,
}

struct Level {
    at: Pair,
    entries: Dir,
    stat: Stat,
    /// How long the path was above this level.
    above: usize,
}

/// A copy that is being made.
pub(crate) struct Copy {
    root: OwnedFd,
    /// Where a file with several links was copied to first.
    links: HashMap<(u64, u64), CString>,
    /// Of the current entry, from the root.
    pub(crate) path: Vec<u8>,
}

/// Copies a tree to a place where nothing is yet; what is half done is removed.
pub(crate) fn copy(source: &Path, target: &Path) -> Result<(), String> {
    let failed = |path: &[u8], error: &io::Error| {
        let path = source.join(std::ffi::OsStr::from_bytes(path));
        format!("copy {} to {}: {}", path.display(), target.display(), errno_text(error))
    };
    raise_file_limit();
    mkdirat(CWD, target, Mode::RWXU).map_err(|error| failed(b"", &error.into()))?;
    let mut path = Vec::new();
    copy_tree(source, target, &mut path).map_err(|error| {
        let _ = tree_remove::remove(target);
        failed(&path, &error)
    })
}

/// Two descriptors are open for each level of the tree.
pub(crate) fn raise_file_limit() {
    let (_, hard) = super::sys::limit(libc::RLIMIT_NOFILE);
    let _ = super::sys::set_limit(libc::RLIMIT_NOFILE, hard, hard);
}

fn copy_tree(source: &Path, target: &Path, failed: &mut Vec<u8>) -> io::Result<()> {
    let source = CString::new(source.as_os_str().as_bytes())?;
    let target = CString::new(target.as_os_str().as_bytes())?;
    let stat = statat(CWD, &source, AtFlags::SYMLINK_NOFOLLOW)?;
    let from = open_source(CWD, &source, &stat, OFlags::DIRECTORY)?;
    let root = openat(CWD, &target, directory_flags(), Mode::empty())?;
    let mut copy = Copy::to(&root)?;
    let mut levels = vec![Level::new(Pair { source: from, target: root }, stat, 0)?];
    while let Some(level) = levels.last_mut() {
        let entry = match level.entries.read() {
            Some(entry) => entry?,
            None => {
                let Some(done) = levels.pop() else { break };
                // Last, since every new entry changed the time.
                settle(&done.at.source, &done.at.target, &done.stat)?;
                copy.path.truncate(done.above);
                continue;
            }
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let above = copy.descend(name);
        match copy.entry(&level.at, name) {
            Ok(Some((pair, stat))) => levels.push(Level::new(pair, stat, above)?),
            Ok(None) => copy.path.truncate(above),
            Err(error) => {
                *failed = copy.path;
                return Err(error);
            }
        }
    }
    Ok(())
}

impl Level {
    fn new(at: Pair, stat: Stat, above: usize) -> io::Result<Self> {
        let entries = Dir::read_from(&at.source)?;
        Ok(Self { at, entries, stat, above })
    }
}

impl Copy {
    pub(crate) fn to(root: &OwnedFd) -> io::Result<Self> {
        Ok(Self { root: root.try_clone()?, links: HashMap::new(), path: Vec::new() })
    }

    /// Adds a name to the path, and returns how long that was.
    pub(crate) fn descend(&mut self, name: &CStr) -> usize {
        let above = self.path.len();
        if above > 0 {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name.to_bytes());
        above
    }

    /// Copies one entry; a directory is made, to be gone into next.
    pub(crate) fn entry(&mut self, level: &Pair, name: &CStr) -> io::Result<Option<(Pair, Stat)>> {
        let stat = statat(&level.source, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            let source = open_source(level.source.as_fd(), name, &stat, OFlags::DIRECTORY)?;
            mkdirat(&level.target, name, Mode::RWXU)?;
            let target = openat(&level.target, name, directory_flags(), Mode::empty())?;
            return Ok(Some((Pair { source, target }, stat)));
        }
        let file = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&file) {
                linkat(&self.root, first, &level.target, name, AtFlags::empty())?;
                return Ok(None);
            }
            self.links.insert(file, CString::new(self.path.as_slice())?);
        }
        match kind {
            FileType::RegularFile => copy_file(level, name, &stat)?,
            FileType::Symlink => {
                let says = readlinkat(&level.source, name, Vec::new())?;
                symlinkat(&says, &level.target, name)?;
                settle_at(level, name, &stat)?;
            }
            FileType::Fifo => {
                mknodat(&level.target, name, kind, Mode::from_raw_mode(stat.st_mode), 0)?;
                settle_at(level, name, &stat)?;
            }
            // How an overlay notes that something is deleted.
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                mknodat(&level.target, name, kind, Mode::from_raw_mode(stat.st_mode), 0)?;
                settle_at(level, name, &stat)?;
            }
            // Nobody listens on the copy of a socket.
            FileType::Socket => {}
            _ => return Err(io::Error::other("a device cannot be copied")),
        }
        Ok(None)
    }
}

pub(crate) fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Opens for reading also what its owner made unreadable, and leaves the mode as it was.
fn open_source(
    directory: impl AsFd,
    name: &CStr,
    stat: &Stat,
    more: OFlags,
) -> io::Result<OwnedFd> {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | more;
    match openat(&directory, name, flags | OFlags::RDONLY, Mode::empty()) {
        Err(Errno::ACCESS) => {
            let handle = openat(&directory, name, flags | OFlags::PATH, Mode::empty())?;
            let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
            let mode = Mode::from_raw_mode(stat.st_mode);
            chmod(path.as_str(), mode | Mode::RUSR | Mode::XUSR)?;
            let opened = openat(&directory, name, flags | OFlags::RDONLY, Mode::empty());
            // An open directory's entries need the right to search it as long as they are copied:
            // that one is put right at its end.
            if !more.contains(OFlags::DIRECTORY) {
                chmod(path.as_str(), mode)?;
            }
            Ok(opened?)
        }
        opened => Ok(opened?),
    }
}

fn copy_file(level: &Pair, name: &CStr, stat: &Stat) -> io::Result<()> {
    let source = open_source(level.source.as_fd(), name, stat, OFlags::empty())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = openat(&level.target, name, flags, Mode::RUSR | Mode::WUSR)?;
    copy_data(&source, &target, stat.st_size as u64)?;
    settle(source.as_fd(), target.as_fd(), stat)
}

/// Gives an open file or directory the owner, attributes, mode and times of its source.
pub(crate) fn settle(source: impl AsFd, target: impl AsFd, stat: &Stat) -> io::Result<()> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    if Mode::from_raw_mode(fstat(&source)?.st_mode) != mode {
        // It was opened up to be read.
        fchmod(&source, mode)?;
    }
    let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    permitted(fchown(&target, owner.0, owner.1))?;
    copy_attributes(&source, &target)?;
    fchmod(&target, mode)?;
    Ok(futimens(&target, &times(stat))?)
}

/// As [`settle`], for what cannot be opened. None of it can have `user.*` attributes.
fn settle_at(level: &Pair, name: &CStr, stat: &Stat) -> io::Result<()> {
    let here = AtFlags::SYMLINK_NOFOLLOW;
    let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    permitted(chownat(&level.target, name, owner.0, owner.1, here))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        let mode = Mode::from_raw_mode(stat.st_mode);
        rustix::fs::chmodat(&level.target, name, mode, AtFlags::empty())?;
    }
    Ok(utimensat(&level.target, name, &times(stat), here)?)
}

/// An owner that may not be set stays the caller.
fn permitted(done: rustix::io::Result<()>) -> io::Result<()> {
    match done {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        done => Ok(done?),
    }
}

fn times(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as _ },
    }
}

fn copy_attributes(source: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let mut names = vec![0; 4096];
    let length = loop {
        match flistxattr(&source, &mut names[..]) {
            Ok(length) => break length,
            Err(Errno::RANGE) if names.len() < 1024 * 1024 => names.resize(names.len() * 4, 0),
            Err(Errno::NOTSUP) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    };
    let mut value = Vec::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|n| n.starts_with(b"user.")) {
        let name = CString::new(name)?;
        // The most that Linux takes.
        value.resize(64 * 1024, 0);
        let length = fgetxattr(&source, &name, &mut value[..])?;
        fsetxattr(&target, &name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}
