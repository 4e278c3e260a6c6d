//! What a process of its own does: a change, up to a step; or one of several at once.

use std::{
    path::PathBuf,
    process::{Command as Program, ExitCode, ExitStatus},
};

use sandbox_conformance::Check;
use sandbox_core::{Command, SandboxManager, SnapshotId, Suppressed};

use crate::{
    place::Place,
    scene::{NAME, Scene, mark, sh},
    steps::{Plan, Steps},
};

const WHAT: &str = "SANDBOX_FAULTS_WHAT";
const DIR: &str = "SANDBOX_FAULTS_DIR";
const STEP: &str = "SANDBOX_FAULTS_STEP";

/// The name of the fork.
pub(crate) const FORK: &str = "fork";

/// A change of a sandbox's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Create,
    Snapshot,
    SnapshotBusy,
    DeleteSnapshot,
    Rewind,
    Fork,
    Destroy,
    Stop,
    Start,
    Recreate,
    Pause,
    Resume,
}

/// All of them.
pub(crate) const CHANGES: &[Change] = &[
    Change::Create,
    Change::Snapshot,
    Change::SnapshotBusy,
    Change::DeleteSnapshot,
    Change::Rewind,
    Change::Fork,
    Change::Destroy,
    Change::Stop,
    Change::Start,
    Change::Recreate,
    Change::Pause,
    Change::Resume,
];

impl Change {
    /// What must be there first. The marker says `one` in snapshots; `two` was written after a snapshot.
    pub(crate) async fn prepare(self, scene: &Scene, manager: &SandboxManager) -> Check {
        if self == Self::Create {
            return Ok(());
        }
        let sandbox = manager.acquire(NAME, scene.request(), &Suppressed).await?;
        mark(&sandbox, "one").await?;
        match self {
            Self::SnapshotBusy => {
                // Answers for as long as it lives and is not held up.
                let loops = "while :; do if [ -e ping ]; then rm ping; echo > pong; fi; \
                             sleep 0.02; done";
                sh(&sandbox, &format!("({loops}) >/dev/null 2>&1 </dev/null &")).await?;
            }
            Self::Rewind | Self::Fork | Self::Destroy => {
                sandbox.snapshot("a", &Suppressed).await?;
                if self == Self::Rewind {
                    mark(&sandbox, "two").await?;
                }
            }
            Self::DeleteSnapshot => {
                sandbox.snapshot("a", &Suppressed).await?;
                sandbox.snapshot("b", &Suppressed).await?;
            }
            Self::Start => sandbox.stop(&Suppressed).await?,
            Self::Resume => sandbox.pause(&Suppressed).await?,
            _ => {}
        }
        Ok(())
    }

    /// Makes the change.
    pub(crate) async fn make(self, scene: &Scene, manager: &SandboxManager) -> Check {
        let sink = &Suppressed;
        if self == Self::Create {
            manager.acquire(NAME, scene.request(), sink).await?;
            return Ok(());
        }
        let sandbox = manager.open(NAME).await?;
        let snapshots = sandbox.snapshots().await?;
        let first = snapshots.first().map_or_else(SnapshotId::new, |first| first.id.clone());
        match self {
            Self::Create => {}
            Self::Snapshot | Self::SnapshotBusy => {
                sandbox.snapshot("taken", sink).await?;
            }
            Self::DeleteSnapshot => sandbox.delete_snapshot(&first, sink).await?,
            Self::Rewind => sandbox.rewind(&first, sink).await?,
            Self::Fork => {
                manager.fork(&first, Some(FORK), sink).await?;
            }
            Self::Destroy => sandbox.destroy(sink).await?,
            Self::Stop => sandbox.stop(sink).await?,
            Self::Start => sandbox.start(sink).await?,
            Self::Recreate => sandbox.recreate(sink).await?,
            Self::Pause => sandbox.pause(sink).await?,
            Self::Resume => sandbox.resume(sink).await?,
        }
        Ok(())
    }

    fn named(name: &str) -> Option<Self> {
        CHANGES.iter().copied().find(|change| format!("{change:?}") == name)
    }
}

/// What this process was started for, if it is not the test itself.
pub(crate) fn from_environment() -> Option<ExitCode> {
    let what = std::env::var(WHAT).ok()?;
    let dir = PathBuf::from(std::env::var_os(DIR)?);
    let scene = Scene::of(&dir, Place::told()?);
    let runtime = tokio::runtime::Runtime::new().ok()?;
    let done = runtime.block_on(async {
        match what.as_str() {
            "acquire" => acquire(&scene).await,
            "attach" => attach(&scene).await,
            "disk" => crate::disk::on_a_small_disk(&scene).await,
            "reconcile" => reconcile(&scene).await,
            change => make(&scene, change).await,
        }
    });
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{}", failure.message());
            ExitCode::FAILURE
        }
    })
}

fn steps(scene: &Scene) -> std::sync::Arc<Steps> {
    Steps::new(match std::env::var(STEP) {
        Ok(step) => Plan::Kill(step),
        Err(_) => Plan::Record(scene.dir().join("steps")),
    })
}

async fn make(scene: &Scene, change: &str) -> Check {
    let change = Change::named(change).ok_or("no such change")?;
    let steps = steps(scene);
    let manager = scene.stepped_manager(&steps).await?;
    change.prepare(scene, &manager).await?;
    steps.arm();
    change.make(scene, &manager).await?;
    steps.disarm();
    Ok(())
}

/// Brings the guest into somebody's container.
async fn attach(scene: &Scene) -> Check {
    let steps = steps(scene);
    let manager = scene.stepped_manager(&steps).await?;
    steps.arm();
    crate::attached::attach(scene, &manager).await?;
    steps.disarm();
    Ok(())
}

/// Settles what another process left open.
async fn reconcile(scene: &Scene) -> Check {
    let steps = steps(scene);
    steps.arm();
    scene.stepped_manager(&steps).await?;
    steps.disarm();
    Ok(())
}

/// Takes part in a race for a name; says which sandbox it got.
async fn acquire(scene: &Scene) -> Check {
    let manager = scene.manager().await?;
    // All begin when this pipe is closed.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    let sandbox = manager.acquire(NAME, scene.request(), &Suppressed).await?;
    let run = sandbox.exec(Command::new("/bin/true"), &Suppressed).await?;
    if !run.outcome.is_success() {
        return Err(format!("/bin/true ended as {:?}", run.outcome).into());
    }
    println!("{}", sandbox.id());
    Ok(())
}

/// This program, to do this on a scene.
pub(crate) fn program(what: &str, scene: &Scene, step: Option<&str>) -> Check<Program> {
    let mut program = Program::new(std::env::current_exe()?);
    environment(&mut program, what, scene);
    if let Some(step) = step {
        program.env(STEP, step);
    }
    Ok(program)
}

/// Says what the program is to do.
pub(crate) fn environment(program: &mut Program, what: &str, scene: &Scene) {
    program.env(WHAT, what).env(DIR, scene.dir()).env_remove(STEP);
    scene.place().tell(program);
}

/// Runs it up to a step, or to its end; returns how it ended.
pub(crate) fn run(what: &str, scene: &Scene, step: Option<&str>) -> Check<ExitStatus> {
    Ok(program(what, scene, step)?.status()?)
}
