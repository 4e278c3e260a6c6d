//! How a host is set up.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use sandbox_core::{Error, ErrorKind, GuestBinaries, Result, default_state_dir};

use super::{BwrapHost, error::at};

/// The user and group that a root harness's sandboxes run as, if nobody says otherwise. Nothing else on
/// a host has a reason to own files of it: it lies outside the ranges that distributions, systemd and
/// container engines give to people, services and containers. So whoever got out of a sandbox would
/// find nothing of their own.
const RUN_AS: u32 = 1_900_000_000;

/// A user and group of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct RunAs {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Sets up a [`BwrapHost`]. Made by [`BwrapHost::builder`].
#[derive(Debug, Clone, Default)]
pub struct BwrapHostBuilder {
    state_dir: Option<PathBuf>,
    program: Option<PathBuf>,
    guests: Option<GuestBinaries>,
    run_as: Option<RunAs>,
}

impl BwrapHostBuilder {
    /// Where instances and layers are kept, instead of `bwrap` in
    /// [`default_state_dir`](sandbox_core::default_state_dir). Made with mode 0700 if it is missing.
    ///
    /// It must be on a filesystem that can hold the upper layer of an overlay: ext4, xfs, btrfs, tmpfs,
    /// but not another overlay, as a container's own root is, and no network filesystem.
    #[must_use]
    pub fn state_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.state_dir = Some(directory.into());
        self
    }

    /// The bubblewrap program, instead of the first `bwrap` in `PATH`.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// Where the guest program comes from, instead of [`GuestBinaries::standard`].
    #[must_use]
    pub fn guest_binaries(mut self, guests: GuestBinaries) -> Self {
        self.guests = Some(guests);
        self
    }

    /// The user and group of this host that sandboxes run as if the harness is root, instead of
    /// 1900000000. Without root, and as the root of a user namespace (a rootless container), which is an
    /// ordinary user of the host, sandboxes run as the harness's own user.
    #[must_use]
    pub fn run_as(mut self, uid: u32, gid: u32) -> Self {
        self.run_as = Some(RunAs { uid, gid });
        self
    }

    /// The backend. Starts nothing and makes nothing; whether sandboxes can be made here,
    /// [`probe`](sandbox_core::SandboxBackend::probe) says.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if sandboxes should run as root, or, without being root, as somebody else;
    /// `Unavailable` if there is no default state directory; and what [`GuestBinaries::standard`] says.
    pub fn build(self) -> Result<BwrapHost> {
        let uid = rustix::process::geteuid().as_raw();
        let run_as = match self.run_as {
            Some(RunAs { uid: 0, .. } | RunAs { gid: 0, .. }) => {
                let message =
                    "a sandbox never runs as user or group 0: choose an id that owns nothing";
                return Err(invalid(message.to_owned()));
            }
            Some(RunAs { uid: wanted, .. }) if uid != 0 && wanted != uid => {
                let message = format!(
                    "only root can run sandboxes as user {wanted}; this is user {uid}: leave run_as out"
                );
                return Err(invalid(message));
            }
            _ if uid != 0 => None,
            Some(run_as) => Some(run_as),
            None if is_initial_map(
                &fs::read_to_string("/proc/self/uid_map").unwrap_or_default(),
            ) =>
            {
                Some(RunAs { uid: RUN_AS, gid: RUN_AS })
            }
            // Root of a user namespace, as in a rootless container, is an ordinary user of the host.
            None => None,
        };
        let state_dir = match self.state_dir {
            Some(directory) => {
                std::path::absolute(&directory).map_err(at("configure", &directory))?
            }
            None => default_state_dir()?.join("bwrap"),
        };
        let guests = match self.guests {
            Some(guests) => guests,
            None => GuestBinaries::standard()?,
        };
        let program = self.program.unwrap_or_else(|| "bwrap".into());
        Ok(BwrapHost::from_parts(State { root: state_dir }, program, guests, run_as))
    }
}

/// Whether a process with these user ids is in the host's own user namespace.
fn is_initial_map(uid_map: &str) -> bool {
    let numbers: Vec<&str> = uid_map.split_ascii_whitespace().collect();
    numbers == ["0", "0", "4294967295"]
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, "configure", message)
}

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
    fn a_sandbox_never_runs_as_root() {
        let error = BwrapHost::builder().run_as(0, 5).guest_binaries(GuestBinaries::none()).build();
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidSpec);
    }

    #[test]
    fn root_of_a_user_namespace_is_told_from_the_hosts() {
        assert!(is_initial_map("         0          0 4294967295\n"));
        assert!(!is_initial_map("         0       1000          1\n"));
        assert!(!is_initial_map("0 1000 1\n1 100000 65536\n"));
    }

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
