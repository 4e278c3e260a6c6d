//! The harness is killed at each step of attaching to a container that somebody else made.

use std::{
    fs,
    process::{Command as Program, ExitStatus},
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, Failure, holds, same};
use sandbox_core::{BackendId, Consumer, SandboxEvent, SandboxManager, SandboxState, Suppressed};

use crate::{
    child, killed,
    place::Place,
    scene::{SOON, Scene, is_settled, sh},
    trial,
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("killed::docker::at_each_step_of_Attach", || async {
        match Place::engine() {
            Ok(engine) => at_each_step(engine).await,
            Err(why) => Ok(Some(why)),
        }
    })]
}

/// Somebody's container, which is removed at the end.
struct Lent {
    engine: String,
    name: String,
}

impl Lent {
    fn new(place: &Place) -> Check<Self> {
        let Place::Engine { host, image } = place else { return Err("it is no engine".into()) };
        let name = format!("lent-at-steps-{}", std::process::id());
        let lent = Self { engine: host.clone(), name };
        lent.docker(&[
            "run",
            "--detach",
            "--network=none",
            "--name",
            &lent.name,
            image,
            "sleep",
            "9999",
        ])?;
        Ok(lent)
    }

    fn docker(&self, arguments: &[&str]) -> Check<String> {
        let output =
            Program::new("docker").args(["--host", &self.engine]).args(arguments).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("docker {arguments:?}: {said}").into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Nothing is in it that was not there at first, and its own program runs. Processes of the engine's, by
    /// which it starts others there, take a moment to go.
    fn is_as_it_was(&self) -> Check {
        let script = "ls -A / | grep sandbox; ps -o args | grep -v -e 'ps -o' -e grep";
        let deadline = Instant::now() + SOON;
        loop {
            let said = self.docker(&["exec", &self.name, "sh", "-c", script])?;
            let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with("sh -c")).collect();
            if lines == ["COMMAND", "sleep 9999"] {
                return Ok(());
            }
            holds!(Instant::now() < deadline, "something stays in the container: {lines:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = self.docker(&["rm", "--force", &self.name]);
    }
}

async fn at_each_step(place: Place) -> Check<Option<String>> {
    let lent = Lent::new(&place)?;
    lent.is_as_it_was()?;
    let scene = Scene::on(place.another())?;
    holds!(run(&scene, &lent, None)?.success(), "it succeeds where nobody is killed");
    let steps = fs::read_to_string(scene.dir().join("steps"))?;
    check(&scene, &lent).await?;

    let steps = killed::chosen(&place, steps.lines());
    let mut failures = Vec::new();
    for step in &steps {
        let scene = Scene::on(place.another())?;
        let status = run(&scene, &lent, Some(step))?;
        let ended = killed::ended_at(step, status);
        if let Err(failure) = check(&scene, &lent).await.and(ended) {
            failures.push(format!("killed {step}: {}", failure.message()));
        }
    }
    println!("attach: killed at {} steps", steps.len());
    if failures.is_empty() { Ok(None) } else { Err(Failure::from(failures.join("\n"))) }
}

fn run(scene: &Scene, lent: &Lent, step: Option<&str>) -> Check<ExitStatus> {
    fs::write(scene.dir().join("external"), &lent.name)?;
    child::run("attach", scene, step)
}

/// What the process that is killed does.
pub(crate) async fn attach(scene: &Scene, manager: &SandboxManager) -> Check {
    let external = fs::read_to_string(scene.dir().join("external"))?;
    let docker = BackendId::new("docker");
    manager.attach(&docker, &external, Consumer::default(), &Suppressed).await?;
    Ok(())
}

/// It is attached to, or it is as it was; the history says which.
async fn check(scene: &Scene, lent: &Lent) -> Check {
    let manager = scene.manager().await?;
    for history in scene.histories(&manager).await? {
        let kinds: Vec<String> = history.iter().map(SandboxEvent::name).collect();
        holds!(is_settled(&history), "everything that was begun is settled: {kinds:?}");
        let sandbox = manager.open(history[0].sandbox_id.as_str()).await?;
        let attached = kinds.iter().any(|kind| kind == "attached");
        let state = sandbox.info().await?.state;
        same!(state, if attached { SandboxState::Ready } else { SandboxState::Failed });
        if attached {
            same!(sh(&sandbox, "id -u").await?, "0");
            sandbox.detach(&Suppressed).await?;
        }
    }
    same!(manager.list().await?.len(), 0);
    lent.is_as_it_was()
}
