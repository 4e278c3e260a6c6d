//! What an account alone cannot do.

use sandbox_core::{BackendId, Error, Network, Provision, Result, Root, WorkspaceMode};

use crate::message::Isolation;

/// Why there is so little.
pub(super) const WHY: &str = "sandboxes are processes of the account, in a directory";

/// What cannot be had here is refused by name.
///
/// # Errors
///
/// `Unsupported`, with what to do instead.
pub(super) fn refuse(request: &Provision, backend: &BackendId) -> Result<()> {
    let spec = &request.spec;
    let instead = if backend.as_str() == Isolation::Account.to_string() {
        "install bubblewrap on the host, or ask for a sandbox without that"
    } else {
        "ask for a sandbox without that"
    };
    let refused = |what: &str| {
        let message = format!("{what}: {WHY}; {instead}");
        Err(Error::unsupported("provision", message))
    };
    if spec.network == Network::Deny {
        return refused("the network cannot be denied (network)");
    }
    for (limit, name) in [
        (spec.limits.pids, "processes cannot be limited (limits.pids)"),
        (spec.limits.memory, "memory cannot be limited (limits.memory)"),
        (spec.limits.cpu_millis, "CPU time cannot be limited (limits.cpu_millis)"),
    ] {
        if limit.is_some() {
            return refused(name);
        }
    }
    if spec.root != Root::Standard {
        return refused("there is no root directory of its own (root)");
    }
    if !matches!(spec.workspace_mode, WorkspaceMode::Private | WorkspaceMode::Bind) {
        return refused("the workspace is a copy or a directory of this host (workspace_mode)");
    }
    if !spec.mounts.is_empty() {
        return refused("nothing can be mounted (mounts)");
    }
    Ok(())
}
