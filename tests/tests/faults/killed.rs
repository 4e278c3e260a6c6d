//! The harness is killed at each step of each change.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    process::{ExitStatus, Stdio},
};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, Failure, holds, same};
use sandbox_core::{
    Feature, Level, Sandbox, SandboxEvent, SandboxManager, SandboxState, Suppressed,
};

use crate::{
    child::{self, CHANGES, Change, FORK},
    place::Place,
    scene::{NAME, Scene, marker, sh, usable},
    trial,
};

/// The changes that an engine has much to do for.
const ON_AN_ENGINE: &[Change] = &[
    Change::Create,
    Change::Snapshot,
    Change::SnapshotBusy,
    Change::Rewind,
    Change::Fork,
    Change::Destroy,
];

/// At how many of the pauses that one call of an engine makes the harness is killed.
const PAUSES: usize = 5;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for change in CHANGES.iter().copied() {
        let here = move || at_each_step(Place::here(), change);
        trials.push(trial(format!("killed::at_each_step_of_{change:?}"), here));
    }
    for change in CHANGES.iter().copied() {
        let here = move || again_while_settled(Place::here(), change);
        trials.push(trial(format!("killed::again_while_{change:?}_is_settled"), here));
    }
    for change in ON_AN_ENGINE.iter().copied() {
        let there = move || async move {
            match Place::engine() {
                Ok(engine) => at_each_step(engine, change).await,
                Err(why) => Ok(Some(why)),
            }
        };
        trials.push(trial(format!("killed::docker::at_each_step_of_{change:?}"), there));
    }
    for change in [Change::Create, Change::Snapshot, Change::Rewind] {
        let there = move || async move {
            match Place::engine() {
                Ok(engine) => again_while_settled(engine, change).await,
                Err(why) => Ok(Some(why)),
            }
        };
        trials.push(trial(format!("killed::docker::again_while_{change:?}_is_settled"), there));
    }
    trials.push(trial("killed::four_processes_acquire_one_name", four_processes));
    trials
}

/// Why a change cannot be made there, if it cannot.
pub(crate) async fn impossible(place: &Place, change: Change) -> Check<Option<String>> {
    let needed = match change {
        Change::Pause | Change::Resume => Feature::Pause,
        Change::SnapshotBusy => Feature::SnapshotLive,
        _ => return Ok(None),
    };
    let capabilities = Scene::on(place.clone())?.backend()?.probe().await?;
    let none = capabilities.level(needed) == Level::None;
    Ok(none.then(|| format!("{needed}: {}", capabilities.evidence(needed))))
}

async fn at_each_step(place: Place, change: Change) -> Check<Option<String>> {
    if let Some(why) = impossible(&place, change).await? {
        return Ok(Some(why));
    }
    let scene = Scene::on(place.another())?;
    let what = format!("{change:?}");
    holds!(child::run(&what, &scene, None)?.success(), "{what} succeeds where nobody is killed");
    let steps = fs::read_to_string(scene.dir().join("steps"))?;
    check(&scene, change, "its end").await?;
    scene.end_all().await?;

    let steps = chosen(&place, steps.lines());
    let mut failures = Vec::new();
    for step in &steps {
        if let Err(failure) = at(place.another(), change, step).await {
            failures.push(format!("{change:?} killed {step}: {}", failure.message()));
        }
    }
    println!("{change:?}: killed at {} steps", steps.len());
    if failures.is_empty() { Ok(None) } else { Err(Failure::from(failures.join("\n"))) }
}

