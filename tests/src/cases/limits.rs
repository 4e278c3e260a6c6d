//! Limits of what a sandbox may use.

use std::time::Duration;

use sandbox_core::{Command, Feature, Level, Outcome, ProcessLimits, Suppressed};

use super::cases;
use crate::{Check, Context, context::soon, holds, same};

cases!("limits";
    [LimitPids] there_are_no_more_processes_than_allowed,
    [LimitMemory] there_is_no_more_memory_than_allowed,
    [LimitMemory] what_is_killed_for_memory_is_said_to_be,
    [LimitMemory] kills_for_memory_at_once_are_told_from_others,
    [LimitMemory] a_detached_command_that_is_killed_for_memory_is_said_to_be,
    [LimitCpu] there_is_no_more_cpu_time_than_allowed,
    [] a_command_has_no_more_address_space_than_allowed,
    [] a_command_has_no_more_cpu_time_than_allowed,
    [] a_command_has_no_more_open_files_than_allowed,
    [] a_command_writes_no_larger_file_than_allowed,
    [] a_command_dumps_no_core_unless_allowed,
    [] limits_of_a_command_hold_for_what_it_starts_and_for_nobody_else,
);

async fn there_are_no_more_processes_than_allowed(cx: &Context) -> Check {
    let limited = cx.manager.create(cx.request().pids(64), &cx.sink).await?;
    let free = cx.sandbox().await?;
    let marker = cx.marker();
    let text = format!("i=0; while [ $i -lt 200 ]; do sleep {marker} & i=$((i+1)); done; echo all");
    let command = || Command::shell(&text).timeout(Duration::from_secs(60));
    let run = soon("starting in vain", limited.exec(command(), &Suppressed)).await??;
    // The shell gives up at the first that it cannot start.
    holds!(!run.stdout.text().contains("all"), "not all were started");
    // Whoever looks from inside needs room for it: so the looking is done through files.
    let mut seen = 0;
    for entry in limited.files().list("/proc").await? {
        let number = entry.name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
        seen += usize::from(number);
    }
    holds!(seen > 16 && seen <= 72, "{seen} processes are about 64");
    same!(cx.sh(&free, "cat README").await?, "v1");
    // The control: without a limit the same is done.
    let run = soon("starting all", free.exec(command(), &Suppressed)).await??;
    holds!(run.stdout.text().contains("all"), "all were started: {}", run.stderr.text());
    cx.until_count(&free, &marker, |count| count == 200).await?;
    limited.destroy(&cx.sink).await?;
    Ok(())
}

/// Needs so many bytes of memory in one piece, and uses them.
fn hog(bytes: u64) -> Command {
    let size = format!("bs={bytes}");
    Command::new("dd").args(["if=/dev/zero", "of=/dev/null", "count=1", &size])
}

async fn there_is_no_more_memory_than_allowed(cx: &Context) -> Check {
    let request = cx.request().memory(128 << 20).accept_limits_per_process();
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    let run = cx.run(&sandbox, hog(16 << 20)).await?;
    holds!(run.outcome.is_success(), "16 MiB are there: {:?}", run.outcome);
    let run = cx.run(&sandbox, hog(400 << 20)).await?;
    holds!(!run.outcome.is_success(), "400 MiB are not there: {:?}", run.outcome);
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    let free = cx.sandbox().await?;
    let run = cx.run(&free, hog(400 << 20)).await?;
    holds!(run.outcome.is_success(), "without a limit they are: {:?}", run.outcome);
    Ok(())
}

