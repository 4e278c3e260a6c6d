//! How a backend is set up.

use std::path::PathBuf;

use sandbox_core::{GuestBinaries, Result};
use sandbox_host::bwrap::BwrapHostBuilder;

use crate::BwrapBackend;

/// Sets up a [`BwrapBackend`]. Made by [`BwrapBackend::builder`].
#[derive(Debug, Clone, Default)]
pub struct BwrapBackendBuilder(BwrapHostBuilder);

impl BwrapBackendBuilder {
    /// Where instances and layers are kept, instead of `bwrap` in
    /// [`default_state_dir`](sandbox_core::default_state_dir). Made with mode 0700 if it is missing.
    ///
    /// It must be on a filesystem that can hold the upper layer of an overlay: ext4, xfs, btrfs, tmpfs,
    /// but not another overlay, as a container's own root is, and no network filesystem.
    #[must_use]
    pub fn state_dir(self, directory: impl Into<PathBuf>) -> Self {
        Self(self.0.state_dir(directory))
    }

    /// The bubblewrap program, instead of the first `bwrap` in `PATH`.
    #[must_use]
    pub fn program(self, program: impl Into<PathBuf>) -> Self {
        Self(self.0.program(program))
    }

    /// Where the guest program comes from, instead of [`GuestBinaries::standard`].
    #[must_use]
    pub fn guest_binaries(self, guests: GuestBinaries) -> Self {
        Self(self.0.guest_binaries(guests))
    }

    /// The user and group of this host that sandboxes run as if the harness is root, instead of
    /// 1900000000. Without root, and as the root of a user namespace (a rootless container), which is an
    /// ordinary user of the host, sandboxes run as the harness's own user.
    #[must_use]
    pub fn run_as(self, uid: u32, gid: u32) -> Self {
        Self(self.0.run_as(uid, gid))
    }

    /// The backend. Starts nothing and makes nothing; whether sandboxes can be made here,
    /// [`probe`](sandbox_core::SandboxBackend::probe) says.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if sandboxes should run as root, or, without being root, as somebody else;
    /// `Unavailable` if there is no default state directory; and what [`GuestBinaries::standard`] says.
    pub fn build(self) -> Result<BwrapBackend> {
        Ok(BwrapBackend::on(self.0.build()?))
    }
}
