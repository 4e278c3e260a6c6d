//! A request and its profile become a spec and a route.

use std::path::PathBuf;

use super::{
    AccessRule, NetworkDefault, Period, Placement, Profile, ProfileCatalog, WorkspaceModeRule,
};
use crate::{
    BackendId, Consumer, CreateSandbox, Error, ErrorKind, Network, Result, Root, SandboxSpec,
    WorkspaceMode,
    route::{Plan, Strategy},
    spec::ProfileRef,
};

/// A request that was looked into as far as no backend is needed for it.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// What is asked for, the profile's defaults filled in.
    pub(crate) spec: SandboxSpec,
    pub(crate) consumer: Consumer,
    /// Which backends may serve it; without one, the spec's or the first.
    pub(crate) plan: Option<Plan>,
}

/// Fills in what the profile says, and checks the whole.
///
/// # Errors
///
/// `NotFound` for an unknown profile; `Unsupported`, with the field, for what nothing here can enforce;
/// `InvalidSpec`.
pub(crate) fn prepare(request: CreateSandbox, catalog: &ProfileCatalog) -> Result<Prepared> {
    let CreateSandbox { mut spec, consumer, profile, inputs, network } = request;
    // The host was named by the request; what the profile adds is only preferred.
    let host = spec.hosts.first().cloned();
    for (key, value) in inputs {
        add_input(&mut spec, key, value)?;
    }
    let mut plan = None;
    if let Some(id) = profile {
        let profile = catalog.get(&id)?;
        refuse(profile)?;
        plan = Some(plan_of(profile, spec.backend.as_ref(), host.clone()));
        fill(&mut spec, profile, network)?;
    } else if host.is_some() {
        let candidates = spec.backend.iter().cloned().collect();
        plan = Some(Plan { candidates, host, ..Plan::default() });
    }
    if !spec.setup.inputs.is_empty() && spec.setup.commands.is_empty() {
        let keys: Vec<&str> = spec.setup.inputs.keys().map(String::as_str).collect();
        let message = format!(
            "nothing uses the input {}: only `repo` populates the workspace, and there are no setup \
             commands that could read others",
            keys.join(", ")
        );
        return Err(Error::new(ErrorKind::InvalidSpec, "create", message));
    }
    Ok(Prepared { spec: spec.resolved()?, consumer, plan })
}

fn add_input(spec: &mut SandboxSpec, key: String, value: String) -> Result<()> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidSpec, "create", message));
    if key == "repo" {
        if spec.workspace.is_some() {
            return invalid(
                "the workspace was given twice: as such, and as the input `repo`".into(),
            );
        }
        spec.workspace = Some(PathBuf::from(value));
        return Ok(());
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if key.is_empty() || key.len() > 64 || !key.chars().all(plain) {
        return invalid(format!("{key:?} cannot be an input: use letters, digits, '_' and '-'"));
    }
    if value.contains('\0') {
        return invalid(format!("the input {key} has a NUL byte, which no variable can"));
    }
    spec.setup.inputs.insert(key, value);
    Ok(())
}

/// What nothing here can enforce is refused by name.
fn refuse(profile: &Profile) -> Result<()> {
    let refused = if profile.resources.disk_mb.is_some() {
        Some(("resources.disk_mb", "no backend limits a sandbox's disk"))
    } else if profile.workspace.access == AccessRule::Ro {
        Some(("workspace.access: ro", "no backend shows a workspace that cannot be written to"))
    } else {
        None
    };
    match refused {
        None => Ok(()),
        Some((field, why)) => {
            let message = format!("{} asks for {field}, which cannot be had: {why}", profile.id);
            Err(Error::unsupported("create", message))
        }
    }
}

/// The backends that may serve it.
fn plan_of(profile: &Profile, asked: Option<&BackendId>, host: Option<String>) -> Plan {
    let route = &profile.route;
    let (strategy, candidates) = match asked {
        Some(backend) => (Strategy::Explicit, vec![backend.clone()]),
        None if route.strategy == Strategy::Explicit || route.extensions.is_empty() => {
            (Strategy::Explicit, vec![profile.extension.clone()])
        }
        None => (route.strategy, route.extensions.clone()),
    };
    let micro = |usd: f64| (usd * 1e6).round().clamp(0.0, u64::MAX as f64) as u64;
    Plan {
        strategy,
        candidates,
        isolation: profile.isolation.level,
        max_micro_usd_per_hour: route.max_cost_per_hour_usd.map(micro),
        host,
    }
}

