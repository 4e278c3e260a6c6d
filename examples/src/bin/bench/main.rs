//! What it costs, beside what it would cost without the SDK, in one run on one machine.
//!
//! Prints a JSON line for each figure:
//! `{"metric": …, "backend": …, "value": …, "unit": …, "peer": …, "peer_value": …, "ratio": …}`, `ratio`
//! being `value / peer_value`. Where a bound was asked for, `asked` and `met` say it. Messages go to stderr.
//! `--quick` takes less than two minutes.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

mod density;
mod memory;
mod report;
mod transfer;

use std::{path::Path, time::Instant};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{Command, CreateSandbox, Sandbox, SandboxManager, Suppressed};
use sandbox_examples::{
    Outcome,
    figures::{percentile, succeed, timed},
};

use crate::report::report;

const SINK: Suppressed = Suppressed;

#[tokio::main]
async fn main() -> Outcome {
    let quick = std::env::args().any(|argument| argument == "--quick");
    // In a task, as in a harness: what runs outside of one is woken by way of another thread.
    tokio::spawn(measure(quick)).await?
}

async fn measure(quick: bool) -> Outcome {
    let state = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let workspace = tempfile::tempdir()?;
    let backend = BwrapBackend::builder().state_dir(state.path().join("bwrap")).build()?;
    let manager =
        SandboxManager::builder().state_dir(state.path()).backend(backend).build().await?;
    let rounds = if quick { 400 } else { 2000 };
    let repeats = if quick { 15 } else { 60 };

    // First: memory that this process has had before is not given back, and would hide what they take.
    density::idle(&manager, workspace.path(), if quick { 50 } else { 200 }).await?;
    round_trips(&manager, workspace.path(), rounds).await?;
    creation(&manager, workspace.path(), repeats).await?;
    snapshots(&manager, workspace.path(), repeats.min(20)).await?;
    rewinds(&manager, workspace.path(), repeats).await?;

    density::concurrent(&manager, workspace.path(), repeats).await?;
    density::shell(&manager, workspace.path(), rounds).await?;
    transfer::stdout(&manager, workspace.path(), if quick { 3 } else { 9 }).await?;
    transfer::tree(&manager, workspace.path(), if quick { 2000 } else { 10_000 }).await?;
    transfer::file(&manager, workspace.path(), if quick { 256 } else { 1024 }).await
}

/// `/bin/true` in a warm sandbox, beside a plain spawn on the host, and bwrap started for each command.
async fn round_trips(manager: &SandboxManager, workspace: &Path, rounds: usize) -> Outcome {
    eprintln!("round trips of /bin/true: {rounds}");
    let sandbox = create(manager, workspace).await?;
    let (mut ours, mut host, mut bwrap) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..rounds + 20 {
        let sdk = timed(sandbox.exec(Command::new("/bin/true"), &SINK)).await?;
        let plain = timed(succeed(tokio::process::Command::new("/bin/true"))).await?;
        // The first ones warm up.
        if n >= 20 {
            ours.push(sdk);
            host.push(plain);
            if n % 4 == 0 {
                bwrap.push(timed(succeed(bare_bwrap())).await?);
            }
        }
    }
    sandbox.destroy(&SINK).await?;
    let spawn = "tokio::process on the host";
    report("exec_round_trip_p50", percentile(&ours, 50), spawn, percentile(&host, 50));
    report("exec_round_trip_p99", percentile(&ours, 99), spawn, percentile(&host, 99));
    let each = "bwrap started for each command";
    report("exec_round_trip_p50", percentile(&ours, 50), each, percentile(&bwrap, 50));
    Ok(())
}

/// From the request to the first answered command, beside a bare `bwrap … true`.
async fn creation(manager: &SandboxManager, workspace: &Path, repeats: usize) -> Outcome {
    eprintln!("creations: {repeats}");
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    settle().await?;
    for _ in 0..repeats {
        let start = Instant::now();
        let sandbox = create(manager, workspace).await?;
        sandbox.exec(Command::new("/bin/true"), &SINK).await?;
        ours.push(start.elapsed());
        sandbox.destroy(&SINK).await?;
        bare.push(timed(succeed(bare_bwrap())).await?);
    }
    let peer = "bwrap … true";
    report("create_to_first_command_p50", percentile(&ours, 50), peer, percentile(&bare, 50));
    Ok(())
}

/// A snapshot of an idle sandbox after a small and after a large change, in turn: as many files each,
/// and the large one in ten times as many too, since taking a mount apart costs the kernel something
/// for each file that was looked at.
async fn snapshots(manager: &SandboxManager, workspace: &Path, repeats: usize) -> Outcome {
    eprintln!("snapshots: {repeats} of each size");
    let (mut small, mut large, mut many) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..repeats {
        for (megabytes, files, times) in
            [(2, 200, &mut small), (200, 200, &mut large), (200, 2000, &mut many)]
        {
            settle().await?;
            let sandbox = create(manager, workspace).await?;
            change(&sandbox, megabytes, files).await?;
            times.push(timed(sandbox.snapshot("", &SINK)).await?);
            sandbox.destroy(&SINK).await?;
        }
    }
    let [small, large, many] = [small, large, many].map(|times| percentile(&times, 50));
    report("snapshot_2mb", small, "snapshot_200mb", large);
    report("snapshot_200mb", large, "snapshot_2mb", small);
    report("snapshot_200mb_2000_files", many, "snapshot_2mb", small);
    Ok(())
}

/// A rewind, beside the creation of a sandbox.
async fn rewinds(manager: &SandboxManager, workspace: &Path, repeats: usize) -> Outcome {
    eprintln!("rewinds: {repeats}");
    let (mut ours, mut creations) = (Vec::new(), Vec::new());
    let sandbox = create(manager, workspace).await?;
    change(&sandbox, 2, 20).await?;
    let snapshot = sandbox.snapshot("", &SINK).await?;
    settle().await?;
    for _ in 0..repeats {
        change(&sandbox, 1, 10).await?;
        ours.push(timed(sandbox.rewind(&snapshot.id, &SINK)).await?);
        let start = Instant::now();
        let other = create(manager, workspace).await?;
        creations.push(start.elapsed());
        other.destroy(&SINK).await?;
    }
    sandbox.destroy(&SINK).await?;
    report("rewind_p50", percentile(&ours, 50), "creation", percentile(&creations, 50));
    Ok(())
}

/// Lets the filesystem finish with what came before: what it still has to write, free and discard of one
/// measurement would be measured in the next.
async fn settle() -> Outcome {
    succeed(tokio::process::Command::new("sync")).await
}

async fn create(manager: &SandboxManager, workspace: &Path) -> Outcome<Sandbox> {
    Ok(manager.create(CreateSandbox::new().workspace(workspace), &SINK).await?)
}

/// Writes so many megabytes in so many files.
async fn change(sandbox: &Sandbox, megabytes: usize, files: usize) -> Outcome {
    let total = megabytes * 1024 * 1024;
    let each = total / files;
    // One process, so that the change is one of files and not of thousands of processes.
    let text = format!("head -c {total} /dev/zero | split -a 4 -b {each} - changed-");
    let run = sandbox.exec(Command::shell(text), &SINK).await?;
    if run.outcome.is_success() { Ok(()) } else { Err(run.stderr.text().into()) }
}

/// A sandbox of one command, as a harness without a warm one would make it.
fn bare_bwrap() -> tokio::process::Command {
    let mut command = tokio::process::Command::new("bwrap");
    command.args([
        "--unshare-all",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "/bin/true",
    ]);
    command
}
