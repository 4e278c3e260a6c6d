//! Giving up rights for good.

use super::{base::errno_text, filter, sys};

/// Which rights are given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hardening {
    pub(crate) drop_capabilities: bool,
    pub(crate) filter_syscalls: bool,
}

impl Hardening {
    /// All of them.
    pub(crate) const FULL: Self = Self { drop_capabilities: true, filter_syscalls: true };
}

/// Drops capabilities and loads the filter. There must be no other thread yet.
pub(crate) fn apply(hardening: Hardening) -> Result<(), String> {
    if hardening.drop_capabilities || hardening.filter_syscalls {
        rustix::thread::set_no_new_privs(true)
            .map_err(|error| format!("no_new_privs: {}", errno_text(&error.into())))?;
    }
    if hardening.drop_capabilities {
        sys::drop_capabilities()
            .map_err(|error| format!("drop the capabilities: {}", errno_text(&error)))?;
    }
    if hardening.filter_syscalls {
        filter::load()?;
    }
    Ok(())
}
