//! Sandboxes made by bubblewrap and overlayfs, of the host that this runs on.
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
//! All that belongs to an instance is in one directory, which `instance` looks after; `layers` looks
//! after what snapshots leave behind, `snapshot` takes them, `copied` makes layers that cannot just be
//! renamed, and `changes` tells what is in them. The last two have the guest program do it, as a `helper`.

mod accounts;
mod backend;
mod cgroup;
mod changes;
mod config;
mod copied;
mod explain;
mod helper;
mod hierarchy;
mod host;
mod instance;
mod launch;
mod layers;
mod plan;
mod probe;
mod provision;
mod run_as;
mod settings;
mod shared;
mod snapshot;
mod staging;
mod state;

use crate::{error, process, programs, sys, tree};

pub use backend::BwrapHost;
pub use config::BwrapHostBuilder;

/// The id in instances and snapshots.
const ID: &str = "bwrap";
