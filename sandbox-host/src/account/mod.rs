//! Sandboxes that are nothing but a directory and processes of an account, for hosts that have nothing
//! better. They isolate nothing, and say so.
//!
//! The workspace is a copy, unless a directory of the host is bound, and a snapshot is one too. What takes a
//! kernel's or another program's help (no network, limits, a root of one's own) is refused by name.

mod backend;
mod instance;
mod launch;
mod processes;
mod refuse;

use crate::{cleanup, error, process, programs, sys, tool, tree};

pub use backend::AccountHost;
#[cfg(feature = "program")]
pub(crate) use processes::MARK;
