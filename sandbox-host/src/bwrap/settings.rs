//! Copies of the host's settings (`/etc/ssl`, `/etc/alternatives` …), of what everybody may read.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    path::Path,
};

use super::run_as::RunAs;

/// No settings directory nests deeper.
const DEPTH: usize = 8;

/// When the file or the directories below here were last changed, in nanoseconds.
pub(crate) fn stamps(path: &Path, found: &mut Vec<(i64, i64)>) -> io::Result<()> {
    collect(path, found, DEPTH)
}

fn collect(path: &Path, found: &mut Vec<(i64, i64)>, depth: usize) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    found.push((metadata.mtime(), metadata.mtime_nsec()));
    if !metadata.is_dir() || depth == 0 || !is_public(&metadata) {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), found, depth - 1)?;
        }
    }
    Ok(())
}

/// Copies a file or directory, leaving out what not everybody may read, and what is neither file,
/// directory nor link.
pub(crate) fn copy(from: &Path, to: &Path, owner: Option<RunAs>) -> io::Result<()> {
    copy_below(from, to, owner, DEPTH)
}

fn copy_below(from: &Path, to: &Path, owner: Option<RunAs>, depth: usize) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    if metadata.is_symlink() {
        symlink(fs::read_link(from)?, to)?;
    } else if !is_public(&metadata) {
        return Ok(());
    } else if metadata.is_dir() {
        fs::create_dir(to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
        if depth > 0 {
            for entry in fs::read_dir(from)? {
                let entry = entry?;
                copy_below(&entry.path(), &to.join(entry.file_name()), owner, depth - 1)?;
            }
        }
    } else if metadata.is_file() {
        fs::copy(from, to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(metadata.mode() & 0o755))?;
    } else {
        return Ok(());
    }
    match owner {
        Some(RunAs { uid, gid }) => lchown(to, Some(uid), Some(gid)),
        None => Ok(()),
    }
}

fn is_public(metadata: &fs::Metadata) -> bool {
    let needed = if metadata.is_dir() { 0o005 } else { 0o004 };
    metadata.mode() & needed == needed
}
