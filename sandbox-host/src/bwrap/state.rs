//! The state directory: where it is, what is in it, and its lock.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use sandbox_core::Result;

use super::error::at;

/// The state directory.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) root: PathBuf,
}

impl State {
    /// Makes what is missing of it.
    pub(crate) fn prepare(&self) -> Result<()> {
        for directory in [self.root.clone(), self.instances()] {
            make(&directory, 0o700).map_err(at("prepare the state directory", &directory))?;
        }
        // Below these two a root harness's sandboxes find what belongs to their own user.
        for directory in [self.layers(), self.skeletons(), self.guests()] {
            make(&directory, 0o711).map_err(at("prepare the state directory", &directory))?;
        }
        Ok(())
    }

    /// Each instance's directory.
    pub(crate) fn instances(&self) -> PathBuf {
        self.root.join("instances")
    }

    /// Each snapshot's layer.
    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    /// Each host view's skeleton.
    pub(crate) fn skeletons(&self) -> PathBuf {
        self.root.join("skeleton")
    }

    /// Each guest program, in a directory that its checksum names.
    pub(crate) fn guests(&self) -> PathBuf {
        self.root.join("guest")
    }

    /// Held shared while an instance begins to use layers, exclusively while unused ones are removed.
    pub(crate) fn lock(&self, how: rustix::fs::FlockOperation) -> io::Result<fs::File> {
        let file = fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.root.join("lock"))?;
        rustix::fs::flock(&file, how)?;
        Ok(file)
    }
}

fn make(directory: &Path, mode: u32) -> io::Result<()> {
    match fs::metadata(directory) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::from(io::ErrorKind::NotADirectory)),
        Err(_) => {}
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_directory_is_private() {
        let place = tempfile::tempdir().unwrap();
        let state = State { root: place.path().join("a/state") };
        state.prepare().unwrap();
        state.prepare().unwrap();
        let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(state.root.clone()), 0o700);
        assert_eq!(mode(state.layers()), 0o711);
    }
}
