//! How a host is set up.

use std::path::PathBuf;

use sandbox_core::{GuestBinaries, Result, default_state_dir};

use super::{backend::BwrapHost, error::at, run_as::RunAs, shared::Shared, state::State};

impl BwrapHost {
    /// With the defaults: the state directory of this user, and the `bwrap` in `PATH`.
    ///
    /// # Errors
    ///
    /// As [`BwrapHostBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Set up step by step.
    #[must_use]
    pub fn builder() -> BwrapHostBuilder {
        BwrapHostBuilder::default()
    }
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
        let run_as = RunAs::choose(self.run_as)?;
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
        let state = State { root: state_dir };
        Ok(BwrapHost::from_shared(Shared::new(state, program, guests, run_as)))
    }
}
