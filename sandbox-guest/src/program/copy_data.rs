//! Copying a file's contents: shared blocks where the filesystem can, holes as holes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{SeekFrom, copy_file_range, ftruncate, ioctl_ficlone, seek},
    io::{Errno, pread, pwrite},
};

const BUFFER: usize = 128 * 1024;

/// Copies `size` bytes to an empty file.
pub(crate) fn copy_data(source: &OwnedFd, target: &OwnedFd, size: u64) -> io::Result<()> {
    if size == 0 || ioctl_ficlone(target, source).is_ok() {
        return Ok(());
    }
    ftruncate(target, size)?;
    let mut at = 0;
    while at < size {
        let start = match seek(source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            // No holes are known here: all of it is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return copy_range(source, target, at, size),
            Err(error) => return Err(error.into()),
        };
        let end = seek(source, SeekFrom::Hole(start))?.min(size);
        copy_range(source, target, start, end)?;
        at = end.max(start);
    }
    Ok(())
}

fn copy_range(source: &OwnedFd, target: &OwnedFd, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let (mut from, mut to) = (at, at);
        let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(1 << 30);
        match copy_file_range(source, Some(&mut from), target, Some(&mut to), most) {
            // It became shorter meanwhile.
            Ok(0) => return Ok(()),
            Ok(count) => at += count as u64,
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
                return copy_by_hand(source.as_fd(), target.as_fd(), at, end);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn copy_by_hand(source: impl AsFd, target: impl AsFd, mut at: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    while at < end {
        let most = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
        let count = match pread(&source, &mut buffer[..most], at) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let mut written = 0;
        while written < count {
            match pwrite(&target, &buffer[written..count], at + written as u64) {
                Ok(more) => written += more,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        at += count as u64;
    }
    Ok(())
}
