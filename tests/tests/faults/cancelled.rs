//! The future of a change is dropped: after so many looks at it, or while a step of it is held up.

use std::{fs, future::poll_fn, task::Poll};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, Failure, holds, same};
use sandbox_core::{
    Command, Known, Outcome, ReapPolicy, Sandbox, SandboxEvent, SandboxId, SandboxManager,
    SandboxState, SinkError, Suppressed, TurnEventSink, TurnId,
};
use tokio::sync::Notify;

use crate::{
    child::{self, CHANGES, Change, FORK},
    killed::impossible,
    place::Place,
    scene::{NAME, SOON, Scene, marker, sh, usable},
    steps::{Plan, Steps},
    trial,
};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for change in CHANGES {
        let name = format!("cancelled::{change:?}_after_each_look");
        trials.push(trial(name, move || after_each_look(*change)));
        let name = format!("cancelled::{change:?}_at_each_step");
        trials.push(trial(name, move || at_each_step(*change)));
    }
    trials.push(trial("cancelled::creation_without_a_name_at_each_step", nameless_at_each_step));
    trials.push(trial("cancelled::a_command_after_each_look", a_command_after_each_look));
    trials.push(trial(
        "cancelled::a_command_while_its_sink_is_told",
        a_command_while_its_sink_is_told,
    ));
    trials
}

