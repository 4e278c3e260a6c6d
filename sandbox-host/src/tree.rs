//! Removing directories that something hostile filled.

use std::{
    ffi::{CStr, CString},
    io,
    path::Path,
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RawMode},
    io::Errno,
};

/// How deep to descend before a directory is brought up to the top: bounds the open descriptors.
const DEPTH: usize = 64;

/// Removes a file or directory with all in it, whatever its modes, names and depth. It follows no link
/// and needs no more than to own what is there. Nothing there is no error, also where somebody else is
/// removing it at the same time.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let is_dir = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.is_dir(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !is_dir {
        return gone_is_removed(std::fs::remove_file(path));
    }
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    let top = match open(CWD, &path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        top => top?,
    };
    let mut next = 0;
    loop {
        // What was too deep is an entry of the top directory after a pass, whoever made it that.
        while clear(&top, top.as_fd(), 0, &mut next)? {}
        match unlink(CWD, &path, AtFlags::REMOVEDIR) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            removed => return removed,
        }
    }
}

/// Moves a directory to another place, so that it is what it was no more, and removes it there: this entry of
/// it last, which tells whose it is. Many may do so at once, and again where one was interrupted.
pub(crate) fn discard(path: &Path, trash: &Path, last: &str) -> io::Result<()> {
    if path != trash {
        gone_is_removed(std::fs::rename(path, trash))?;
    }
    let entries = match std::fs::read_dir(trash) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name() != last {
            remove(&entry.path())?;
        }
    }
    remove(trash)
}

fn gone_is_removed(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn unlink(at: impl AsFd, name: &CStr, flags: AtFlags) -> io::Result<()> {
    gone_is_removed(rustix::fs::unlinkat(at, name, flags).map_err(io::Error::from))
}

/// Empties a directory; says whether something of it was brought up to the top instead.
fn clear(dir: &OwnedFd, top: BorrowedFd<'_>, depth: usize, next: &mut u64) -> io::Result<bool> {
    let mut brought_up = false;
    // Read to the end first: what a directory lists while it changes is not defined.
    let mut entries = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            entries.push((entry.file_name().to_owned(), entry.file_type()));
        }
    }
    for (name, kind) in entries {
        if matches!(kind, FileType::Directory | FileType::Unknown) {
            match open(dir.as_fd(), &name) {
                Ok(_) if depth >= DEPTH => {
                    bring_up(dir, &name, top, next)?;
                    brought_up = true;
                    continue;
                }
                Ok(below) => {
                    brought_up |= clear(&below, top, depth + 1, next)?;
                    unlink(dir, &name, AtFlags::REMOVEDIR)?;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
                Err(error) => return Err(error),
            }
        }
        unlink(dir, &name, AtFlags::empty())?;
    }
    Ok(brought_up)
}

fn bring_up(dir: &OwnedFd, name: &CStr, top: BorrowedFd<'_>, next: &mut u64) -> io::Result<()> {
    loop {
        *next += 1;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(dir, name, top, format!(".deep-{next}"), flags) {
            Err(Errno::EXIST) => {}
            Err(Errno::NOENT) => return Ok(()),
            result => return Ok(result?),
        }
    }
}

/// Opens a directory that is no link and makes it readable and writable for its owner.
fn open(at: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let rights: RawMode = 0o700;
    let dir = match rustix::fs::openat(at, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            // Nothing can be replaced here by a link in the meantime: what wrote here is dead.
            rustix::fs::chmodat(at, name, Mode::from_raw_mode(rights), AtFlags::empty())?;
            rustix::fs::openat(at, name, flags, Mode::empty())?
        }
        result => result.map_err(|error| match error {
            Errno::LOOP => io::Error::from(Errno::NOTDIR),
            other => io::Error::from(other),
        })?,
    };
    if rustix::fs::fstat(&dir)?.st_mode & rights != rights {
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(rights))?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn whatever_its_modes_and_links() {
        let place = tempfile::tempdir().unwrap();
        let outside = place.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        let tree = place.path().join("tree");
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        fs::write(tree.join("a/b/c/file"), "").unwrap();
        std::os::unix::fs::symlink(place.path(), tree.join("a/link")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/b/file-link")).unwrap();
        for dir in ["a/b/c", "a/b", "a"] {
            fs::set_permissions(tree.join(dir), fs::Permissions::from_mode(0o000)).unwrap();
        }
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert_eq!(fs::read_to_string(&outside).unwrap(), "stays");
        remove(&tree).unwrap();
    }

    #[test]
    fn however_deep() {
        let place = tempfile::tempdir().unwrap();
        let tree = place.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut at: OwnedFd = fs::File::open(&tree).unwrap().into();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&at, "d", Mode::from_raw_mode(0o700)).unwrap();
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            at = rustix::fs::openat(&at, "d", flags, Mode::empty()).unwrap();
        }
        remove(&tree).unwrap();
        assert!(!tree.exists());
    }
}
