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
//! # How a sandbox is made
//!
//! 1. `plan` turns a spec into bwrap's arguments and the guest's instructions; it touches nothing.
//! 2. `staging` (only for a harness that runs as root) prepares mounts of what the plan shows, so that
//!    the unprivileged id that the sandbox runs as can reach it and finds itself the owner.
//! 3. `cgroup` makes the control groups that the spec's limits need.
//! 4. `launch` starts bwrap, which makes the namespaces and starts the guest in them as PID 1. The guest
//!    mounts the overlays, moves the host's directories into them, drops every capability and serves.
//!
//! All that belongs to an instance is in one directory, which `instance` looks after; `snapshot` looks
//! after the layers that snapshots leave behind, `copied` makes those that cannot just be renamed, and
//! `changes` tells what is in them. The last two have the guest program do it, as a `helper`.

#[cfg(not(target_os = "linux"))]
compile_error!("sandbox-bwrap is for Linux: use sandbox-docker or sandbox-ssh on other systems");

mod accounts;
mod backend;
mod cgroup;
mod changes;
mod config;
mod copied;
mod error;
mod helper;
mod host;
mod instance;
mod launch;
mod plan;
mod probe;
mod process;
mod programs;
mod settings;
mod size;
mod snapshot;
mod staging;
mod sys;
mod tree;

pub use backend::BwrapBackend;
pub use config::BwrapBackendBuilder;
