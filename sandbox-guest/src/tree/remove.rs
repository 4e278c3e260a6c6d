//! Removing a directory tree, whatever its permissions are, and nothing that a link in it points to.

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fchmod, fstat, openat, statat, unlinkat},
    io::Errno,
};

/// Subdirectories noted in one pass over a directory; more are found in the next.
const BATCH: usize = 256;

struct Level {
    directory: OwnedFd,
    name: CString,
    subdirectories: Vec<CString>,
}

/// Removes a file or a tree.
///
/// # Errors
///
/// The system's; some of it may be gone by then.
pub fn remove_all(path: &Path) -> io::Result<()> {
    remove_at(CWD, &CString::new(path.as_os_str().as_bytes())?)
}

/// As [`remove_all`], by a path that begins at an open directory.
///
/// # Errors
///
/// As [`remove_all`].
pub fn remove_at(at: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let stat = statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(unlinkat(at, name, AtFlags::empty())?);
    }
    let name = name.to_owned();
    let root = open_directory(at, &name)?;
    let device = fstat(&root)?.st_dev;
    let mut levels = vec![Level { directory: root, name, subdirectories: Vec::new() }];
    while let Some(level) = levels.last_mut() {
        if level.subdirectories.is_empty() {
            empty(level)?;
        }
        if let Some(name) = level.subdirectories.pop() {
            let directory = open_directory(level.directory.as_fd(), &name)?;
            if fstat(&directory)?.st_dev != device {
                return Err(Errno::XDEV.into());
            }
            levels.push(Level { directory, name, subdirectories: Vec::new() });
            continue;
        }
        let Some(done) = levels.pop() else { break };
        match levels.last() {
            Some(parent) => unlinkat(&parent.directory, &done.name, AtFlags::REMOVEDIR)?,
            None => unlinkat(at, &done.name, AtFlags::REMOVEDIR)?,
        }
    }
    Ok(())
}

/// Removes what is no directory, and notes some of what is.
fn empty(level: &mut Level) -> io::Result<()> {
    let mut entries = Dir::read_from(&level.directory)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => {
                let stat = statat(&level.directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            }
            _ => false,
        };
        if !directory {
            unlinkat(&level.directory, name, AtFlags::empty())?;
        } else if level.subdirectories.len() < BATCH {
            level.subdirectories.push(name.to_owned());
        }
    }
    Ok(())
}

/// Opens a directory that may be closed to its owner, and makes it open to the owner.
pub(super) fn open_directory(at: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match openat(at, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            open_up(at, name)?;
            openat(at, name, flags, Mode::empty())?
        }
        opened => opened?,
    };
    let mode = Mode::from_raw_mode(fstat(&directory)?.st_mode);
    if !mode.contains(Mode::RWXU) {
        fchmod(&directory, mode | Mode::RWXU)?;
    }
    Ok(directory)
}

/// Gives the owner all rights to a directory that is no link.
#[cfg(target_os = "linux")]
fn open_up(at: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = openat(at, name, flags, Mode::empty())?;
    let mode = Mode::from_raw_mode(fstat(&handle)?.st_mode) | Mode::RWXU;
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    Ok(rustix::fs::chmod(path, mode)?)
}

#[cfg(not(target_os = "linux"))]
fn open_up(at: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let stat = statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mode = Mode::from_raw_mode(stat.st_mode) | Mode::RWXU;
    Ok(rustix::fs::chmodat(at, name, mode, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_tree_goes_and_what_its_links_point_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("tree");
        fs::create_dir_all(root.join("a/b/c")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/kept"), "x").unwrap();
        std::os::unix::fs::symlink(dir.path().join("outside"), root.join("a/link")).unwrap();
        for n in 0..1000 {
            fs::create_dir(root.join(format!("d{n}"))).unwrap();
            fs::write(root.join(format!("d{n}/file")), "x").unwrap();
        }
        fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o000)).unwrap();
        fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o555)).unwrap();
        remove_all(&root).unwrap();
        assert!(!root.exists());
        assert!(dir.path().join("outside/kept").exists());
        assert!(remove_all(&root).unwrap_err().kind() == io::ErrorKind::NotFound);
    }
}
