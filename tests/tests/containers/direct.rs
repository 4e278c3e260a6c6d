//! Connections that do not pass the engine, and those that must.

use std::{
    io::ErrorKind as Io,
    os::unix::net::{UnixListener, UnixStream},
};

use sandbox_core::{
    Command, CreateSandbox, Instance, Sandbox, SandboxBackend, SandboxManager, Suppressed,
};
use sandbox_docker::DockerBackend;

use crate::engine::{Given, Scene, given};

const SOCKET: &str = "/.sandbox/run/socket";

/// Whether this process may look into containers.
fn may_look() -> bool {
    rustix::process::geteuid().is_root()
}

async fn instance(backend: &DockerBackend) -> Instance {
    backend.inventory().await.unwrap().remove(0).instance
}

/// How often the engine was asked to start something in the container of the only sandbox.
async fn carried(scene: &Scene) -> bool {
    let container = scene.container().await;
    scene.docker(&["inspect", "--format", "{{.ExecIDs}}", &container]).trim() != "[]"
}

/// Another manager's handle of the same sandbox, with a connection of its own.
async fn again(scene: &Scene, sandbox: &Sandbox) -> (SandboxManager, Sandbox) {
    let manager = SandboxManager::builder()
        .state_dir(scene.dir.path().join("state"))
        .backend(scene.backend.clone())
        .build()
        .await
        .unwrap();
    let same = manager.open(sandbox.id().as_str()).await.unwrap();
    (manager, same)
}

async fn says(sandbox: &Sandbox, text: &str) -> String {
    let run = sandbox.exec(Command::shell(text), &Suppressed).await.unwrap();
    run.stdout.text().trim().to_owned()
}

async fn with(given: &Given, direct: bool) -> Scene {
    Scene::with(&given.host, &given.busybox, |builder| builder.direct_connections(direct)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_carries_what_it_must_and_nothing_else() {
    let Some(given) = given() else { return };
    for direct in [true, false] {
        let scene = with(&given, direct).await;
        let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
        assert!(!carried(&scene).await, "the first connection is started by nobody");
        let (_manager, same) = again(&scene, &sandbox).await;
        assert_eq!(says(&same, "echo here").await, "here");
        assert_eq!(carried(&scene).await, !(direct && may_look()), "direct: {direct}");
        // Stopped and started, it is another process.
        sandbox.stop(&scene.sink).await.unwrap();
        sandbox.start(&scene.sink).await.unwrap();
        assert_eq!(says(&sandbox, "echo again").await, "again");
        assert_eq!(says(&same, "echo there").await, "there");
        sandbox.destroy(&scene.sink).await.unwrap();
        assert_eq!(scene.leftovers(), "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_root_inside_is_connected_to_too() {
    let Some(given) = given() else { return };
    let scene = Scene::with(&given.host, &given.busybox, |builder| builder.user(0, 0)).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    let (_manager, same) = again(&scene, &sandbox).await;
    assert_eq!(says(&same, "id -u").await, "0");
    assert_eq!(carried(&scene).await, !may_look());
    sandbox.destroy(&scene.sink).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_link_from_inside_leads_to_a_socket_of_the_host() {
    let Some(given) = given() else { return };
    for (user, swap) in [
        (1000, "cd /.sandbox/run && rm socket && ln -s $SOCKET socket"),
        (1000, "cd /.sandbox/run && rm socket && ln -s ../../../../../../../../$SOCKET socket"),
        (0, "cd /.sandbox/run && rm socket && ln -s /proc/self/root$SOCKET socket"),
    ] {
        let scene = Scene::with(&given.host, &given.busybox, |builder| builder.user(user, user));
        let scene = scene.await;
        let path = scene.dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let request = CreateSandbox::new().env("SOCKET", path.to_str().unwrap());
        let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
        assert_eq!(says(&sandbox, &format!("{swap} && echo swapped")).await, "swapped", "{swap}");
        assert_eq!(says(&sandbox, "echo on").await, "on", "who is connected stays it");
        let instance = instance(&scene.backend).await;
        assert!(scene.backend.connect(&instance).await.is_err(), "there is no guest: {swap}");
        assert_eq!(listener.accept().unwrap_err().kind(), Io::WouldBlock, "{swap}");
        // The control: it listens to whoever comes.
        let _stream = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        sandbox.destroy(&scene.sink).await.unwrap();
        assert_eq!(scene.leftovers(), "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_takes_the_guests_place_inside_hears_nothing() {
    let Some(given) = given() else { return };
    // One that has Python.
    let Ok(image) = std::env::var("SANDBOX_TEST_IMAGE") else { return };
    let scene = Scene::new(&given.host, &image).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    let listens = format!(
        "import os, socket, struct\n\
         os.unlink('{SOCKET}')\n\
         s = socket.socket(socket.AF_UNIX)\n\
         s.bind('{SOCKET}')\n\
         os.chmod('{SOCKET}', 0o666)\n\
         s.listen()\n\
         print('listens', flush=True)\n\
         while True:\n\
         \x20   c, _ = s.accept()\n\
         \x20   peer = c.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)\n\
         \x20   outside = struct.unpack('3i', peer)[0] == 0\n\
         \x20   heard = c.recv(64) if outside else b''\n\
         \x20   print('outside' if outside else 'inside', heard, flush=True)\n\
         \x20   c.close()\n"
    );
    let command = Command::new("python3").args(["-c", &listens]).detached();
    let started = sandbox.spawn(command, &scene.sink).await.unwrap();
    let process = sandbox.process(started.id()).await.unwrap();
    let said = async |until: &str| {
        loop {
            let stdout = sandbox_core::OutputStream::Stdout;
            let read = process.read(stdout, 0, 4096).await.unwrap();
            let said = String::from_utf8_lossy(&read.bytes).into_owned();
            if said.contains(until) {
                return said;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    said("listens").await;
    let instance = instance(&scene.backend).await;
    assert!(scene.backend.connect(&instance).await.is_err(), "that is no guest");
    // The engine has carried a connection in as well: what is inside talks to what is inside.
    let heard = said("inside").await;
    assert_eq!(heard.contains("outside"), may_look(), "{heard}");
    assert!(heard.lines().skip(1).all(|line| line.ends_with("b''")), "{heard}");
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}
