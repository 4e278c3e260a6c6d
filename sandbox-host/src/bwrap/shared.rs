//! What all parts of a backend know: how it is set up, and what was found out about its host.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use sandbox_core::{Capabilities, GuestBinaries, Result};

use super::{cgroup::Available, programs, run_as::RunAs, staging::Stager, state::State};

/// What all parts of a backend know.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Parts>);

#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) state: State,
    pub(crate) program: PathBuf,
    pub(crate) guests: GuestBinaries,
    pub(crate) run_as: Option<RunAs>,
    pub(crate) stager: Stager,
    available: OnceLock<Available>,
    pub(crate) probed: tokio::sync::OnceCell<Capabilities>,
}

impl std::ops::Deref for Shared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Shared {
    pub(crate) fn new(
        state: State,
        program: PathBuf,
        guests: GuestBinaries,
        run_as: Option<RunAs>,
    ) -> Self {
        Self(Arc::new(Parts {
            state,
            program,
            guests,
            run_as,
            stager: Stager::new(run_as),
            available: OnceLock::new(),
            probed: tokio::sync::OnceCell::new(),
        }))
    }

    /// The directory with the guest program.
    pub(crate) fn guest_dir(&self) -> Result<PathBuf> {
        programs::guest_dir(&self.guests, &self.state.guests())
    }

    /// The control groups of this host; looked for once.
    pub(crate) fn available(&self) -> &Available {
        self.available.get_or_init(Available::find)
    }
}
