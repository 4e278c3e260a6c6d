//! How somebody else gets into a sandbox on a host.

use sandbox_core::{LocalReach, Reachability, SshReach};
use sandbox_host::message::Isolation;

use crate::{address::Address, instance::Place, settings::Settings};

/// Over SSH, and then as somebody on the host would. What the sandbox's spec says of the way there wins over
/// what the backend was told.
pub(crate) fn reach(
    settings: &Settings,
    host: &Address,
    place: &Place,
    local: &LocalReach,
) -> SshReach {
    let mut reach = SshReach::new(host.as_str(), &local.workspace_dir);
    reach.config_file.clone_from(&settings.config_file);
    if place.isolation == Isolation::Bwrap {
        reach.command = Reachability::Local(local.clone()).report().local_exec_hint;
    }
    let hints = &place.hints;
    reach.tunnel = hints.tunnel.clone().or_else(|| settings.tunnel.clone());
    // Through which host another tunnel leads is not known.
    if reach.tunnel == settings.tunnel {
        reach.tunnel_via.clone_from(&settings.tunnel_via);
    }
    reach.identity = hints.identity.clone().or_else(|| settings.identity.clone());
    reach
}

#[cfg(test)]
mod tests {
    use sandbox_core::SandboxSpec;

    use super::*;

    #[test]
    fn what_the_spec_says_of_the_way_wins() {
        let settings = Settings {
            tunnel: Some("ours".into()),
            tunnel_via: Some("gate".into()),
            identity: Some("warden".into()),
            ..Settings::default()
        };
        let host = Address::parse("a").unwrap();
        let local = LocalReach::new(1, "/workspace");
        let reached = |tunnel: Option<&str>, identity: Option<&str>| {
            let mut hints = SandboxSpec::default().reachability;
            hints.tunnel = tunnel.map(Into::into);
            hints.identity = identity.map(Into::into);
            let place = Place {
                host: "a".into(),
                isolation: Isolation::Account,
                workspace: None,
                hints,
                inner: serde_json::Value::Null,
            };
            let reach = reach(&settings, &host, &place, &local);
            [reach.tunnel, reach.tunnel_via, reach.identity].map(Option::unwrap_or_default)
        };
        assert_eq!(reached(None, None), ["ours", "gate", "warden"]);
        assert_eq!(reached(Some("theirs"), None), ["theirs", "", "warden"]);
        assert_eq!(reached(Some("ours"), Some("other")), ["ours", "gate", "other"]);
    }
}
