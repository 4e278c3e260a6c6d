//! What a sandbox uses, and how long it has been idle.

use std::time::{Duration, Instant};

use sandbox_core::{Command, ErrorKind, Feature, Level, Network, Sandbox, Stats, Suppressed};

use super::cases;
use crate::{
    Check, Context,
    context::{SOON, error_of, pause, soon},
    holds, same,
};

cases!("stats";
    [] cpu_time_grows_with_work_and_never_goes_back,
    [] memory_that_a_process_holds_is_seen,
    [LimitMemory] a_limit_of_memory_is_told,
    [] processes_are_counted_as_long_as_they_run,
    [LimitPids] a_limit_of_processes_is_told,
    [] what_is_written_is_counted_where_that_is_known,
    [] the_loopback_is_no_network,
    [] idle_time_grows_until_something_is_done,
    [] looking_is_no_use_of_a_sandbox,
    [Stop] only_what_runs_has_figures,
);

const MEGABYTE: u64 = 1024 * 1024;

/// Waits until the figures are as they must be.
async fn until(sandbox: &Sandbox, what: &str, wanted: impl Fn(&Stats) -> bool) -> Check<Stats> {
    let deadline = Instant::now() + SOON;
    loop {
        let stats = soon("the figures", sandbox.stats()).await??;
        if wanted(&stats) {
            return Ok(stats);
        }
        if Instant::now() > deadline {
            return Err(format!("not so: {what}; the figures are {stats:?}").into());
        }
        pause().await;
    }
}

async fn cpu_time_grows_with_work_and_never_goes_back(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let cpu = async || -> Check<Duration> {
        Ok(sandbox.stats().await?.usage.cpu.ok_or("the guest tells the CPU time")?)
    };
    let begin = cpu().await?;
    // Of a process that runs, of one that was waited for, and of one that nobody of it waits for.
    let work = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
    let text = format!("{work}; ({work}); ({work}) & read x");
    let process = sandbox.spawn(Command::shell(text).stdin_piped(), &cx.sink).await?;
    let mut last = begin;
    let deadline = Instant::now() + SOON;
    while last < begin + Duration::from_millis(20) {
        let now = cpu().await?;
        holds!(now >= last, "{now:?} is no less than {last:?}");
        last = now;
        holds!(Instant::now() < deadline, "some CPU time was used: {begin:?} … {last:?}");
    }
    let run = soon("the work", process.wait(&sandbox, &cx.sink)).await??;
    holds!(run.outcome.code().is_some(), "{:?} is an exit", run.outcome);
    // What has ended still counts; and what counts is not some other machine's time.
    let end = until(&sandbox, "nothing runs any more", |now| now.usage.pids == Some(0)).await?;
    let used = end.usage.cpu.ok_or("the guest tells the CPU time")?;
    holds!(used >= last, "{used:?} is no less than {last:?}");
    let most = begin + run.duration * 64 + Duration::from_secs(60);
    holds!(used < most, "{used:?} is less than {most:?}");
    Ok(())
}

async fn memory_that_a_process_holds_is_seen(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let memory = |stats: &Stats| stats.usage.memory.unwrap_or(0);
    let before =
        memory(&until(&sandbox, "memory is told", |now| now.usage.memory.is_some()).await?);
    holds!(before < 30 * MEGABYTE, "{before} is little");
    // It keeps as much as it may have to say at the end of its input.
    let hold = Command::new("tail").args(["-c", "52428800"]).stdin_piped();
    let mut process = sandbox.spawn(hold, &cx.sink).await?;
    let megabyte = vec![b'x'; MEGABYTE as usize];
    for _ in 0..60 {
        soon("writing", process.write_stdin(&megabyte)).await??;
    }
    let held = before + 40 * MEGABYTE;
    let full = until(&sandbox, "50 MB are held", |now| memory(now) > held).await?;
    holds!(memory(&full) < 400 * MEGABYTE, "{full:?} is no more than that, by and large");
    drop(process);
    until(&sandbox, "they are let go of", |now| memory(now) < before + 20 * MEGABYTE).await?;
    Ok(())
}

async fn a_limit_of_memory_is_told(cx: &Context) -> Check {
    let free = cx.sandbox().await?;
    same!(free.stats().await?.usage.memory_limit, None);
    let limit = 256 * MEGABYTE;
    let request = cx.request().memory(limit).accept_limits_per_process();
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    cx.sh(&sandbox, "cat README").await?;
    let usage = sandbox.stats().await?.usage;
    if cx.capabilities.level(Feature::LimitMemory) == Level::Full {
        same!(usage.memory_limit, Some(limit));
        let peak = usage.memory_peak.unwrap_or(1);
        holds!(peak > 0 && peak <= limit, "{peak} is a peak within {limit}");
    } else {
        // Of each process is not of all.
        same!(usage.memory_limit, None);
    }
    Ok(())
}

