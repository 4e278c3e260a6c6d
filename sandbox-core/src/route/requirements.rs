//! What a backend must be able to do to serve a request.

use super::Plan;
use crate::{Capabilities, Feature, Level, Network, Root, SandboxSpec, WorkspaceMode};

/// Whether a backend can serve it; or why not.
pub(super) fn check(
    plan: &Plan,
    spec: &SandboxSpec,
    capabilities: &Capabilities,
) -> Result<(), String> {
    let least = plan.isolation;
    if capabilities.isolation() < least {
        let here = capabilities.isolation();
        return Err(format!("isolation {least} is asked for, and its level here is {here}"));
    }
    if spec.workspace_mode == WorkspaceMode::RemoteCanonical
        && capabilities.level(Feature::RemoteWorkspace) != Level::Full
    {
        return Err(
            "a workspace that stays on another host (remote-canonical) is asked for, and its \
                    sandboxes have none"
                .to_owned(),
        );
    }
    for feature in features(spec) {
        let level = capabilities.level(feature);
        let enough = match feature {
            Feature::LimitPids | Feature::LimitMemory | Feature::LimitCpu => {
                level == Level::Full
                    || level == Level::PerProcess && spec.limits.per_process_is_enough
            }
            _ => level == Level::Full,
        };
        if !enough {
            let evidence = capabilities.evidence(feature);
            return Err(match level {
                Level::PerProcess => {
                    format!("{feature} is asked for, and limits only each process here: {evidence}")
                }
                _ => format!("{feature} is asked for, and cannot be had here: {evidence}"),
            });
        }
    }
    let hosting = &capabilities.hosting;
    if let Some(max) = plan.max_micro_usd_per_hour
        && hosting.micro_usd_per_hour > max
    {
        let usd = |micro: u64| micro as f64 / 1e6;
        let (cost, max) = (usd(hosting.micro_usd_per_hour), usd(max));
        return Err(format!("it costs {cost} USD an hour, and {max} is the most"));
    }
    check_hosts(plan, spec, &hosting.hosts)
}

fn check_hosts(plan: &Plan, spec: &SandboxSpec, hosts: &[String]) -> Result<(), String> {
    if let Some(host) = &plan.host
        && !hosts.contains(host)
    {
        return Err(match hosts {
            [] => format!("the host {host} is asked for, and it has no hosts to choose from"),
            some => format!("the host {host} is asked for, and its hosts are {}", some.join(", ")),
        });
    }
    if !hosts.is_empty() && !spec.hosts.is_empty() {
        let preferred = spec.hosts.iter().any(|host| hosts.contains(host));
        if !preferred {
            return Err(format!(
                "it has none of the hosts {}; its hosts are {}",
                spec.hosts.join(", "),
                hosts.join(", ")
            ));
        }
    }
    Ok(())
}

/// The features that a spec cannot do without.
fn features(spec: &SandboxSpec) -> Vec<Feature> {
    let mut needed = Vec::new();
    match spec.network {
        Network::Deny => needed.push(Feature::NetworkDeny),
        Network::Host => needed.push(Feature::NetworkHost),
    }
    let limits = &spec.limits;
    for (limit, feature) in [
        (limits.pids, Feature::LimitPids),
        (limits.memory, Feature::LimitMemory),
        (limits.cpu_millis, Feature::LimitCpu),
    ] {
        if limit.is_some() {
            needed.push(feature);
        }
    }
    if matches!(spec.root, Root::Image(_)) {
        needed.push(Feature::Images);
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackendId, CreateSandbox, Hosting, Isolation};

    fn able() -> Capabilities {
        [
            Feature::NetworkDeny,
            Feature::LimitPids,
            Feature::ProcessIsolation,
            Feature::SyscallFilter,
        ]
        .into_iter()
        .fold(Capabilities::new(BackendId::new("x"), "1"), |found, feature| {
            found.with(feature, Level::Full, "seen")
        })
        .with(Feature::LimitMemory, Level::PerProcess, "RLIMIT_AS")
    }

    #[test]
    fn what_fits_fits() {
        let plan = Plan { isolation: Isolation::Container, ..Plan::default() };
        check(&plan, &CreateSandbox::new().pids(5).spec, &able()).unwrap();
        let lenient = CreateSandbox::new().memory(1 << 20).accept_limits_per_process();
        check(&plan, &lenient.spec, &able()).unwrap();
    }

    #[test]
    fn what_does_not_fit_says_why() {
        let plain = Plan::default;
        let costly = able().hosted(Hosting { micro_usd_per_hour: 750_000, ..Hosting::default() });
        let hosted =
            able().hosted(Hosting { hosts: vec!["a".into(), "b".into()], ..Hosting::default() });
        let preferring = |hosts: &[&str]| {
            let hosts = hosts.iter().map(|&host| host.to_owned()).collect();
            SandboxSpec { hosts, ..SandboxSpec::default() }
        };
        let host = |name: &str| Plan { host: Some(name.into()), ..Plan::default() };
        for (plan, spec, capabilities, says) in [
            (
                Plan { isolation: Isolation::MicroVm, ..plain() },
                SandboxSpec::default(),
                able(),
                "isolation microvm is asked for",
            ),
            (plain(), CreateSandbox::new().network(Network::Host).spec, able(), "network_host"),
            (
                plain(),
                CreateSandbox::new().memory(1).spec,
                able(),
                "only each process here: RLIMIT_AS",
            ),
            (plain(), CreateSandbox::new().cpu_millis(1).spec, able(), "limit_cpu"),
            (
                Plan { max_micro_usd_per_hour: Some(500_000), ..plain() },
                SandboxSpec::default(),
                costly,
                "0.75 USD an hour, and 0.5 is the most",
            ),
            (plain(), CreateSandbox::new().remote_workspace("/x").spec, able(), "remote-canonical"),
            (host("c"), SandboxSpec::default(), able(), "no hosts to choose from"),
            (host("c"), SandboxSpec::default(), hosted.clone(), "its hosts are a, b"),
            (plain(), preferring(&["c"]), hosted.clone(), "none of the hosts c"),
        ] {
            let why = check(&plan, &spec, &capabilities).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
        check(&host("b"), &preferring(&["b"]), &hosted).unwrap();
        // A preference is nothing to a backend without hosts.
        check(&plain(), &preferring(&["c"]), &able()).unwrap();
    }
}
