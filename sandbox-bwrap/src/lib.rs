//! The local backend: sandboxes of this Linux host, made by bubblewrap.
//!
//! [`BwrapBackend`] implements [`SandboxBackend`](sandbox_core::SandboxBackend). It needs the program
//! `bwrap` (0.5 or newer), a kernel that lets an unprivileged user make user namespaces and mount
//! overlays in them (5.11 or newer), and a state directory on a filesystem that can hold an overlay's
//! upper layer, such as ext4, xfs, btrfs or tmpfs, but not another overlay.
//!
//! ```no_run
//! # fn main() -> sandbox_core::Result<()> {
//! use sandbox_bwrap::BwrapBackend;
//!
//! let backend = BwrapBackend::builder().state_dir("/var/lib/my-harness/sandboxes").build()?;
//! # Ok(()) }
//! ```
//!
//! How a sandbox is made is told in [`sandbox_host::bwrap`], which does it: here and on other hosts.

#[cfg(not(target_os = "linux"))]
compile_error!("sandbox-bwrap is for Linux: use sandbox-docker or sandbox-ssh on other systems");

#[cfg(target_os = "linux")]
mod backend;
#[cfg(target_os = "linux")]
mod config;

#[cfg(target_os = "linux")]
pub use backend::BwrapBackend;
#[cfg(target_os = "linux")]
pub use config::BwrapBackendBuilder;