/// The steps at which it is killed: all of them here. On an engine, which takes its time, no two of them with
/// nothing in between; and of the pauses in one call only some, from the first to the last.
pub(crate) fn chosen<'a>(place: &Place, steps: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let steps: Vec<&str> = steps.collect();
    if matches!(place, Place::Here { .. }) {
        return steps;
    }
    // The second pause of a call is `within that call (2)`.
    let call = |step: &&str| step.split(" (").next().unwrap_or_default().to_owned();
    let mut chosen = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let alike = |part: &[&str]| part.iter().filter(|other| call(other) == call(step)).count();
        let (before, all) = (alike(&steps[..index]), alike(&steps));
        let spread = |part: usize| part * (all - 1) / (PAUSES - 1);
        let wanted = if step.starts_with("within") {
            (0..PAUSES).any(|part| spread(part) == before)
        } else {
            let follows = index > 0 && steps[index - 1].starts_with("after");
            !(step.starts_with("before") && follows)
        };
        if wanted {
            chosen.push(*step);
        }
    }
    chosen
}

async fn at(place: Place, change: Change, step: &str) -> Check {
    let scene = Scene::on(place)?;
    let status = child::run(&format!("{change:?}"), &scene, Some(step))?;
    ended_at(step, status)?;
    let checked = check(&scene, change, step).await;
    let ended = scene.end_all().await;
    checked.and(ended)
}

/// It was killed there. How often a call pauses, and a guest is connected to once more, may differ, and then
/// it came to its end; all else is the same each time.
pub(crate) fn ended_at(step: &str, status: ExitStatus) -> Check {
    let killed = status.signal() == Some(9);
    let may_differ = step.starts_with("within") || step.contains("connect (");
    holds!(killed || status.success() && may_differ, "it is killed: {status}");
    Ok(())
}

/// The one who settles what was left open is killed too, at each of its steps.
async fn again_while_settled(place: Place, change: Change) -> Check<Option<String>> {
    if let Some(why) = impossible(&place, change).await? {
        return Ok(Some(why));
    }
    let what = format!("{change:?}");
    let scene = Scene::on(place.another())?;
    child::run(&what, &scene, None)?;
    let steps = fs::read_to_string(scene.dir().join("steps"))?;
    scene.end_all().await?;
    // The effect is there, the record of it is not.
    let last = steps
        .lines()
        .rfind(|step| step.starts_with("before record") && *step != "before record forked");
    let last = last.ok_or("it records nothing")?.to_owned();

    let scene = Scene::on(place.another())?;
    child::run(&what, &scene, Some(&last))?;
    holds!(child::run("reconcile", &scene, None)?.success(), "it is settled");
    let steps = fs::read_to_string(scene.dir().join("steps")).unwrap_or_default();
    scene.end_all().await?;
    let steps = chosen(&place, steps.lines());
    let mut failures = Vec::new();
    for step in &steps {
        let scene = Scene::on(place.another())?;
        child::run(&what, &scene, Some(&last))?;
        child::run("reconcile", &scene, Some(step))?;
        let checked = check(&scene, change, step).await;
        let ended = scene.end_all().await;
        if let Err(failure) = checked.and(ended) {
            failures.push(format!("killed {last}, then {step}: {}", failure.message()));
        }
    }
    println!("{change:?}: killed {last}, and again at {} steps", steps.len());
    if failures.is_empty() { Ok(None) } else { Err(failures.join("\n").into()) }
}

/// What must hold after a kill, whenever it was.
async fn check(scene: &Scene, change: Change, step: &str) -> Check {
    let before = on_disk(scene)?;
    let manager = scene.manager().await?;
    let after = on_disk(scene)?;
    for (file, text) in &before {
        let now = after.iter().find(|(other, _)| other == file).map(|(_, text)| text);
        holds!(now.is_some_and(|now| now.starts_with(text)), "histories only grow: {file}");
    }
    let reached = after_change(scene, &manager, change).await;
    let consistent = scene.is_consistent(&manager).await;
    consistent.and(reached)?;
    let sandbox = usable(scene, &manager, NAME).await?;
    if change == Change::Fork {
        usable(scene, &manager, FORK).await?;
    }
    for snapshot in sandbox.snapshots().await? {
        sandbox.rewind(&snapshot.id, &Suppressed).await?;
        same!(marker(&sandbox).await?, "one");
    }
    // Whoever comes next finds nothing to do.
    let settled = on_disk(scene)?;
    scene.manager().await?;
    holds!(settled == on_disk(scene)?, "it is settled once and for all, after {step}");
    scene.is_consistent(&manager).await
}

