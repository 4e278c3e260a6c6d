//! Many at once.

use std::{path::Path, time::Instant};

use sandbox_core::{Command, Reachability, Sandbox, SandboxManager, ShellOptions};
use sandbox_examples::{
    Outcome,
    figures::{percentile, succeed, timed},
};
use tokio::task::JoinSet;

use crate::{
    SINK, create, memory,
    report::{report, report_plain},
};

const AT_ONCE: usize = 32;

/// 32 commands at once in one sandbox, beside 32 spawns at once on the host: until all have ended.
pub(crate) async fn concurrent(
    manager: &SandboxManager,
    workspace: &Path,
    rounds: usize,
) -> Outcome {
    eprintln!("{AT_ONCE} commands at once: {rounds} rounds");
    let sandbox = create(manager, workspace).await?;
    let (mut ours, mut host) = (Vec::new(), Vec::new());
    for round in 0..rounds + 2 {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..AT_ONCE {
            let sandbox = sandbox.clone();
            tasks.spawn(async move { sandbox.exec(Command::new("/bin/true"), &SINK).await });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        let sdk = start.elapsed();
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..AT_ONCE {
            tasks.spawn(succeed(tokio::process::Command::new("/bin/true")));
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        // The first ones warm up.
        if round >= 2 {
            ours.push(sdk);
            host.push(start.elapsed());
        }
    }
    sandbox.destroy(&SINK).await?;
    let peer = "tokio::process on the host, as many at once";
    report("32_commands_at_once_p50", percentile(&ours, 50), peer, percentile(&host, 50));
    Ok(())
}

/// A built-in command in a shell session, beside a process of its own in the same sandbox.
pub(crate) async fn shell(manager: &SandboxManager, workspace: &Path, rounds: usize) -> Outcome {
    eprintln!("commands in a shell session: {rounds}");
    let sandbox = create(manager, workspace).await?;
    let shell = sandbox.shell(ShellOptions::new(), &SINK).await?;
    let (mut ours, mut exec) = (Vec::new(), Vec::new());
    for n in 0..rounds + 20 {
        let session = timed(shell.run("true", &SINK)).await?;
        let process = timed(sandbox.exec(Command::shell("true"), &SINK)).await?;
        if n >= 20 {
            ours.push(session);
            exec.push(process);
        }
    }
    drop(shell);
    sandbox.destroy(&SINK).await?;
    let peer = "exec of sh -c";
    report("shell_round_trip_p50", percentile(&ours, 50), peer, percentile(&exec, 50));
    Ok(())
}

/// What sandboxes take in memory that do nothing.
pub(crate) async fn idle(manager: &SandboxManager, workspace: &Path, count: usize) -> Outcome {
    eprintln!("idle sandboxes: {count}");
    // What the first one takes the others share.
    let first = create(manager, workspace).await?;
    first.exec(Command::new("/bin/true"), &SINK).await?;
    let before = memory::own();
    let mut sandboxes: Vec<Sandbox> = Vec::new();
    for _ in 0..count {
        let sandbox = create(manager, workspace).await?;
        sandbox.exec(Command::new("/bin/true"), &SINK).await?;
        sandboxes.push(sandbox);
    }
    let harness = memory::own().saturating_sub(before);
    let (mut guests, mut helpers, mut kind) = (0, 0, "PSS");
    for sandbox in &sandboxes {
        let Reachability::Local(local) = sandbox.reachability().await? else { continue };
        let (share, how) = memory::share(local.pid);
        guests += share;
        kind = how;
        // Whatever the backend leaves running beside the guest.
        let mut pid = local.pid;
        while let Some(parent) = memory::parent(pid).filter(|parent| *parent > 1) {
            if memory::name(parent) != "bwrap" {
                break;
            }
            helpers += memory::share(parent).0;
            pid = parent;
        }
    }
    let each = |bytes: u64| bytes as f64 / 1000.0 / count as f64;
    let of = |what: &str| format!("{what}, of {count} idle sandboxes");
    report_plain("idle_guest_memory", each(guests), "kB", &of(kind));
    report_plain("idle_bwrap_memory", each(helpers), "kB", &of(kind));
    report_plain("idle_harness_memory", each(harness), "kB", &of("growth of the RSS"));
    sandboxes.push(first);
    for sandbox in sandboxes {
        sandbox.destroy(&SINK).await?;
    }
    Ok(())
}