async fn processes_are_counted_as_long_as_they_run(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let pids = |stats: &Stats| stats.usage.pids.unwrap_or(0);
    until(&sandbox, "nothing runs", |now| now.usage.pids == Some(0)).await?;
    let marker = cx.marker();
    let sleepers = format!("sleep {marker} & sleep {marker} & setsid sleep {marker} & wait");
    let process = sandbox.spawn(Command::shell(sleepers), &cx.sink).await?;
    until(&sandbox, "a shell and three sleepers run", |now| pids(now) == 4).await?;
    drop(process);
    until(&sandbox, "nothing runs again", |now| now.usage.pids == Some(0)).await?;
    Ok(())
}

async fn a_limit_of_processes_is_told(cx: &Context) -> Check {
    let free = cx.sandbox().await?;
    // A backend may have a limit for whom none was asked; it is another one then.
    let limit = free.stats().await?.usage.pids_limit;
    holds!(limit.is_none_or(|limit| limit > 1000), "{limit:?} is no limit of ours");
    let sandbox = cx.manager.create(cx.request().pids(77), &cx.sink).await?;
    same!(sandbox.stats().await?.usage.pids_limit, Some(77));
    Ok(())
}

async fn what_is_written_is_counted_where_that_is_known(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(before) = sandbox.stats().await?.usage.disk else { return Ok(()) };
    // Not zeroes, which a filesystem may keep as a hole.
    let eight = vec![b'x'; 8 * MEGABYTE as usize];
    sandbox.files().write("eight", &eight, &cx.sink).await?;
    cx.sh(&sandbox, "sync eight 2>/dev/null || sync").await?;
    let more = |now: &Stats| now.usage.disk.is_some_and(|disk| disk > before + 7 * MEGABYTE);
    let full = until(&sandbox, "eight megabytes are counted", more).await?;
    let most = before + 100 * MEGABYTE;
    holds!(full.usage.disk < Some(most), "{full:?} is no more than that, by and large");
    sandbox.files().remove("eight", &cx.sink).await?;
    let less = |now: &Stats| now.usage.disk.is_some_and(|disk| disk < before + 7 * MEGABYTE);
    until(&sandbox, "they count no more", less).await?;
    Ok(())
}

async fn the_loopback_is_no_network(cx: &Context) -> Check {
    if cx.has(Feature::NetworkDeny) {
        let request = cx.request().network(Network::Deny);
        let sandbox = cx.manager.create(request, &cx.sink).await?;
        cx.sh(&sandbox, "ping -c 3 127.0.0.1 >/dev/null 2>&1 || true").await?;
        let usage = sandbox.stats().await?.usage;
        same!((usage.network_received, usage.network_sent), (Some(0), Some(0)));
    }
    if cx.has(Feature::NetworkHost) {
        // What the host sends is not the sandbox's.
        let request = cx.request().network(Network::Host);
        let sandbox = cx.manager.create(request, &cx.sink).await?;
        let usage = sandbox.stats().await?.usage;
        same!((usage.network_received, usage.network_sent), (None, None));
    }
    Ok(())
}

async fn idle_time_grows_until_something_is_done(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "cat README").await?;
    let idle = |least: u64| move |now: &Stats| now.idle > Duration::from_millis(least);
    until(&sandbox, "it is idle", idle(200)).await?;
    until(&sandbox, "it is idle for longer", idle(400)).await?;

    let begin = Instant::now();
    cx.sh(&sandbox, "cat README").await?;
    let idle_since = until(&sandbox, "nothing runs", |now| now.usage.pids == Some(0)).await?.idle;
    holds!(idle_since <= begin.elapsed(), "{idle_since:?} is since the command");

    // While something runs, a child that was left behind too, it is not idle.
    let marker = cx.marker();
    let left = format!("sleep {marker} >/dev/null 2>&1 &");
    cx.sh(&sandbox, &left).await?;
    for _ in 0..3 {
        same!(sandbox.stats().await?.idle, Duration::ZERO);
        pause().await;
    }
    Ok(())
}

async fn looking_is_no_use_of_a_sandbox(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "cat README").await?;
    let least = Duration::from_millis(300);
    until(&sandbox, "it is idle", |now| now.idle > least).await?;
    // Neither by this one nor by one that has to connect first.
    let another = cx.another_manager().await?.open(sandbox.id().as_str()).await?;
    holds!(another.stats().await?.idle > least, "it is idle for another manager");
    holds!(sandbox.stats().await?.idle > least, "it is still idle");
    let kinds = cx.kinds(&sandbox).await?;
    another.stats().await?;
    same!(cx.kinds(&sandbox).await?, kinds);
    Ok(())
}

async fn only_what_runs_has_figures(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    sandbox.stop(&Suppressed).await?;
    same!(error_of(sandbox.stats().await)?.kind(), ErrorKind::Conflict);
    sandbox.start(&Suppressed).await?;
    let stats = sandbox.stats().await?;
    holds!(stats.usage.pids == Some(0), "{stats:?} are figures");
    sandbox.destroy(&Suppressed).await?;
    same!(error_of(sandbox.stats().await)?.kind(), ErrorKind::Lost);
    Ok(())
}