/// Looks at a future so many times and drops it; `None` if it was not ready by then.
async fn looked_at<F: Future>(times: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = times;
    poll_fn(move |context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn after_each_look(change: Change) -> Check<Option<String>> {
    if let Some(why) = impossible(&Place::here(), change).await? {
        return Ok(Some(why));
    }
    for times in 1.. {
        let scene = Scene::new()?;
        let manager = scene.manager().await?;
        change.prepare(&scene, &manager).await?;
        let made = looked_at(times, change.make(&scene, &manager)).await;
        let completed = made.is_some();
        let checked = match made {
            Some(Err(failure)) => Err(failure),
            _ => check(&scene, &manager, change, completed).await,
        };
        let ended = scene.end(manager).await;
        checked.and(ended).map_err(|failure| {
            Failure::from(format!("dropped after {times} looks: {}", failure.message()))
        })?;
        if completed {
            break;
        }
    }
    Ok(None)
}

async fn at_each_step(change: Change) -> Check<Option<String>> {
    if let Some(why) = impossible(&Place::here(), change).await? {
        return Ok(Some(why));
    }
    let scene = Scene::new()?;
    child::run(&format!("{change:?}"), &scene, None)?;
    let steps = fs::read_to_string(scene.dir().join("steps"))?;
    scene.end_all().await?;
    let mut failures = Vec::new();
    for step in steps.lines().filter(|step| !step.starts_with("within")) {
        let scene = Scene::new()?;
        let held = Steps::new(Plan::Hold(step.to_owned()));
        let manager = scene.stepped_manager(&held).await?;
        change.prepare(&scene, &manager).await?;
        held.arm();
        let dropped = drop_at(&held, change.make(&scene, &manager)).await;
        let checked = match dropped {
            Ok(completed) => check(&scene, &manager, change, completed).await,
            Err(failure) => Err(failure),
        };
        let ended = scene.end(manager).await;
        if let Err(failure) = checked.and(ended) {
            failures.push(format!("dropped {step}: {}", failure.message()));
        }
    }
    if failures.is_empty() { Ok(None) } else { Err(failures.join("\n").into()) }
}

/// Drops the future when the step is reached, and lets the step go on; says whether it was ready before.
async fn drop_at<T>(held: &Steps, future: impl Future<Output = Check<T>>) -> Check<bool> {
    let completed = tokio::select! {
        done = future => done.map(|_| true)?,
        () = held.reached() => false,
    };
    held.disarm();
    held.go_on();
    Ok(completed)
}

/// What must hold once the work has ended that went on without its caller.
async fn check(scene: &Scene, manager: &SandboxManager, change: Change, completed: bool) -> Check {
    quiet(scene, manager).await?;
    scene.is_consistent(manager).await?;
    for history in scene.histories(manager).await? {
        let last = history.iter().rev().find_map(SandboxEvent::known);
        let cancelled =
            matches!(last, Some(Known::Failed { operation, .. }) if operation == "create");
        let fork = matches!(history[0].known(), Some(Known::Requested { from: Some(_), .. }));
        if completed && (change == Change::Create || fork) {
            holds!(!cancelled, "what was returned is there");
        }
    }
    let sandbox = usable(scene, manager, NAME).await?;
    match change {
        Change::Create => {}
        Change::Destroy => is_one_of(&sandbox, &["one", "none"]).await?,
        Change::Rewind => is_one_of(&sandbox, &["one", "two"]).await?,
        Change::Recreate => is_one_of(&sandbox, &["one", "none"]).await?,
        _ => same!(marker(&sandbox).await?, "one"),
    }
    match change {
        Change::SnapshotBusy => {
            sh(&sandbox, ": > ping; until [ -e pong ]; do sleep 0.02; done").await?;
        }
        Change::Fork => {
            usable(scene, manager, FORK).await?;
        }
        _ => {}
    }
    Ok(())
}

async fn is_one_of(sandbox: &Sandbox, allowed: &[&str]) -> Check {
    let found = marker(sandbox).await?;
    holds!(allowed.contains(&found.as_str()), "{found} is one of {allowed:?}");
    Ok(())
}

/// Waits until nobody is at work on a sandbox any more: each lock is free, and each history still.
async fn quiet(scene: &Scene, manager: &SandboxManager) -> Check {
    let deadline = tokio::time::Instant::now() + SOON;
    // The work that goes on without its caller begins with its lock.
    tokio::task::yield_now().await;
    loop {
        let before = scene.histories(manager).await?;
        let busy = scene.is_busy()?;
        let infos = manager.list().await?;
        let between = |state| {
            matches!(
                state,
                SandboxState::Requested | SandboxState::Provisioning | SandboxState::Destroying
            )
        };
        let open = infos.iter().any(|info| between(info.state));
        if !busy && !open && before == scene.histories(manager).await? {
            break;
        }
        if tokio::time::Instant::now() > deadline {
            return Err("the work on it does not end".into());
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // What was paused goes on, so that it can be looked at.
    for info in manager.list().await? {
        if info.state == SandboxState::Paused {
            manager.open(info.sandbox_id.as_str()).await?.resume(&Suppressed).await?;
        }
    }
    Ok(())
}

/// Nobody can find a sandbox without a name whose creation was taken back: nothing of it may stay.
async fn nameless_at_each_step() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let recorded = Steps::new(Plan::Record(scene.dir().join("steps")));
    let manager = scene.stepped_manager(&recorded).await?;
    recorded.arm();
    manager.create(scene.request(), &Suppressed).await?;
    recorded.disarm();
    let steps = fs::read_to_string(scene.dir().join("steps"))?;
    scene.end(manager).await?;
    let mut failures = Vec::new();
    for step in steps.lines().filter(|step| !step.starts_with("within")) {
        let scene = Scene::new()?;
        let held = Steps::new(Plan::Hold(step.to_owned()));
        let manager = scene.stepped_manager(&held).await?;
        held.arm();
        let create = async { Ok(manager.create(scene.request(), &Suppressed).await?) };
        let completed = drop_at(&held, create).await?;
        let checked = async {
            holds!(!completed, "it was dropped before its end");
            quiet(&scene, &manager).await?;
            let gone = until_none_is_live(&manager).await;
            let [history] = &scene.histories(&manager).await?[..] else {
                return Err("it has one history".into());
            };
            let kinds: Vec<String> = history.iter().map(SandboxEvent::name).collect();
            gone.map_err(|failure| format!("{}: {kinds:?}", failure.message()))?;
            let last = kinds.last().map(String::as_str);
            holds!(matches!(last, Some("failed" | "destroyed")), "the end is told: {kinds:?}");
            same!(manager.reap(ReapPolicy::default(), &Suppressed).await?.len(), 0);
            scene.is_consistent(&manager).await
        };
        let checked = checked.await;
        let ended = scene.end(manager).await;
        if let Err(failure) = checked.and(ended) {
            failures.push(format!("dropped {step}: {}", failure.message()));
        }
    }
    if failures.is_empty() { Ok(None) } else { Err(failures.join("\n").into()) }
}

async fn until_none_is_live(manager: &SandboxManager) -> Check {
    let deadline = tokio::time::Instant::now() + SOON / 3;
    while !manager.list().await?.is_empty() {
        if tokio::time::Instant::now() > deadline {
            return Err("a sandbox is left that nobody has a handle to".into());
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    Ok(())
}

/// What was begun has an end in the history, and nothing of its tree is left.
async fn a_command_after_each_look() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let manager = scene.manager().await?;
    let sandbox = manager.acquire(NAME, scene.request(), &Suppressed).await?;
    let count = "ls -d /proc/[0-9]*/ | wc -l";
    let idle = sh(&sandbox, count).await?;
    for times in 1.. {
        let known = manager.history(sandbox.id(), 0).await?.len() as u64;
        // Its child detaches itself.
        let command =
            Command::shell("setsid sleep 86400 & sleep 0.02; echo 1; sleep 0.02; kill $!");
        let done = looked_at(times, sandbox.exec(command, &Suppressed)).await;
        let history = until_ended(&manager, sandbox.id(), known).await?;
        let outcome = history.iter().rev().find_map(|event| match event.known() {
            Some(Known::ProcessExited { outcome, .. }) => Some(outcome.clone()),
            _ => None,
        });
        match (&done, outcome) {
            (Some(run), _) => holds!(run.is_ok(), "it ends by itself: {run:?}"),
            (None, None) => holds!(history.is_empty(), "nothing was begun"),
            (None, Some(outcome)) => same!(outcome, Some(Outcome::Cancelled)),
        }
        let deadline = tokio::time::Instant::now() + SOON;
        while sh(&sandbox, count).await? != idle {
            holds!(tokio::time::Instant::now() < deadline, "its tree is gone after {times} looks");
        }
        if done.is_some() {
            break;
        }
    }
    scene.end(manager).await?;
    Ok(None)
}

/// A sink that takes its time.
#[derive(Debug)]
struct Waits(Notify);

#[async_trait::async_trait]
impl TurnEventSink for Waits {
    fn turn(&self) -> Option<TurnId> {
        None
    }

    async fn emit(&self, _: &SandboxEvent) -> Result<(), SinkError> {
        self.0.notify_one();
        std::future::pending().await
    }
}

/// The command was recorded, its sink is being told of it, and then nobody waits any more.
async fn a_command_while_its_sink_is_told() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let manager = scene.manager().await?;
    let sandbox = manager.acquire(NAME, scene.request(), &Suppressed).await?;
    let known = manager.history(sandbox.id(), 0).await?.len() as u64;
    let sink = Waits(Notify::new());
    tokio::select! {
        _ = sandbox.exec(Command::new("/bin/true"), &sink) => return Err("it has an end".into()),
        () = sink.0.notified() => {}
    }
    let history = until_ended(&manager, sandbox.id(), known).await?;
    same!(history.iter().map(SandboxEvent::name).collect::<Vec<_>>(), PROCESS);
    scene.end(manager).await?;
    Ok(None)
}

const PROCESS: &[&str] = &["process_started", "process_exited"];

/// The history after a place, when each process in it has ended.
async fn until_ended(
    manager: &SandboxManager,
    id: &SandboxId,
    known: u64,
) -> Check<Vec<SandboxEvent>> {
    let deadline = tokio::time::Instant::now() + SOON / 3;
    loop {
        let history = manager.history(id, known).await?;
        let of = |kind: &str| history.iter().filter(|event| event.name() == kind).count();
        if of(PROCESS[0]) == of(PROCESS[1]) {
            return Ok(history);
        }
        holds!(tokio::time::Instant::now() < deadline, "what was begun is told to have ended");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
