//! Sandboxes that are nothing but a directory and processes of an account, for hosts that have nothing
//! better. They isolate nothing, and say so.
//!
//! The workspace is a copy, and so is a snapshot. What takes a kernel's or another program's help (no
//! network, limits, a root of one's own) is refused by name.

mod backend;
mod instance;
mod launch;
mod processes;

use crate::{cleanup, error, process, programs, sys, tool, tree};

pub use backend::AccountHost;

/// The id in instances and snapshots.
const ID: &str = "account";
