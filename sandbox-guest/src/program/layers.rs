//! Reading overlays' layers as the kernel does: what is on top, what is deleted, and what hides what lies
//! below. All of it is somebody else's: no link is followed, and no path leads out of its layer.

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, XattrFlags, fgetxattr,
        fremovexattr, fsetxattr, openat, openat2, statat,
    },
    io::Errno,
};

use super::tree_copy::directory_flags;

const OPAQUE: &CStr = c"user.overlay.opaque";

/// The roots of layers. A layer is an index into them.
pub(crate) struct Layers(Vec<OwnedFd>);

/// A directory of one layer.
pub(crate) struct LayerDir {
    pub(crate) layer: usize,
    pub(crate) fd: OwnedFd,
    /// Whether files in it may stand for what is deleted.
    marked: bool,
}

/// What some layers together have under one name.
#[derive(Default)]
pub(crate) struct Found {
    /// What is seen; `None` if there is nothing, or it is deleted.
    pub(crate) top: Option<Stat>,
    /// The layer that it is in.
    pub(crate) layer: Option<usize>,
    /// The layers that have a directory there and are seen, topmost first.
    pub(crate) dirs: Vec<usize>,
    /// Whether nothing of lower layers is seen there.
    pub(crate) ended: bool,
}

impl Layers {
    pub(crate) fn open(paths: &[&Path]) -> io::Result<Self> {
        let open = |path: &&Path| {
            let path = CString::new(path.as_os_str().as_bytes())?;
            Ok(openat(CWD, &path, directory_flags(), Mode::empty())?)
        };
        Ok(Self(paths.iter().map(open).collect::<io::Result<_>>()?))
    }

    /// A directory of the given layers, topmost first; those that do not have it any more are left out.
    pub(crate) fn dirs(&self, path: &CStr, layers: &[usize]) -> io::Result<Vec<LayerDir>> {
        let mut dirs = Vec::new();
        for &layer in layers {
            match self.dir(path, layer) {
                Ok(fd) => dirs.push(LayerDir::new(layer, fd)?),
                // What runs inside may just have removed or replaced it.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE) => {}
                // Closed, and this has no more rights than whoever closed it.
                Err(Errno::ACCESS) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(dirs)
    }

    fn dir(&self, path: &CStr, layer: usize) -> rustix::io::Result<OwnedFd> {
        let root = &self.0[layer];
        let path = if path.is_empty() { c"." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        loop {
            match openat2(root, path, directory_flags(), Mode::empty(), resolve) {
                // Somebody moved something meanwhile.
                Err(Errno::AGAIN | Errno::INTR) => {}
                opened => return opened,
            }
        }
    }
}

impl LayerDir {
    fn new(layer: usize, fd: OwnedFd) -> io::Result<Self> {
        let marked = opacity(&fd)? == Some(b'x');
        Ok(Self { layer, fd, marked })
    }

    /// A directory in this one.
    pub(crate) fn child(&self, name: &CStr) -> io::Result<Self> {
        Self::new(self.layer, openat(&self.fd, name, directory_flags(), Mode::empty())?)
    }
}

/// The names in these directories, `.` and `..` left out.
pub(crate) fn names(dirs: &[LayerDir], mut each: impl FnMut(&CStr)) -> io::Result<()> {
    for dir in dirs {
        let mut entries = Dir::read_from(&dir.fd)?;
        while let Some(entry) = entries.read() {
            let entry = match entry {
                Err(Errno::NOENT) => break,
                entry => entry?,
            };
            let name = entry.file_name();
            if name != c"." && name != c".." {
                each(name);
            }
        }
    }
    Ok(())
}

/// Has an overlay hide what lower layers have in a directory.
pub(crate) fn make_opaque(dir: impl AsFd) -> io::Result<()> {
    Ok(fsetxattr(dir, OPAQUE, b"y", XattrFlags::empty())?)
}

/// Has it show that again.
pub(crate) fn make_clear(dir: impl AsFd) -> io::Result<()> {
    match fremovexattr(dir, OPAQUE) {
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        done => Ok(done?),
    }
}

/// What these directories, topmost first, have under a name.
pub(crate) fn find(dirs: &[LayerDir], name: &CStr) -> io::Result<Found> {
    let mut found = Found::default();
    for dir in dirs {
        let stat = match statat(&dir.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT | Errno::STALE) => continue,
            stat => stat?,
        };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            found.top.get_or_insert(stat);
            found.layer.get_or_insert(dir.layer);
            found.dirs.push(dir.layer);
            found.ended = is_opaque(dir, name)?;
        } else {
            // Below a directory it hides what is deeper; otherwise it is what is seen.
            if found.dirs.is_empty() && !is_whiteout(dir, name, &stat)? {
                found.top = Some(stat);
                found.layer = Some(dir.layer);
            }
            found.ended = true;
        }
        if found.ended {
            break;
        }
    }
    Ok(found)
}

fn is_whiteout(dir: &LayerDir, name: &CStr, stat: &Stat) -> io::Result<bool> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => Ok(stat.st_rdev == 0),
        FileType::RegularFile if dir.marked && stat.st_size == 0 => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            match openat(&dir.fd, name, flags, Mode::empty()) {
                Ok(file) => Ok(attribute(&file, c"user.overlay.whiteout")?.is_some()),
                Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(false),
                Err(error) => Err(error.into()),
            }
        }
        _ => Ok(false),
    }
}

fn is_opaque(dir: &LayerDir, name: &CStr) -> io::Result<bool> {
    match openat(&dir.fd, name, directory_flags(), Mode::empty()) {
        Ok(dir) => Ok(opacity(&dir)? == Some(b'y')),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn opacity(dir: impl AsFd) -> io::Result<Option<u8>> {
    attribute(dir, OPAQUE)
}

/// The first byte of an attribute.
fn attribute(file: impl AsFd, name: &CStr) -> io::Result<Option<u8>> {
    let mut value = [0; 8];
    match fgetxattr(file, name, &mut value[..]) {
        Ok(0) => Ok(Some(0)),
        Ok(_) => Ok(Some(value[0])),
        // A longer value is none of the kernel's.
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
