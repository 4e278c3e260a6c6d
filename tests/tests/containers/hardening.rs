//! What a container may do, as `docker inspect` shows it.

use sandbox_core::{Command, CreateSandbox, ErrorKind, ReapPolicy, SandboxBackend, Suppressed};
use serde_json::{Value, json};

use crate::engine::{Scene, given};

#[tokio::test(flavor = "multi_thread")]
async fn the_safe_defaults_are_there_to_be_inspected() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    // Something passes through the wire.
    sandbox.exec(Command::shell("echo secret-word"), &scene.sink).await.unwrap();
    let container = scene.container().await;
    let all: Value = serde_json::from_str(&scene.docker(&["inspect", &container])).unwrap();
    let (host, config) = (&all[0]["HostConfig"], &all[0]["Config"]);
    assert_eq!(host["CapDrop"], json!(["ALL"]));
    assert_eq!(host["CapAdd"], json!(null));
    assert_eq!(host["SecurityOpt"], json!(["no-new-privileges"]));
    assert_eq!(host["NetworkMode"], "none");
    assert_eq!(host["LogConfig"]["Type"], "none");
    assert_eq!(host["Privileged"], false);
    assert_eq!(host["PidsLimit"], 4096 + 8);
    assert_eq!((&host["Binds"], &all[0]["Mounts"]), (&json!(null), &json!([])));
    assert_eq!(config["User"], "1000:1000");
    assert!(!all.to_string().contains("secret-word"));
    let logs = crate::engine::docker(&scene.host, &["logs", &container]);
    assert!(logs.map_or(true, |said| said.is_empty()), "the wire is in no log");
    sandbox.destroy(&scene.sink).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_that_is_read_only_can_be_worked_on() {
    let Some(given) = given() else { return };
    let scene =
        Scene::with(&given.host, &given.busybox, |builder| builder.read_only_root(true)).await;
    let request = CreateSandbox::new().workspace(scene.repository());
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    let text = "cat README; echo x > new && echo x > /tmp/new && echo x > ~/new && echo written; \
                echo x > /etc/new || echo refused";
    let run = sandbox.exec(Command::shell(text), &Suppressed).await.unwrap();
    assert_eq!(run.stdout.text(), "v1\nwritten\nrefused\n");
    let error = sandbox.snapshot("", &scene.sink).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_workspace_is_the_directory_itself() {
    let Some(given) = given() else { return };
    let scene = Scene::with(&given.host, &given.busybox, |builder| builder.user(0, 0)).await;
    let repository = scene.repository();
    let request = CreateSandbox::new().bind_workspace(&repository);
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    sandbox.exec(Command::shell("echo v2 > README"), &Suppressed).await.unwrap();
    assert_eq!(std::fs::read_to_string(repository.join("README")).unwrap(), "v2\n");
    sandbox.destroy(&scene.sink).await.unwrap();
    assert!(repository.join("README").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_somebody_elses_is_not_looked_at() {
    let Some(given) = given() else { return };
    let (scene, other) = (
        Scene::new(&given.host, &given.busybox).await,
        Scene::new(&given.host, &given.busybox).await,
    );
    let theirs = other.manager.create(CreateSandbox::new(), &other.sink).await.unwrap();
    let name = format!("stranger-{}", std::process::id());
    let run =
        ["run", "--detach", "--network=none", "--name", &name, &given.busybox, "sleep", "9999"];
    scene.docker(&run);
    assert_eq!(scene.backend.inventory().await.unwrap(), []);
    scene.manager.reap(ReapPolicy::default(), &Suppressed).await.unwrap();
    assert_eq!(
        scene.docker(&["inspect", "--format", "{{.State.Status}}", &name]).trim(),
        "running"
    );
    theirs.exec(Command::new("true"), &Suppressed).await.unwrap();
    scene.docker(&["rm", "--force", &name]);
    theirs.destroy(&other.sink).await.unwrap();
}
