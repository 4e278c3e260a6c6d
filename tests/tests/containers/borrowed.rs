//! Containers that somebody else made.

use sandbox_core::{
    BackendId, Command, Consumer, ErrorKind, Instance, InstanceId, SandboxBackend, SandboxId,
    SandboxState,
};

use crate::engine::{Scene, given};

#[tokio::test(flavor = "multi_thread")]
async fn a_borrowed_container_is_left_as_it_was() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let name = format!("lent-{}", std::process::id());
    let run =
        ["run", "--detach", "--network=none", "--name", &name, &given.busybox, "sleep", "9999"];
    scene.docker(&run);
    scene.docker(&["exec", &name, "sh", "-c", "echo theirs > /own"]);
    let backend = BackendId::new("docker");
    let attach = |external: &str| {
        let (manager, external) = (scene.manager.clone(), external.to_owned());
        let (backend, sink) = (backend.clone(), &scene.sink);
        async move { manager.attach(&backend, &external, Consumer::default(), sink).await }
    };
    let error = attach("no-such-container").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let sandbox = attach(&name).await.unwrap();
    let run = sandbox.exec(Command::shell("cat /own; id -u"), &scene.sink).await.unwrap();
    assert_eq!(run.stdout.text(), "theirs\n0\n");
    let process = sandbox.spawn(Command::new("sleep").arg("8888").detached(), &scene.sink).await;
    drop(process.unwrap());
    // Another manager reaches it too, through a connection of its own.
    let again = sandbox_core::SandboxManager::builder()
        .state_dir(scene.dir.path().join("state"))
        .backend(scene.backend.clone())
        .build()
        .await
        .unwrap();
    let same = again.open(sandbox.id().as_str()).await.unwrap();
    assert_eq!(same.files().read("/own").await.unwrap(), b"theirs\n");
    let sink = &scene.sink;
    for refused in [
        sandbox.snapshot("", sink).await.map(drop),
        sandbox.stop(sink).await,
        sandbox.pause(sink).await,
        sandbox.recreate(sink).await,
        sandbox.destroy(sink).await,
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotOwned);
    }
    sandbox.detach(sink).await.unwrap();
    sandbox.detach(sink).await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().state, SandboxState::Destroyed);
    let left = scene.docker(&[
        "exec",
        &name,
        "sh",
        "-c",
        "cat /own; ls -A / | grep [s]andbox; ps -o args",
    ]);
    assert!(left.starts_with("theirs\n"), "{left}");
    assert!(!left.contains("sandbox") && !left.contains("8888"), "{left}");
    assert!(left.contains("sleep 9999"), "its own program runs on: {left}");
    scene.docker(&["rm", "--force", &name]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_half_brought_in_goes_too_and_nothing_is_said_to_be_gone_that_is_not() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let name = format!("lent-half-{}", std::process::id());
    let run =
        ["run", "--detach", "--network=none", "--name", &name, &given.busybox, "sleep", "9999"];
    scene.docker(&run);
    let list = || scene.docker(&["exec", &name, "sh", "-c", "ls -A / | grep sandbox || true"]);
    let half = Instance {
        id: InstanceId::new(),
        sandbox: SandboxId::new(),
        backend: BackendId::new("docker"),
        data: name.clone().into(),
    };
    let directory = format!("/.sandbox-{}", half.id);
    // As when the engine was in the middle of it: no program, or half of it.
    for text in ["mkdir -p $0/run", "mkdir -p $0/run; echo half > $0/guest; chmod 755 $0/guest"] {
        scene.docker(&["exec", &name, "sh", "-c", text, &directory]);
        assert_ne!(list(), "");
        scene.backend.teardown(&half).await.unwrap();
        assert_eq!(list(), "", "{text}");
        scene.backend.teardown(&half).await.unwrap();
    }

    let docker = BackendId::new("docker");
    let attached = scene.manager.attach(&docker, &name, Consumer::default(), &scene.sink).await;
    let sandbox = attached.unwrap();
    scene.docker(&["pause", &name]);
    let error = sandbox.detach(&scene.sink).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("paused"), "{error}");
    scene.docker(&["unpause", &name]);
    assert_ne!(list(), "");
    sandbox.detach(&scene.sink).await.unwrap();
    assert_eq!(list(), "");
    assert_eq!(sandbox.info().await.unwrap().state, SandboxState::Destroyed);
    scene.docker(&["rm", "--force", &name]);
}
