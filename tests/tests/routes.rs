//! Routes: which backends are considered, in what order they are tried, and what is told about it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use sandbox_conformance::{
    decorate::{Decorated, Decoration},
    fake::DirectoryBackend,
};
use sandbox_core::{
    BackendId, Capabilities, CollectSink, CreateSandbox, Error, ErrorKind, Hosting, Instance,
    Known, Profile, ProfileCatalog, Provision, Result, SandboxBackend, SandboxManager,
    SandboxState, Suppressed, TurnId,
};

/// How a backend is in these tests.
#[derive(Debug, Default)]
struct Way {
    fails: bool,
    delay: Duration,
    hosting: Hosting,
    no_probe: bool,
}

#[async_trait]
impl Decoration for Way {
    async fn probe(&self, inner: &dyn SandboxBackend) -> Result<Capabilities> {
        if self.no_probe {
            let message = "its daemon does not answer";
            return Err(Error::new(ErrorKind::Unavailable, "probe", message));
        }
        Ok(inner.probe().await?.hosted(self.hosting.clone()))
    }

    async fn provision(&self, inner: &dyn SandboxBackend, request: &Provision) -> Result<Instance> {
        tokio::time::sleep(self.delay).await;
        if self.fails {
            let message = format!("{} is out of order", inner.id());
            return Err(Error::new(ErrorKind::Unavailable, "provision", message));
        }
        inner.provision(request).await
    }
}

/// A manager with these backends, the first being `one`, and a profile `x` with this route.
async fn manager(dir: &Path, ways: Vec<(&str, Way)>, route: &str) -> SandboxManager {
    let text = format!(
        "id: profile.x\nversion: \"1\"\nextension: ext.one\nnetwork: {{default: allow}}\n{route}"
    );
    let profile = Profile::from_yaml(&text, "x.yaml").unwrap();
    let mut builder = SandboxManager::builder()
        .state_dir(dir.join("state"))
        .profiles(ProfileCatalog::none().with(profile));
    for (id, way) in ways {
        let inner = Arc::new(DirectoryBackend::new(&dir.join(id)).called(id));
        builder = builder.shared_backend(Decorated::new(inner, way));
    }
    builder.build().await.unwrap()
}

fn failing() -> Way {
    Way { fails: true, ..Way::default() }
}

fn hosted(self_hosted: bool, micro_usd_per_hour: u64) -> Way {
    Way {
        hosting: Hosting { self_hosted, micro_usd_per_hour, ..Hosting::default() },
        ..Way::default()
    }
}

/// The backend that a sandbox of the profile gets; the sandbox is removed.
async fn served_by(manager: &SandboxManager, request: CreateSandbox) -> BackendId {
    let sandbox = manager.create(request, &Suppressed).await.unwrap();
    let backend = sandbox.info().await.unwrap().backend.unwrap();
    sandbox.destroy(&Suppressed).await.unwrap();
    backend
}

fn route(strategy: &str, extensions: &str) -> String {
    format!("route: {{strategy: {strategy}, extensions: [{extensions}]}}\n")
}

