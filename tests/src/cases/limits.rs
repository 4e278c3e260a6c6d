//! Limits of what a sandbox may use.

use std::time::Duration;

use sandbox_core::{Command, Feature, Level, Outcome, Suppressed};

use super::cases;
use crate::{Check, Context, context::soon, holds, same};

cases!("limits";
    [LimitPids] there_are_no_more_processes_than_allowed,
    [LimitMemory] there_is_no_more_memory_than_allowed,
    [LimitMemory] what_is_killed_for_memory_is_said_to_be,
    [LimitCpu] there_is_no_more_cpu_time_than_allowed,
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
