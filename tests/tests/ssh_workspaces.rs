//! Over SSH: workspaces that stay on their host, machines that are the sandbox, and what a profile says of
//! the way there. On the hosts of `scripts/hosts`.
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, in functions that clippy cannot tell as such"
)]

mod ssh_scene;

use std::fs;

use sandbox_core::{
    Command, CreateSandbox, ErrorKind, Feature, Isolation, Level, Network, Profile, ProfileCatalog,
    SandboxBackend, SandboxManager, Suppressed,
};
use sandbox_ssh::SshBackend;
use ssh_scene::{Scene, sh};

/// With bubblewrap on the host, and with the account alone.
const BOTH: [&str; 2] = ["near", "account"];

fn backend(scene: &Scene, host: &str) -> SshBackend {
    let builder = scene.builder(host);
    match host {
        "account" => builder.accept_the_account_as_the_only_isolation().build().unwrap(),
        _ => builder.build().unwrap(),
    }
}

fn network(host: &str) -> Network {
    if host == "account" { Network::Host } else { Network::Deny }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_stays_on_its_host_is_that_directory_itself() {
    for host in BOTH {
        let Some(scene) = Scene::new() else { return };
        if !scene.has(host) {
            continue;
        }
        let directory = scene.repository("it's the truth");
        if host == "account" {
            scene.give(&directory);
            scene.give(&directory.join("README"));
        }
        let manager = scene.manager(backend(&scene, host)).await;
        let request = CreateSandbox::new().remote_workspace(&directory).network(network(host));
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        assert_eq!(sh(&sandbox, "cat README; echo made > new; echo there > ~/kept").await, "v1");
        assert_eq!(fs::read_to_string(directory.join("new")).unwrap(), "made\n");
        // What is changed on the host is seen at once.
        fs::write(directory.join("README"), "v2\n").unwrap();
        assert_eq!(sh(&sandbox, "cat README").await, "v2");

        // Neither changes nor snapshots are of the workspace.
        let changes = sandbox.changes(None).await.unwrap();
        let paths: Vec<_> =
            changes.iter().map(|change| change.path.display().to_string()).collect();
        assert!(paths.iter().any(|path| path.ends_with("/kept")), "{host}: {paths:?}");
        assert!(
            !paths.iter().any(|path| path.contains("README") || path.ends_with("/new")),
            "{paths:?}"
        );
        let snapshot = sandbox.snapshot("one", &Suppressed).await.unwrap();
        sh(&sandbox, "echo later > later; echo later > ~/kept").await;
        sandbox.rewind(&snapshot.id, &Suppressed).await.unwrap();
        assert_eq!(sh(&sandbox, "cat README later ~/kept").await, "v2\nlater\nthere");
        sandbox.stop(&Suppressed).await.unwrap();
        sandbox.start(&Suppressed).await.unwrap();
        assert_eq!(sh(&sandbox, "cat later ~/kept").await, "later\nthere");

        sandbox.destroy(&Suppressed).await.unwrap();
        let mut left: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["README", "later", "new"], "{host}: it is left as it is");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_is_not_on_its_host_is_named_and_nothing_is_made() {
    for host in BOTH {
        let Some(scene) = Scene::new() else { return };
        if !scene.has(host) {
            continue;
        }
        let backend = backend(&scene, host);
        let manager = scene.manager(backend.clone()).await;
        let nothing = scene.path("not there");
        let request = CreateSandbox::new().remote_workspace(&nothing).network(network(host));
        let error = manager.create(request, &Suppressed).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        let message = error.to_string();
        assert!(message.contains(nothing.to_str().unwrap()) && message.contains(host), "{message}");
        // What sandboxes themselves are kept in is nobody's workspace.
        let state = scene.path(if host == "account" { "account" } else { "host" });
        let request = CreateSandbox::new().remote_workspace(state).network(network(host));
        let error = manager.create(request, &Suppressed).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{error}");
        assert!(backend.inventory().await.unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_this_machine_is_not_bound_elsewhere() {
    let Some(scene) = Scene::new() else { return };
    let manager = scene.manager(backend(&scene, "near")).await;
    let request = CreateSandbox::new().bind_workspace(scene.repository("here"));
    let error = manager.create(request, &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("remote-canonical"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_says_where_the_workspace_stays_and_how_it_is_reached() {
    let Some(scene) = Scene::new() else { return };
    let directory = scene.repository("truth");
    let text = "id: profile.there\nversion: \"1\"\nextension: ext.ssh\n\
                workspace: {mode: remote-canonical}\n\
                reachability: {tunnel: ops-bridge, identity: ops-warden}\n";
    let catalog = ProfileCatalog::none().with(Profile::from_yaml(text, "there.yaml").unwrap());
    let backend =
        scene.builder("near").tunnel_hint("another", Some("gate".into())).build().unwrap();
    let manager = SandboxManager::builder().state_dir(scene.path("state")).profiles(catalog);
    let manager = manager.backend(backend).build().await.unwrap();
    let request =
        CreateSandbox::profile("profile.there").input("repo", directory.to_str().unwrap());
    let sandbox = manager.create(request, &Suppressed).await.unwrap();
    assert_eq!(sh(&sandbox, "cat README").await, "v1");
    let told = |sandbox: sandbox_core::Reachability| {
        let json = serde_json::to_value(sandbox).unwrap();
        [json["tunnel"].clone(), json["tunnel_via"].clone(), json["identity"].clone()]
    };
    let expected = ["ops-bridge".into(), serde_json::Value::Null, "ops-warden".into()];
    assert_eq!(told(sandbox.reachability().await.unwrap()), expected);
    // It is still known after a rewind, which makes another instance.
    let snapshot = sandbox.snapshot("", &Suppressed).await.unwrap();
    sandbox.rewind(&snapshot.id, &Suppressed).await.unwrap();
    assert_eq!(told(sandbox.reachability().await.unwrap()), expected);
    sandbox.destroy(&Suppressed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_the_sandbox_is_left_alone() {
    for host in BOTH {
        let Some(scene) = Scene::new() else { return };
        if !scene.has(host) {
            continue;
        }
        let backend = scene.builder(host).the_machines_are_the_sandboxes().build().unwrap();
        assert_eq!(backend.id().as_str(), "vm-packer");
        // That of the same host that makes sandboxes of its own, with the same state.
        let other = scene.builder(host).accept_the_account_as_the_only_isolation().build().unwrap();
        let manager = scene.manager(backend.clone()).await;
        let workspace = scene.repository("workspace");
        let denied = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap_err();
        assert_eq!(denied.kind(), ErrorKind::Unsupported, "{denied}");
        let request = CreateSandbox::new().workspace(&workspace).network(Network::Host);
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        let machine = scene.path("of the machine");
        if host == "account" {
            fs::create_dir(&machine).unwrap();
            scene.give(&machine);
        }
        // All of the machine is there, as the account sees it.
        let text = format!("cat README; mkdir -p '{0}'; echo made > '{0}/file'", machine.display());
        assert_eq!(sh(&sandbox, &text).await, "v1");
        assert_eq!(fs::read_to_string(machine.join("file")).unwrap(), "made\n");
        let snapshot = sandbox.snapshot("", &Suppressed).await.unwrap();
        sh(&sandbox, "rm README").await;
        sandbox.rewind(&snapshot.id, &Suppressed).await.unwrap();
        assert_eq!(sh(&sandbox, "cat README").await, "v1");
        let directory = sh(&sandbox, "pwd").await;
        assert!(fs::exists(&directory).unwrap(), "it is one of the machine");

        assert_eq!(backend.inventory().await.unwrap().len(), 1);
        assert!(other.inventory().await.unwrap().is_empty(), "each sees its own");
        let process = sandbox.spawn(Command::new("sleep").arg("600"), &Suppressed).await.unwrap();
        sandbox.destroy(&Suppressed).await.unwrap();
        drop(process);
        assert!(!fs::exists(directory).unwrap(), "only its directory is removed");
        assert_eq!(fs::read_to_string(machine.join("file")).unwrap(), "made\n");
        assert!(backend.inventory().await.unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_told_as_what_it_is() {
    let Some(scene) = Scene::new() else { return };
    let backend = scene.builder("near").the_machines_are_the_sandboxes().build().unwrap();
    let found = backend.probe().await.unwrap();
    assert_eq!(found.isolation(), Isolation::Process, "though there is bubblewrap");
    assert_eq!(found.level(Feature::OwnKernel), Level::None);
    assert_eq!(found.level(Feature::RemoteWorkspace), Level::Full);
    // It does not stand in for a backend that could not be used.
    let manager = SandboxManager::builder().state_dir(scene.path("unnamed"));
    let manager = manager.backend(backend.clone()).build().await.unwrap();
    let request = CreateSandbox::new().host("near").network(Network::Host);
    let error = manager.create(request.clone(), &Suppressed).await.unwrap_err();
    assert!(error.to_string().contains("by its name"), "{error}");
    let named = manager.create(request.backend(backend.id()), &Suppressed).await.unwrap();
    named.destroy(&Suppressed).await.unwrap();
    let profile = |level: &str| {
        let text = format!(
            "id: profile.vm\nversion: \"1\"\nextension: ext.vm-packer\nisolation: {{level: {level}}}\n\
             network: {{default: allow}}\n"
        );
        ProfileCatalog::none().with(Profile::from_yaml(&text, "vm.yaml").unwrap())
    };
    for (level, served) in [("process", true), ("container", false), ("microvm", false)] {
        let manager = SandboxManager::builder().state_dir(scene.path(level));
        let manager = manager.profiles(profile(level)).backend(backend.clone());
        let manager = manager.build().await.unwrap();
        match manager.create(CreateSandbox::profile("profile.vm"), &Suppressed).await {
            Ok(sandbox) => {
                assert!(served, "{level}");
                sandbox.destroy(&Suppressed).await.unwrap();
            }
            Err(error) => {
                assert!(!served, "{level}: {error}");
                assert!(error.to_string().contains("isolation"), "{error}");
            }
        }
    }
}