/// Fills in what the request leaves open.
fn fill(spec: &mut SandboxSpec, profile: &Profile, network: Option<Network>) -> Result<()> {
    spec.profile = Some(ProfileRef { id: profile.id.clone(), version: profile.version.clone() });
    if spec.root == Root::Standard {
        spec.image.clone_from(&profile.image);
    }
    // A spec that was put together field by field has said so if it is not the default.
    let said = network.is_some() || spec.network != Network::default() || !spec.egress.is_empty();
    if !said {
        spec.network = match profile.network.default {
            NetworkDefault::Deny => Network::Deny,
            NetworkDefault::Allow => Network::Host,
        };
        spec.egress.clone_from(&profile.network.egress);
    }
    match profile.workspace.mode {
        WorkspaceModeRule::Overlay | WorkspaceModeRule::Copy => {}
        WorkspaceModeRule::Bind => spec.workspace_mode = WorkspaceMode::Bind,
        WorkspaceModeRule::RemoteCanonical => {
            spec.workspace_mode = WorkspaceMode::RemoteCanonical;
        }
    }
    let (hints, rule) = (&mut spec.reachability, &profile.reachability);
    hints.tunnel = hints.tunnel.take().or_else(|| rule.tunnel.clone());
    hints.identity = hints.identity.take().or_else(|| rule.identity.clone());
    let millis = |cpu: f64| (cpu * 1000.0).round().max(1.0) as u64;
    let (limits, resources) = (&mut spec.limits, &profile.resources);
    limits.cpu_millis = limits.cpu_millis.or(resources.cpu.map(millis));
    limits.memory = limits.memory.or(resources.memory_mb.map(|mib| mib.saturating_mul(1 << 20)));
    limits.pids = limits.pids.or(resources.pids);
    let lifetime = &mut spec.lifetime;
    let seconds = |period: Option<Period>| period.map(Period::seconds);
    let asked = lifetime.ttl_seconds.map(Period::from_seconds);
    lifetime.ttl_seconds = seconds(profile.ttl(asked));
    let max = seconds(profile.ttl.max);
    lifetime.max_ttl_seconds = match (lifetime.max_ttl_seconds, max) {
        (Some(asked), Some(max)) => Some(asked.min(max)),
        (asked, max) => asked.or(max),
    };
    lifetime.idle_seconds = lifetime.idle_seconds.or(seconds(profile.ttl.idle_reap));
    if spec.hosts.is_empty() {
        let Placement { prefer, fallback } = &profile.placement;
        spec.hosts = prefer.iter().chain(fallback).cloned().collect();
    }
    // The profile's first: what the request adds may build on them.
    let (setup, rule) = (&mut spec.setup, &profile.setup);
    setup.commands.splice(0..0, rule.commands.iter().cloned());
    for reference in &rule.secret_refs {
        if !setup.secret_refs.contains(reference) {
            setup.secret_refs.push(reference.clone());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn catalog(rest: &str) -> ProfileCatalog {
        let text = format!("id: profile.x\nversion: \"1\"\nextension: ext.one\n{rest}");
        ProfileCatalog::none().with(Profile::from_yaml(&text, "x.yaml").unwrap())
    }

    #[test]
    fn the_request_wins_and_the_profile_fills_in() {
        let catalog = catalog(
            "image: debian\nnetwork: {default: allow}\nresources: {cpu: 1.5, memory_mb: 2, pids: 9}\n\
             ttl: {default: 1h, max: 2h, idle_reap: 5m}\n\
             setup: {commands: [a], secret_refs: [S]}\n",
        );
        let request = CreateSandbox::profile("profile.x").pids(3).setup("b").input("ref", "main");
        let Prepared { spec, plan, .. } = prepare(request, &catalog).unwrap();
        assert_eq!(spec.limits.pids, Some(3));
        assert_eq!(spec.limits.cpu_millis, Some(1500));
        assert_eq!(spec.limits.memory, Some(2 << 20));
        assert_eq!(spec.network, Network::Host);
        assert_eq!(spec.image.as_deref(), Some("debian"));
        assert_eq!(spec.lifetime.ttl_seconds, Some(3600));
        assert_eq!(spec.lifetime.idle_seconds, Some(300));
        assert_eq!(spec.setup.commands, ["a", "b"]);
        assert_eq!(spec.setup.secret_refs, ["S"]);
        assert_eq!(spec.setup.inputs["ref"], "main");
        assert_eq!(spec.profile.unwrap().version, "1");
        assert_eq!(plan.unwrap().candidates, [BackendId::new("one")]);
    }

    #[test]
    fn a_request_that_denies_the_network_is_not_overruled() {
        let catalog = catalog("network: {default: allow}\n");
        let request = CreateSandbox::profile("x").network(Network::Deny);
        assert_eq!(prepare(request, &catalog).unwrap().spec.network, Network::Deny);
    }

    #[test]
    fn a_request_wins_over_the_hosts_that_a_profile_lets_through() {
        let catalog = catalog("network: {default: deny, egress: [\"*.crates.io:443\"]}\n");
        let egress = |request| prepare(request, &catalog).unwrap().spec.egress;
        let asked = || CreateSandbox::profile("x");
        assert_eq!(egress(asked()), ["*.crates.io:443"]);
        assert_eq!(egress(asked().egress("example.org")), ["example.org"]);
        assert!(egress(asked().network(Network::Deny)).is_empty());
        assert!(egress(asked().network(Network::Host)).is_empty());
    }

    #[test]
    fn a_ttl_is_capped_at_the_max() {
        let catalog = catalog("ttl: {default: 1h, max: 2h}\n");
        let request = CreateSandbox::profile("x")
            .ttl(Duration::from_secs(36_000))
            .max_ttl(Duration::from_secs(90_000));
        let lifetime = prepare(request, &catalog).unwrap().spec.lifetime;
        assert_eq!((lifetime.ttl_seconds, lifetime.max_ttl_seconds), (Some(7200), Some(7200)));
    }

    #[test]
    fn what_nothing_enforces_is_refused_by_name() {
        for (rest, field) in [
            ("resources: {disk_mb: 10}\n", "resources.disk_mb"),
            ("workspace: {access: ro}\n", "workspace.access"),
        ] {
            let error = prepare(CreateSandbox::profile("x"), &catalog(rest)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(field), "{error}");
        }
    }

    #[test]
    fn a_workspace_that_stays_on_its_host_is_not_looked_for_here() {
        let catalog = catalog("workspace: {mode: remote-canonical}\n");
        let request = CreateSandbox::profile("x").input("repo", "/only/there");
        let spec = prepare(request, &catalog).unwrap().spec;
        assert_eq!(spec.workspace.as_deref(), Some("/only/there".as_ref()));
        assert_eq!(spec.workspace_mode, WorkspaceMode::RemoteCanonical);
        let error = prepare(CreateSandbox::profile("x"), &catalog).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        assert!(error.message().contains("`repo`"), "{error}");
    }

    #[test]
    fn the_ways_to_a_host_are_the_profiles_unless_the_request_says_so() {
        let catalog = catalog("reachability: {tunnel: bridge, identity: warden}\n");
        let mut request = CreateSandbox::profile("x");
        request.spec.reachability.tunnel = Some("mine".into());
        let hints = prepare(request, &catalog).unwrap().spec.reachability;
        assert_eq!(hints.tunnel.as_deref(), Some("mine"));
        assert_eq!(hints.identity.as_deref(), Some("warden"));
    }

    #[test]
    fn inputs_that_nothing_uses_are_refused() {
        let none = ProfileCatalog::none();
        let says =
            |request: CreateSandbox| prepare(request, &none).unwrap_err().message().to_owned();
        assert!(says(CreateSandbox::new().input("ref", "main")).contains("input ref"));
        assert!(says(CreateSandbox::new().workspace(".").input("repo", ".")).contains("twice"));
        assert!(
            says(CreateSandbox::new().input("a b", "").setup("true"))
                .contains("cannot be an input")
        );
        let fine = CreateSandbox::new().input("repo", ".");
        assert!(prepare(fine, &none).unwrap().spec.workspace.unwrap().is_absolute());
    }

    #[test]
    fn a_backend_that_was_asked_for_is_the_route() {
        let catalog = catalog("route: {strategy: lowest-cost, extensions: [ext.one, ext.two]}\n");
        let plan = |request| prepare(request, &catalog).unwrap().plan.unwrap();
        let routed = plan(CreateSandbox::profile("x"));
        assert_eq!((routed.strategy, routed.candidates.len()), (Strategy::LowestCost, 2));
        let asked = plan(CreateSandbox::profile("x").backend(BackendId::new("ext.two")));
        assert_eq!(asked.candidates, [BackendId::new("two")]);
    }
}