#[tokio::test]
async fn two_that_fail_fall_through_to_the_third_with_the_attempts_in_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let ways = vec![("one", failing()), ("two", failing()), ("three", Way::default())];
    let route = route("prefer-self-hosted", "ext.one, ext.two, ext.three");
    let manager = manager(dir.path(), ways, &route).await;
    let sink = CollectSink::new(TurnId::new("t"));
    let sandbox = manager.create(CreateSandbox::profile("x"), &sink).await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().backend, Some(BackendId::new("three")));

    let history = manager.history(sandbox.id(), 0).await.unwrap();
    assert_eq!(
        sink.kinds(),
        [
            "requested",
            "provisioning",
            "backend_failed",
            "provisioning",
            "backend_failed",
            "provisioning",
            "ready"
        ]
    );
    assert_eq!(sink.events(), history);
    let failed: Vec<_> = history
        .iter()
        .filter_map(|event| match event.known()? {
            Known::BackendFailed { backend, error } => Some((backend.as_str(), error.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(failed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ["one", "two"]);
    assert!(failed[1].1.contains("two is out of order"), "{failed:?}");

    // It stays there: a fresh instance is made by the backend that has it.
    sandbox.recreate(&sink).await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().backend, Some(BackendId::new("three")));
    sandbox.destroy(&sink).await.unwrap();
}

#[tokio::test]
async fn when_none_is_left_the_error_lists_each_and_why() {
    let dir = tempfile::tempdir().unwrap();
    let ways = vec![
        ("one", failing()),
        ("two", Way { no_probe: true, ..Way::default() }),
        ("three", hosted(false, 9_000_000)),
    ];
    let route = "route: {strategy: lowest-cost, extensions: [ext.one, ext.two, ext.three, ext.four], \
                 max_cost_per_hour_usd: 0.5}\n";
    let manager = manager(dir.path(), ways, route).await;
    let error = manager.create(CreateSandbox::profile("x"), &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "as the attempt that was made");
    for says in [
        "one is out of order",
        "two: its daemon does not answer",
        "three: it costs 9 USD an hour, and 0.5 is the most",
        "four: this manager has no such backend",
    ] {
        assert!(error.message().contains(says), "{says} is not in {error}");
    }
    let sandbox = manager.open(error.sandbox().unwrap().as_str()).await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().state, SandboxState::Failed);
    let kinds: Vec<String> = manager
        .history(sandbox.id(), 0)
        .await
        .unwrap()
        .iter()
        .map(sandbox_core::SandboxEvent::name)
        .collect();
    assert_eq!(kinds, ["requested", "provisioning", "backend_failed", "failed"]);

    // Where none can even be tried, it cannot be done, now or later.
    let strict = "isolation: {level: container}\n";
    let manager = manager_with(dir.path(), strict).await;
    let error = manager.create(CreateSandbox::profile("x"), &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("isolation container is asked for"), "{error}");
}

async fn manager_with(dir: &Path, rest: &str) -> SandboxManager {
    manager(&dir.join("other"), vec![("one", Way::default())], rest).await
}

#[tokio::test]
async fn a_setup_that_fails_is_not_tried_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let ways = vec![("one", Way::default()), ("two", Way::default())];
    let rest = route("prefer-self-hosted", "ext.one, ext.two") + "setup: {commands: [exit 3]}\n";
    let manager = manager(dir.path(), ways, &rest).await;
    let error = manager.create(CreateSandbox::profile("x"), &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let history = manager.history(error.sandbox().unwrap(), 0).await.unwrap();
    assert!(!history.iter().any(|event| event.name() == "backend_failed"));
}

#[tokio::test]
async fn the_strategies_order_by_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let x = || CreateSandbox::profile("x");
    let all = "ext.one, ext.two, ext.three";
    for (strategy, expected) in
        [("explicit", "one"), ("prefer-self-hosted", "two"), ("lowest-cost", "three")]
    {
        let ways = vec![
            ("one", hosted(false, 500_000)),
            ("two", hosted(true, 100_000)),
            ("three", hosted(false, 50_000)),
        ];
        let manager = manager(&dir.path().join(strategy), ways, &route(strategy, all)).await;
        assert_eq!(served_by(&manager, x()).await.as_str(), expected, "{strategy}");
        // Who asks for a backend gets it.
        let asked = x().backend(BackendId::new("ext.one"));
        assert_eq!(served_by(&manager, asked).await.as_str(), "one");
    }
}

#[tokio::test]
async fn the_lowest_latency_is_the_one_measured_by_whatever_process() {
    let dir = tempfile::tempdir().unwrap();
    // Slow by far more than a busy machine could make up for.
    let slow = || Way { delay: Duration::from_secs(3), ..Way::default() };
    let ways = || vec![("one", slow()), ("two", Way::default())];
    let route = route("lowest-latency", "ext.one, ext.two");
    let first = manager(dir.path(), ways(), &route).await;
    let x = || CreateSandbox::profile("x");
    assert_eq!(served_by(&first, x()).await.as_str(), "one", "never measured, and listed first");
    assert_eq!(served_by(&first, x()).await.as_str(), "two", "not yet measured");
    drop(first);
    let second = manager(dir.path(), ways(), &route).await;
    assert_eq!(served_by(&second, x()).await.as_str(), "two", "the faster one");
}

#[tokio::test]
async fn a_host_that_is_asked_for_decides() {
    let dir = tempfile::tempdir().unwrap();
    let far = Hosting { hosts: vec!["alpha".into(), "beta".into()], ..Hosting::default() };
    let ways = vec![("one", Way::default()), ("two", Way { hosting: far, ..Way::default() })];
    let rest = route("prefer-self-hosted", "ext.one, ext.two") + "placement: {prefer: [gamma]}\n";
    let manager = manager(dir.path(), ways, &rest).await;
    let x = || CreateSandbox::profile("x");
    assert_eq!(served_by(&manager, x()).await.as_str(), "one", "two has no host gamma");
    assert_eq!(served_by(&manager, x().host("beta")).await.as_str(), "two");
    let error = manager.create(x().host("delta"), &Suppressed).await.unwrap_err();
    assert!(error.message().contains("its hosts are alpha, beta"), "{error}");
}