async fn what_is_killed_for_memory_is_said_to_be(cx: &Context) -> Check {
    if cx.capabilities.level(Feature::LimitMemory) != Level::Full {
        // Then the request for more fails, and nothing is killed; the case before this one sees that.
        return Ok(());
    }
    let sandbox = cx.manager.create(cx.request().memory(64 << 20), &cx.sink).await?;
    for _ in 0..3 {
        let run = cx.run(&sandbox, hog(200 << 20)).await?;
        same!(run.outcome, Outcome::OutOfMemory);
        let run = cx.run(&sandbox, Command::shell("kill -KILL $$")).await?;
        same!(run.outcome, Outcome::Signaled(9));
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn kills_for_memory_at_once_are_told_from_others(cx: &Context) -> Check {
    if cx.capabilities.level(Feature::LimitMemory) != Level::Full {
        return Ok(());
    }
    let sandbox = cx.manager.create(cx.request().memory(96 << 20), &cx.sink).await?;
    let mut hogs = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let sandbox = sandbox.clone();
        hogs.spawn(async move { sandbox.exec(hog(300 << 20), &Suppressed).await });
    }
    while let Some(run) = soon("hogs", hogs.join_next()).await? {
        same!(run??.outcome, Outcome::OutOfMemory);
    }
    // A kill of what a command started is the command's affair, and no later one's.
    let text = "dd if=/dev/zero of=/dev/null count=1 bs=300000000; echo $?; exit 5";
    let run = soon("a shell with a hog", cx.run(&sandbox, Command::shell(text))).await??;
    same!((run.outcome, run.stdout.text().trim_end()), (Outcome::Exited(5), "137"));
    let run = cx.run(&sandbox, Command::shell("kill -KILL $$")).await?;
    same!(run.outcome, Outcome::Signaled(9));
    let command = Command::shell("sleep 60; :").timeout(Duration::from_millis(300));
    same!(soon("a timeout", cx.run(&sandbox, command)).await??.outcome, Outcome::TimedOut);
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_detached_command_that_is_killed_for_memory_is_said_to_be(cx: &Context) -> Check {
    if cx.capabilities.level(Feature::LimitMemory) != Level::Full {
        return Ok(());
    }
    let sandbox = cx.manager.create(cx.request().memory(64 << 20), &cx.sink).await?;
    let process = sandbox.spawn(hog(300 << 20).detached(), &cx.sink).await?;
    let process = sandbox.process(process.id()).await?;
    let end = soon("its end", process.wait(&cx.sink)).await??;
    same!(end.outcome, Outcome::OutOfMemory);
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_command_has_no_more_address_space_than_allowed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let limits = ProcessLimits { address_space: Some(256 << 20), ..ProcessLimits::default() };
    let run = cx.run(&sandbox, hog(16 << 20).limits(limits)).await?;
    holds!(run.outcome.is_success(), "16 MiB are there: {:?}", run.outcome);
    let run = cx.run(&sandbox, hog(400 << 20).limits(limits)).await?;
    holds!(!run.outcome.is_success(), "400 MiB are not there: {:?}", run.outcome);
    let run = cx.run(&sandbox, hog(400 << 20)).await?;
    holds!(run.outcome.is_success(), "without a limit they are: {:?}", run.outcome);
    Ok(())
}

async fn a_command_has_no_more_cpu_time_than_allowed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let limits = ProcessLimits { cpu_seconds: Some(1), ..ProcessLimits::default() };
    let spin = Command::shell("while :; do :; done").limits(limits);
    let run = soon("a command that spins", cx.run(&sandbox, spin)).await??;
    // SIGXCPU: what it was ended for is told.
    same!(run.outcome, Outcome::Signaled(24));
    holds!(run.cpu >= Duration::from_millis(500), "{:?} of CPU time was used", run.cpu);
    // What ignores that is killed.
    let spin = Command::shell("trap '' XCPU; while :; do :; done").limits(limits);
    let run = soon("a command that ignores it", cx.run(&sandbox, spin)).await??;
    same!(run.outcome, Outcome::Signaled(9));
    let run = cx.run(&sandbox, Command::shell("sleep 2").limits(limits)).await?;
    same!(run.outcome, Outcome::Exited(0));
    Ok(())
}

async fn a_command_has_no_more_open_files_than_allowed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "exec 3< README; exec cat run.sh";
    let limited = |files| {
        let limits = ProcessLimits { open_files: Some(files), ..ProcessLimits::default() };
        Command::shell(text).limits(limits)
    };
    same!(cx.run(&sandbox, limited(16)).await?.outcome, Outcome::Exited(0));
    // The three that every process has, and the one that is held open.
    let run = cx.run(&sandbox, limited(4)).await?;
    holds!(!run.outcome.is_success(), "{:?} is no success", run.outcome);
    let limits = ProcessLimits { open_files: Some(77), ..ProcessLimits::default() };
    let run = cx.run(&sandbox, Command::shell("ulimit -n").limits(limits)).await?;
    same!(run.stdout.text(), "77\n");
    Ok(())
}

async fn a_command_writes_no_larger_file_than_allowed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let limits = ProcessLimits { file_size: Some(1 << 20), ..ProcessLimits::default() };
    let write = |file: &str, size: u32| {
        let text = format!("exec head -c {size} /dev/zero > {file}");
        Command::shell(text).limits(limits)
    };
    same!(cx.run(&sandbox, write("small", 1 << 20)).await?.outcome, Outcome::Exited(0));
    // SIGXFSZ.
    same!(cx.run(&sandbox, write("large", 3 << 20)).await?.outcome, Outcome::Signaled(25));
    same!(sandbox.files().metadata("large").await?.size, 1 << 20);
    Ok(())
}

async fn a_command_dumps_no_core_unless_allowed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    same!(cx.sh(&sandbox, "ulimit -c").await?, "0");
    let limits = ProcessLimits { core_size: Some(0), ..ProcessLimits::default() };
    let run = cx.run(&sandbox, Command::shell("ulimit -c").limits(limits)).await?;
    same!(run.stdout.text(), "0\n");
    Ok(())
}

async fn limits_of_a_command_hold_for_what_it_starts_and_for_nobody_else(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let limits = ProcessLimits { open_files: Some(33), ..ProcessLimits::default() };
    let text = "sh -c 'ulimit -n'; ulimit -n 1000 2> /dev/null || echo kept";
    let run = cx.run(&sandbox, Command::shell(text).limits(limits)).await?;
    same!(run.stdout.text(), "33\nkept\n");
    let run = cx.run(&sandbox, Command::shell("ulimit -n")).await?;
    holds!(run.stdout.text() != "33\n", "nobody else has it");
    Ok(())
}

async fn there_is_no_more_cpu_time_than_allowed(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().cpu_millis(200), &cx.sink).await?;
    // A fixed piece of work, first as fast as it goes and then with others beside it.
    let text = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
    let run = cx.run(&sandbox, Command::shell(text)).await?;
    let share = run.cpu.as_secs_f64() / run.duration.as_secs_f64();
    holds!(share < 0.6, "a share of {share} is about 0.2");
    let beside = Command::shell(format!("({text}) & ({text}) & wait"));
    let run = cx.run(&sandbox, beside).await?;
    let share = run.cpu.as_secs_f64() / run.duration.as_secs_f64();
    holds!(run.outcome.is_success() && share < 0.6, "two of them have {share} together");
    Ok(())
}
