//! Ways into a container from outside, and that nothing is left of it once another has taken its place.

use std::{
    io::Write,
    process::{Command as Program, Output, Stdio},
};

use sandbox_core::{BackendId, Command, Consumer, CreateSandbox, Reachability, Sandbox};

use crate::engine::{Scene, given};

async fn hint(sandbox: &Sandbox) -> String {
    sandbox.reachability().await.unwrap().report().local_exec_hint.unwrap()
}

/// As it would be pasted: into a shell on a terminal.
fn pasted(hint: &str, typed: &str) -> Output {
    let mut script = Program::new("script")
        .args(["--quiet", "--return", "--command", hint, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    script.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    script.wait_with_output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hint_that_is_pasted_opens_a_shell_inside() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let request = CreateSandbox::new().workspace(scene.repository());
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    let run = sandbox.exec(Command::shell("echo from inside > mark"), &scene.sink).await.unwrap();
    assert!(run.outcome.is_success());
    let hint = hint(&sandbox).await;
    let typed = "cat README mark\necho user=$(id -u) in=$(pwd)\ntest -t 0 && echo a terminal\n\
                 grep CapEff /proc/self/status\nexit 7\n";
    let output = pasted(&hint, typed);
    let said = String::from_utf8_lossy(&output.stdout);
    for part in ["v1", "from inside", "user=1000 in=/workspace", "a terminal"] {
        assert!(said.contains(part), "{hint}: {said}");
    }
    assert!(said.contains("0000000000000000"), "it has no right: {said}");
    assert_eq!(output.status.code(), Some(7), "{said}");
    // Everything before its last word runs any other command.
    let without = hint.strip_suffix("/bin/sh").unwrap().replace(" --tty", "");
    let run = Program::new("sh").arg("-c").arg(format!("{without}cat mark")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stdout), "from inside\n", "{run:?}");
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hint_leads_into_a_borrowed_container_too() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let name = format!("lent-hint-{}", std::process::id());
    scene.docker(&[
        "run",
        "--detach",
        "--network=none",
        "--name",
        &name,
        &given.busybox,
        "sleep",
        "9999",
    ]);
    scene.docker(&["exec", &name, "sh", "-c", "echo theirs > /own"]);
    let docker = BackendId::new("docker");
    let attached = scene.manager.attach(&docker, &name, Consumer::default(), &scene.sink).await;
    let sandbox = attached.unwrap();
    let output = pasted(&hint(&sandbox).await, "cat /own\nexit\n");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("theirs"), "{said}");
    sandbox.detach(&scene.sink).await.unwrap();
    scene.docker(&["rm", "--force", &name]);
}

/// Whether a process of this host has this argument.
fn runs(argument: &str) -> bool {
    let all = Program::new("pgrep").args(["--full", "--count", argument]).output().unwrap();
    String::from_utf8_lossy(&all.stdout).trim() != "0"
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ran_before_a_rewind_does_not_run_after_it() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    let snapshot = sandbox.snapshot("", &scene.sink).await.unwrap();
    for round in 0..3 {
        let time = format!("86{round}{}.25", std::process::id());
        let command = Command::new("sleep").arg(&time).detached();
        drop(sandbox.spawn(command, &scene.sink).await.unwrap());
        assert!(runs(&format!("sleep {time}")), "the control");
        let Reachability::Container(before) = sandbox.reachability().await.unwrap() else {
            panic!("it is in no container")
        };
        sandbox.rewind(&snapshot.id, &scene.sink).await.unwrap();
        assert!(!runs(&format!("sleep {time}")), "it has ended");
        assert_ne!(scene.container().await, before.container, "another has taken its place");
    }
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}