/// What a change must have come to.
async fn after_change(scene: &Scene, manager: &SandboxManager, change: Change) -> Check {
    for history in scene.histories(manager).await? {
        let kinds: Vec<String> = history.iter().map(SandboxEvent::name).collect();
        let sandbox = manager.open(history[0].sandbox_id.as_str()).await?;
        let info = sandbox.info().await?;
        let is_fork = info.name.as_ref().is_some_and(|name| name.as_str() == FORK);
        came_to(change, &sandbox, info.state, &kinds, is_fork).await.map_err(|failure| {
            format!("{} ({:?} after {kinds:?})", failure.message(), info.state)
        })?;
    }
    Ok(())
}

async fn came_to(
    change: Change,
    sandbox: &Sandbox,
    state: SandboxState,
    kinds: &[String],
    is_fork: bool,
) -> Check {
    use SandboxState::{Destroyed, Failed, Paused, Ready, Stopped};
    let has = |kind: &str| kinds.iter().any(|other| other == kind);
    if change == Change::Create || is_fork {
        same!(state, if has("ready") { Ready } else { Failed });
        if is_fork && state == Ready {
            same!(marker(sandbox).await?, "one");
        }
        return Ok(());
    }
    let expected = match change {
        Change::Destroy if has("destroying") => Destroyed,
        Change::Stop if has("stop_requested") => Stopped,
        Change::Start if kinds.last().is_some_and(|last| last == "stopped") => Stopped,
        Change::Pause if has("paused") => Paused,
        Change::Resume if !has("resumed") => Paused,
        _ => Ready,
    };
    same!(state, expected);
    match state {
        Stopped => sandbox.start(&Suppressed).await?,
        Paused => sandbox.resume(&Suppressed).await?,
        Destroyed => return Ok(()),
        _ => {}
    }
    let wanted = match change {
        Change::Rewind if !has("rewound") => "two",
        Change::Recreate if kinds.iter().filter(|kind| *kind == "ready").count() > 1 => "none",
        _ => "one",
    };
    same!(marker(sandbox).await?, wanted);
    if change == Change::SnapshotBusy {
        sh(sandbox, ": > ping; until [ -e pong ]; do sleep 0.02; done").await?;
    }
    if matches!(change, Change::Snapshot | Change::SnapshotBusy) && has("snapshot_requested") {
        // It was taken, or the history says why not.
        holds!(has("snapshotted") || has("failed"), "the snapshot has an end");
    }
    Ok(())
}

/// Each history's file, and what is in it.
fn on_disk(scene: &Scene) -> Check<Vec<(String, String)>> {
    let dir = scene.journal_dir().join("history");
    let mut found = Vec::new();
    for name in crate::scene::entries(&dir)? {
        let text = fs::read_to_string(dir.join(&name))?;
        found.push((name, text));
    }
    found.sort();
    Ok(found)
}

async fn four_processes() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let mut children = Vec::new();
    for _ in 0..4 {
        let mut program = child::program("acquire", &scene, None)?;
        children.push(program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
    }
    for child in &mut children {
        drop(child.stdin.take());
    }
    let mut ids = Vec::new();
    for child in children {
        let output = child.wait_with_output()?;
        holds!(output.status.success(), "each gets it: {}", output.status);
        ids.push(String::from_utf8(output.stdout)?.trim().to_owned());
    }
    let manager = scene.manager().await?;
    let infos = manager.list().await?;
    same!(infos.len(), 1);
    holds!(ids.iter().all(|id| *id == infos[0].sandbox_id.to_string()), "one for all: {ids:?}");
    scene.is_consistent(&manager).await?;
    scene.end(manager).await?;
    Ok(None)
}
