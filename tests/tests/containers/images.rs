//! Images: what they need not have, and what becomes of those that snapshots make.

use std::io::Write;

use sandbox_core::{Command, CreateSandbox, ErrorKind, Root, Suppressed};

use crate::engine::{Scene, given};

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_nothing_in_it_will_do() {
    let Some(given) = given() else { return };
    let name = format!("sandboxer-test/nothing:{}", std::process::id());
    let mut import = std::process::Command::new("docker")
        .args(["--host", &given.host, "import", "-", &name])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The end of an archive.
    import.stdin.take().unwrap().write_all(&[0; 1024]).unwrap();
    assert!(import.wait().unwrap().success());
    let scene = Scene::new(&given.host, &given.busybox).await;
    let request =
        CreateSandbox::new().root(Root::Image(name.clone())).workspace(scene.repository());
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    assert_eq!(sandbox.files().read("README").await.unwrap(), b"v1\n");
    sandbox.files().write("new", "text", &scene.sink).await.unwrap();
    let run = sandbox.exec(Command::new("/.sandbox/guest").arg("--version"), &scene.sink).await;
    assert!(run.unwrap().stdout.text().starts_with("sandbox-guest "));
    let error = sandbox.exec(Command::new("sh"), &scene.sink).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
    scene.backend.remove_prepared_images().await.unwrap();
    scene.docker(&["rmi", &name]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_image_is_named_and_leaves_nothing() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let request = CreateSandbox::new().root(Root::Image("sandboxer-test/missing:1".into()));
    let error = scene.manager.create(request, &scene.sink).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("sandboxer-test/missing:1"), "{error}");
    assert_eq!(scene.leftovers(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_lineage_is_flattened_and_goes_when_nobody_needs_it() {
    let Some(given) = given() else { return };
    let scene = Scene::with(&given.host, &given.busybox, |builder| builder.max_layers(5)).await;
    let request = CreateSandbox::new().workspace(scene.repository()).env("A", "spec");
    let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
    let mut snapshots = Vec::new();
    for round in 0..6 {
        let text = format!("echo {round} >> log; rm -f was-{}; touch was-{round}", round - 1);
        sandbox.exec(Command::shell(text), &Suppressed).await.unwrap();
        let snapshot = sandbox.snapshot("", &scene.sink).await.unwrap();
        sandbox.rewind(&snapshot.id, &scene.sink).await.unwrap();
        let image = snapshot.data.data["image"].as_str().unwrap().to_owned();
        let layers = scene.docker(&["inspect", "--format", "{{len .RootFS.Layers}}", &image]);
        assert!(layers.trim().parse::<usize>().unwrap() < 6, "{layers}");
        snapshots.push(snapshot.id);
    }
    let told = "cat log; ls; stat -c %u:%a log; cat README";
    let run = sandbox.exec(Command::shell(told), &Suppressed).await.unwrap();
    let expected = "0\n1\n2\n3\n4\n5\nREADME\nlog\nwas-5\n1000:644\nv1\n";
    assert_eq!(run.stdout.text(), expected);
    for (round, snapshot) in snapshots.iter().enumerate().rev().skip(1) {
        sandbox.rewind(snapshot, &scene.sink).await.unwrap();
        let run = sandbox.exec(Command::shell("wc -l < log; ls was-*"), &Suppressed).await.unwrap();
        assert_eq!(run.stdout.text(), format!("{}\nwas-{round}\n", round + 1));
    }
    // Those that others build on stay usable.
    for snapshot in &snapshots[1..5] {
        sandbox.delete_snapshot(snapshot, &scene.sink).await.unwrap();
    }
    sandbox.rewind(&snapshots[5], &scene.sink).await.unwrap();
    let run = sandbox.exec(Command::shell("wc -l < log"), &Suppressed).await.unwrap();
    assert_eq!(run.stdout.text(), "6\n");
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}
