//! What happens to containers and engines behind the manager's back.

use std::time::Instant;

use sandbox_core::{
    Command, CreateSandbox, ErrorKind, OnLost, Outcome, OutputStream, Sandbox, SandboxBackend,
    SandboxState, Suppressed,
};
use sandbox_docker::DockerBackendBuilder;

use crate::engine::{Engine, SOON, Scene, docker, given};

async fn say(sandbox: &Sandbox, text: &str) -> sandbox_core::Result<String> {
    let run = sandbox.exec(Command::shell(text), &Suppressed).await?;
    Ok(run.stdout.text().trim().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_removed_by_hand_is_noticed_and_comes_back_if_it_shall() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let request =
        CreateSandbox::new().workspace(scene.repository()).on_lost(OnLost::RestoreLatestSnapshot);
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    say(&sandbox, "echo kept > new").await.unwrap();
    sandbox.snapshot("", &scene.sink).await.unwrap();
    scene.docker(&["rm", "--force", &scene.container().await]);
    assert_eq!(say(&sandbox, "true").await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(say(&sandbox, "cat README new").await.unwrap(), "v1\nkept");
    let history = scene.manager.history(sandbox.id(), 0).await.unwrap();
    let lost = history.iter().filter(|event| event.name() == "lost").count();
    assert_eq!(lost, 1);
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_is_killed_is_lost_with_the_reason() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    scene.docker(&["kill", &scene.container().await]);
    let error = say(&sandbox, "true").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(error.to_string().contains("exit code is 137"), "{error}");
    assert_eq!(sandbox.info().await.unwrap().state, SandboxState::Lost);
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_and_comes_back_has_lost_nothing() {
    let Some(given) = given() else { return };
    let mut engine = Engine::start(false);
    engine.take(&given.host, &given.busybox);
    // What does not pass the daemon goes on without it.
    let carried = |builder: DockerBackendBuilder| builder.direct_connections(false);
    let scene = Scene::with(&engine.host(), &given.busybox, carried).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    let text = "i=0; while [ ! -e stop ]; do echo line $i; i=$((i+1)); sleep 0.05; done; echo last";
    let process =
        sandbox.spawn(Command::shell(text).detached(), &scene.sink).await.unwrap().id().clone();
    engine.kill();
    let error = say(&sandbox, "true").await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert_ne!(sandbox.info().await.unwrap().state, SandboxState::Lost);
    engine.restart();
    let begin = Instant::now();
    loop {
        match say(&sandbox, "touch stop; echo back").await {
            Ok(said) => {
                assert_eq!(said, "back");
                break;
            }
            Err(error) => {
                assert!(error.is_retryable() && begin.elapsed() < SOON, "{error}");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
    let process = sandbox.process(&process).await.unwrap();
    let end = tokio::time::timeout(SOON, process.wait(&scene.sink)).await.unwrap().unwrap();
    assert_eq!(end.outcome, Outcome::Exited(0));
    let read = process.read(OutputStream::Stdout, 0, 1 << 20).await.unwrap();
    let said = String::from_utf8_lossy(&read.bytes).into_owned();
    let lines: Vec<&str> = said.lines().collect();
    for (index, line) in lines[..lines.len() - 1].iter().enumerate() {
        assert_eq!(*line, format!("line {index}"), "nothing is missing");
    }
    assert_eq!(lines.last(), Some(&"last"));
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_pass_the_daemon_goes_on_without_it() {
    let Some(given) = given() else { return };
    if !rustix::process::geteuid().is_root() {
        sandbox_conformance::left_out("docker_direct", "only root may look into containers");
        return;
    }
    let mut engine = Engine::start(false);
    engine.take(&given.host, &given.busybox);
    let scene = Scene::new(&engine.host(), &given.busybox).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    engine.kill();
    assert_eq!(say(&sandbox, "echo on").await.unwrap(), "on");
    let error = sandbox.stop(&scene.sink).await.unwrap_err();
    assert!(error.is_retryable(), "only the engine can stop it: {error}");
    engine.restart();
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_leaves_nothing_behind() {
    let Some(given) = given() else { return };
    let engine = Engine::start(true);
    engine.take(&given.host, &given.busybox);
    let scene = Scene::new(&engine.host(), &given.busybox).await;
    // The control: there is room for a small one.
    let request = CreateSandbox::new().workspace(scene.repository());
    let small = scene.manager.create(request.clone(), &scene.sink).await.unwrap();
    std::fs::write(scene.repository().join("large"), vec![7; 200 << 20]).unwrap();
    let error = scene.manager.create(request, &scene.sink).await.unwrap_err();
    assert!(error.to_string().contains("no space left"), "{error}");
    assert_eq!(scene.backend.inventory().await.unwrap().len(), 1, "only the small one is there");
    assert_eq!(say(&small, "cat README").await.unwrap(), "v1");
    // A snapshot that does not fit fails, and the sandbox goes on.
    let filled = say(&small, "dd if=/dev/zero of=big bs=1M count=55 2>/dev/null; echo $?").await;
    assert_eq!(filled.unwrap(), "0");
    small.snapshot("", &scene.sink).await.unwrap_err();
    assert_eq!(say(&small, "cat README").await.unwrap(), "v1");
    small.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
    let nameless = docker(&engine.host(), &["images", "--filter", "dangling=true", "--quiet"]);
    assert_eq!(nameless.unwrap(), "");
}
