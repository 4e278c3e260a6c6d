//! Containers that are ready beforehand.

use sandbox_core::{Command, CreateSandbox, SandboxBackend, Suppressed};
use sandbox_docker::PoolOptions;

use crate::engine::{Scene, given};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_ready_is_clean_and_given_away_once() {
    let Some(given) = given() else { return };
    let options = PoolOptions::new(2, CreateSandbox::new());
    let scene = Scene::with(&given.host, &given.busybox, |builder| builder.pool(options)).await;
    scene.backend.fill_pool().await.unwrap();
    let ready = scene.leftovers();
    assert_eq!(ready.lines().count(), 2, "{ready}");
    assert_eq!(scene.backend.inventory().await.unwrap(), [], "they are nobody's");
    let mut machines = Vec::new();
    for round in 0..5 {
        let request =
            CreateSandbox::new().workspace(scene.repository()).env("ROUND", round.to_string());
        let sandbox = scene.manager.create(request, &scene.sink).await.unwrap();
        let text =
            "cat README; ls -A; ls /tmp; echo $ROUND; cat /etc/machine-id; touch own /tmp/own";
        let run = sandbox.exec(Command::shell(text), &Suppressed).await.unwrap();
        let said = run.stdout.text().into_owned();
        assert!(said.starts_with(&format!("v1\nREADME\n{round}\n")), "{said}");
        machines.push(said.lines().last().unwrap().to_owned());
        let found = scene.backend.inventory().await.unwrap();
        assert_eq!(found[0].instance.sandbox, *sandbox.id());
        sandbox.destroy(&scene.sink).await.unwrap();
        assert_eq!(scene.backend.inventory().await.unwrap(), []);
    }
    machines.sort();
    machines.dedup();
    assert_eq!(machines.len(), 5, "each is a machine of its own");
    scene.backend.drain_pool().await;
    assert_eq!(scene.leftovers(), "");
}
