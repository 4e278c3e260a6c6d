//! What the hosts are to the sandboxes: three backends that differ in that alone.

use sandbox_core::{BackendId, Capabilities, Feature, Level, Result};
use sandbox_host::message::{self, Isolation};

use crate::Compose;

/// What the hosts are to the sandboxes.
#[derive(Debug, Clone, Default)]
pub(crate) enum Kind {
    /// Hosts that sandboxes are made on.
    #[default]
    Host,
    /// Machines that are there for it.
    Machine,
    /// Hosts that the services of compose projects run on.
    Compose(Compose),
}

impl Kind {
    /// The backend's id.
    pub(crate) fn id(&self) -> BackendId {
        BackendId::new(match self {
            Self::Host => "ssh",
            Self::Machine => "vm-packer",
            Self::Compose(_) => "compose-ssh",
        })
    }

    /// How sandboxes are made, if that is not for the host to tell.
    pub(crate) fn isolation(&self) -> Option<Isolation> {
        match self {
            Self::Host => None,
            Self::Machine => Some(Isolation::Machine),
            Self::Compose(_) => Some(Isolation::Compose),
        }
    }

    /// How compose projects are brought up.
    pub(crate) fn compose(&self) -> Option<message::Compose> {
        match self {
            Self::Host | Self::Machine => None,
            Self::Compose(compose) => Some(compose.asked()),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::Host | Self::Machine => Ok(()),
            Self::Compose(compose) => compose.check(),
        }
    }

    /// What the host said of itself, and what is so on any host.
    pub(crate) fn told(&self, found: Capabilities) -> Capabilities {
        let found = found.with(
            Feature::RemoteWorkspace,
            Level::Full,
            "a directory of the host can be the workspace itself",
        );
        let mut found = found;
        // Nobody settles for the account without having said so.
        found.hosting.only_by_name = !matches!(self, Self::Host);
        match self {
            Self::Host | Self::Compose(_) => found,
            Self::Machine => found.with(
                Feature::OwnKernel,
                Level::None,
                "whatever the machine is, its sandboxes are processes of its own kernel",
            ),
        }
    }
}
