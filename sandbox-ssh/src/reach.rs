//! How somebody else gets into a sandbox on a host.

use sandbox_core::{LocalReach, Reachability, SshReach};
use sandbox_host::message::Isolation;

use crate::{address::Address, config::Settings};

/// Over SSH, and then as somebody on the host would.
pub(crate) fn reach(
    settings: &Settings,
    host: &Address,
    isolation: Isolation,
    local: &LocalReach,
) -> SshReach {
    let mut reach = SshReach::new(host.as_str(), &local.workspace_dir);
    reach.config_file.clone_from(&settings.config_file);
    if isolation == Isolation::Bwrap {
        reach.command = Reachability::Local(local.clone()).report().local_exec_hint;
    }
    reach.tunnel.clone_from(&settings.tunnel);
    reach.tunnel_via.clone_from(&settings.tunnel_via);
    reach.identity.clone_from(&settings.identity);
    reach
}
