//! Removing a directory tree, whatever its permissions are, and nothing that a link in it points to.

use std::{ffi::CString, io, os::fd::OwnedFd, path::Path};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, fchmod, fstat, openat, statat, unlinkat,
};
use rustix::io::Errno;

use super::guest::errno_text;

/// Subdirectories noted in one pass over a directory; more are found in the next.
const BATCH: usize = 256;

struct Level {
    directory: OwnedFd,
    name: CString,
    subdirectories: Vec<CString>,
}

/// Removes a file or a tree.
pub(crate) fn remove(path: &Path) -> Result<(), String> {
    remove_all(path).map_err(|error| format!("remove {}: {}", path.display(), errno_text(&error)))
}

/// As [`remove`], with the system's error.
pub(crate) fn remove_all(path: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let name = CString::new(path.as_os_str().as_bytes())?;
    let stat = statat(CWD, &name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(unlinkat(CWD, &name, AtFlags::empty())?);
    }
    let root = open_directory(None, &name)?;
    let device = fstat(&root)?.st_dev;
    let mut levels = vec![Level { directory: root, name, subdirectories: Vec::new() }];
    while let Some(level) = levels.last_mut() {
        if level.subdirectories.is_empty() {
            empty(level)?;
        }
        if let Some(name) = level.subdirectories.pop() {
            let directory = open_directory(Some(&level.directory), &name)?;
            if fstat(&directory)?.st_dev != device {
                return Err(Errno::XDEV.into());
            }
            levels.push(Level { directory, name, subdirectories: Vec::new() });
            continue;
        }
        let Some(done) = levels.pop() else { break };
        match levels.last() {
            Some(parent) => unlinkat(&parent.directory, &done.name, AtFlags::REMOVEDIR)?,
            None => unlinkat(CWD, &done.name, AtFlags::REMOVEDIR)?,
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
fn open_directory(parent: Option<&OwnedFd>, name: &CString) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open_with = |more: OFlags| match parent {
        Some(parent) => openat(parent, name, flags | more, Mode::empty()),
        None => openat(CWD, name, flags | more, Mode::empty()),
    };
    let directory = match open_with(OFlags::RDONLY) {
        Err(Errno::ACCESS) => {
            let handle = open_with(OFlags::PATH)?;
            open_up(&handle)?;
            open_with(OFlags::RDONLY)?
        }
        opened => opened?,
    };
    let mode = Mode::from_raw_mode(fstat(&directory)?.st_mode);
    if !mode.contains(Mode::RWXU) {
        fchmod(&directory, mode | Mode::RWXU)?;
    }
    Ok(directory)
}

/// Gives the owner all rights to what a path handle stands for.
fn open_up(handle: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let mode = Mode::from_raw_mode(fstat(handle)?.st_mode) | Mode::RWXU;
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
    Ok(rustix::fs::chmod(path, mode)?)
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
        remove(&root).unwrap();
        assert!(!root.exists());
        assert!(dir.path().join("outside/kept").exists());
        assert!(remove(&root).unwrap_err().contains("No such file"));
    }
}
