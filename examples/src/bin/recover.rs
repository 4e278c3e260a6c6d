//! A harness is killed, and another takes over what it had running.
//!
//! The first harness is a process of its own: it makes a sandbox, starts a command that goes on by itself,
//! and is killed without warning. The second one opens the same state directory, finds the sandbox and the
//! process by what the history says, reads all of its output, the part from before the crash too, and waits
//! for its end.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::{
    path::PathBuf,
    process::{ExitCode, Stdio},
    time::Duration,
};

use sandbox_core::{
    Command, Known, Outcome as End, OutputStream, ProcessId, SandboxManager, Suppressed,
};
use sandbox_examples::{
    Outcome, check, conclude,
    scene::{Scene, manager, printed_turn},
};
use tokio::io::{AsyncBufReadExt, BufReader};

/// How this program is told that it is the harness that will be killed.
const FIRST: &str = "the-harness-that-is-killed";

/// Says something, waits until it is told to go on, says more, and ends with a code of its own.
const WORK: &str = "echo begun; while [ ! -e go-on ]; do sleep 0.05; done; echo finished; exit 42";

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let done = match (arguments.next().as_deref(), arguments.next()) {
        (Some(FIRST), Some(state)) => first(state.into()).await,
        _ => Scene::tell(story).await,
    };
    conclude(done)
}

/// The first harness: begins something and never comes to its end.
async fn first(state: PathBuf) -> Outcome {
    let manager = manager(&state).await?;
    let sandbox = manager.open("main").await?;
    let (sink, _printer) = printed_turn("first");
    let process = sandbox.spawn(Command::shell(WORK).detached(), &sink).await?;
    println!("started {}", process.id());
    std::future::pending().await
}

async fn story(scene: &Scene) -> Outcome {
    let sandbox = scene.manager.acquire("main", scene.request("recover"), &Suppressed).await?;

    println!("▸ the first harness starts a command, and is killed");
    let mut child = tokio::process::Command::new(std::env::current_exe()?)
        .args([FIRST.into(), scene.state_dir()])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let out = child.stdout.take().ok_or("it has no output")?;
    let mut lines = BufReader::new(out).lines();
    let told = loop {
        let line = tokio::time::timeout(Duration::from_secs(60), lines.next_line()).await??;
        let line = line.ok_or("it ended by itself")?;
        println!("  {line}");
        if let Some(id) = line.strip_prefix("started ") {
            break id.parse::<ProcessId>()?;
        }
    };
    child.kill().await?;
    println!("  killed");

    println!("\n▸ the second harness finds what it left");
    let second = manager(&scene.state_dir()).await?;
    let sandbox = second.open(sandbox.id().as_str()).await?;
    let running = started(&second, &sandbox).await?;
    check(running.as_slice() == [told], "the history names the process that has not ended")?;
    let process = sandbox.process(&running[0]).await?;
    // What it says comes when it comes.
    let mut output = process.follow(0, 0).await?;
    let mut said = Vec::new();
    while !said.ends_with(b"begun\n") {
        let piece = tokio::time::timeout(Duration::from_secs(60), output.next()).await??;
        said.extend(piece.ok_or("it ended too early")?.bytes);
    }
    check(said == b"begun\n", "what it said before the crash is there")?;

    println!("\n▸ and brings it to its end");
    let (sink, printer) = printed_turn("second");
    sandbox.files().write("go-on", "", &sink).await?;
    let end = tokio::time::timeout(Duration::from_secs(60), process.wait(&sink)).await??;
    drop(sink);
    printer.await?;
    check(end.outcome == End::Exited(42), "its exit code is its own")?;
    let whole = process.read(OutputStream::Stdout, 0, 1024).await?;
    check(whole.bytes == b"begun\nfinished\n", "every byte of its output is there")?;
    check(started(&second, &sandbox).await?.is_empty(), "the history has its end")?;
    Ok(())
}

/// The processes that go on by themselves and have not ended, as the history says.
async fn started(
    manager: &SandboxManager,
    sandbox: &sandbox_core::Sandbox,
) -> Outcome<Vec<ProcessId>> {
    let mut running = Vec::new();
    for event in manager.history(sandbox.id(), 0).await? {
        match event.known() {
            Some(Known::ProcessStarted { process, detached: true, .. }) => {
                running.push(process.clone());
            }
            Some(Known::ProcessExited { process, .. }) => running.retain(|known| known != process),
            _ => {}
        }
    }
    Ok(running)
}
