//! How commands end, and that all of them does.

use std::time::Duration;

use sandbox_core::{Command, ErrorKind, Known, Outcome, Sandbox, Suppressed};

use super::cases;
use crate::{
    Check, Context,
    context::{is_lost, soon, until_said},
    holds, same,
};

cases!("ends";
    [] an_exit_code_is_what_it_was,
    [] a_signal_is_an_outcome_and_the_sandbox_lives_on,
    [] a_timeout_ends_the_whole_tree_and_nobody_else,
    [] a_timeout_of_a_command_that_is_done_does_nothing,
    [] a_timeout_returns_what_was_said,
    [] a_killed_command_is_cancelled_with_its_whole_tree,
    [] a_signal_reaches_the_command_alone_or_its_whole_tree,
    [] a_command_that_has_ended_is_signalled_no_more,
    [] a_dropped_command_ends_with_its_whole_tree,
    [] a_dropped_handle_ends_its_command,
    [] a_dropped_wait_ends_its_command,
    [] commands_that_are_dropped_at_once_leave_nothing,
    [] a_killed_supervisor_is_no_invented_exit_code,
    [ProcessIsolation] zombies_do_not_pile_up,
    [] the_figures_of_a_run_are_told,
    [Stop] a_stop_ends_every_process,
);

/// A tree that nobody gets rid of easily: sessions of their own, orphans, ones that ignore what can be
/// ignored, and ones that are never long the same.
const TREE: &str = r#"
    marker=$1
    trap '' TERM HUP INT
    echo begun
    printf '#!/bin/sh\nsh ./hop "$1" &\n' > hop
    sh ./hop "$marker"
    sh ./hop "$marker"
    sleep "$marker" &
    (sleep "$marker" & exit)
    ( (trap '' TERM; sh -c 'sleep "$1"; :' sh "$marker") & )
    if command -v setsid > /dev/null; then
        setsid sleep "$marker" &
        (setsid sh -c 'sleep "$1" & exec sleep "$1"' sh "$marker" &)
    fi
    while :; do sleep "$marker"; done
"#;

/// How many of it there are at least, whichever programs the sandbox has.
const TREE_SIZE: usize = 5;

fn tree(marker: &str) -> Command {
    Command::new("sh").args(["-c", TREE, "sh", marker])
}

/// A process that has nothing to do with it.
async fn bystander(cx: &Context, sandbox: &Sandbox) -> Check<(sandbox_core::Process, String)> {
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    cx.until_count(sandbox, &marker, |count| count == 1).await?;
    Ok((process, marker))
}

async fn an_exit_code_is_what_it_was(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for code in [0, 1, 2, 77, 126, 127, 128, 137, 255] {
        let run = cx.run(&sandbox, Command::shell(format!("exit {code}"))).await?;
        same!(run.outcome, Outcome::Exited(code));
        same!(run.outcome.is_success(), code == 0);
    }
    Ok(())
}

async fn a_signal_is_an_outcome_and_the_sandbox_lives_on(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (name, number) in
        [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("ABRT", 6), ("HUP", 1), ("USR1", 10)]
    {
        let command = Command::shell(format!("ulimit -c 0; echo said; kill -{name} $$; sleep 9"));
        let run = soon("a command that kills itself", cx.run(&sandbox, command)).await??;
        same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Signaled(number), "said\n"));
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_timeout_ends_the_whole_tree_and_nobody_else(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (other, other_marker) = bystander(cx, &sandbox).await?;
    let marker = cx.marker();
    let running = {
        let (sandbox, command) = (sandbox.clone(), tree(&marker).timeout(Duration::from_secs(4)));
        tokio::spawn(async move { sandbox.exec(command, &Suppressed).await })
    };
    // The control: it is there, and can be seen.
    cx.until_count(&sandbox, &marker, |count| count >= TREE_SIZE).await?;
    holds!(!running.is_finished(), "it was seen while it ran");
    let run = soon("a command whose time is over", running).await???;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::TimedOut, "begun\n"));
    same!(cx.count(&sandbox, &marker).await?, 0);
    cx.until_count(&sandbox, &other_marker, |count| count == 1).await?;
    drop(other);
    Ok(())
}

async fn a_timeout_of_a_command_that_is_done_does_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let text = format!("sleep {marker} & echo done");
    let command = Command::shell(text).timeout(Duration::from_millis(1500));
    let run = soon("a command that is fast", cx.run(&sandbox, command)).await??;
    same!(run.outcome, Outcome::Exited(0));
    // Longer than its time would have been.
    let run =
        cx.run(&sandbox, Command::new("sleep").arg("3").timeout(Duration::from_secs(30))).await?;
    same!(run.outcome, Outcome::Exited(0));
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    Ok(())
}

async fn a_timeout_returns_what_was_said(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "seq 1 50000; echo failing >&2; cat";
    let command = Command::shell(text).stdin_piped().timeout(Duration::from_secs(3));
    let process = sandbox.spawn(command.output_limit(1000), &cx.sink).await?;
    // Waiting would end the input; so it is only read from.
    let mut process = process;
    let (mut out, mut err) = (0, Vec::new());
    while let Some(chunk) = soon("output", process.next_output()).await? {
        match chunk {
            sandbox_core::Chunk::Stdout(bytes) => out += bytes.len(),
            sandbox_core::Chunk::Stderr(bytes) => err.extend(bytes),
        }
    }
    let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::TimedOut);
    same!((out, err.as_slice()), (288_894, &b"failing\n"[..]));
    let told = |known: &Known| {
        matches!(known, Known::ProcessExited { outcome: Some(Outcome::TimedOut), .. })
    };
    cx.until_recorded(&sandbox, told).await
}

fn cancelled(known: &Known) -> bool {
    matches!(known, Known::ProcessExited { outcome: Some(Outcome::Cancelled), .. })
}

async fn a_killed_command_is_cancelled_with_its_whole_tree(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (other, other_marker) = bystander(cx, &sandbox).await?;
    let marker = cx.marker();
    let process = sandbox.spawn(tree(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count >= TREE_SIZE).await?;
    soon("a kill", process.kill()).await??;
    same!(cx.count(&sandbox, &marker).await?, 0);
    let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Cancelled, "begun\n"));
    cx.until_count(&sandbox, &other_marker, |count| count == 1).await?;
    cx.until_recorded(&sandbox, cancelled).await?;
    drop(other);
    Ok(())
}

async fn a_signal_reaches_the_command_alone_or_its_whole_tree(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "
        trap 'echo above' USR1
        sh -c 'trap \"echo below\" USR1; echo up; while :; do sleep 0.02; done' &
        while :; do sleep 0.02; done
    ";
    let mut process = sandbox.spawn(Command::shell(text), &cx.sink).await?;
    let said = &mut String::new();
    soon("up", until_said(&mut process, said, "up")).await??;
    process.signal(10).await?;
    soon("above", until_said(&mut process, said, "above")).await??;
    holds!(!said.contains("below"), "only the command was signalled");
    process.signal_tree(10).await?;
    soon("below", until_said(&mut process, said, "below")).await??;
    process.signal_tree(15).await?;
    let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Signaled(15));
    Ok(())
}

async fn a_command_that_has_ended_is_signalled_no_more(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut process = sandbox.spawn(Command::new("true"), &cx.sink).await?;
    while soon("its output", process.next_output()).await?.is_some() {}
    for signal in [process.signal(15).await, process.signal_tree(15).await] {
        match signal {
            Err(error) => same!(error.kind(), ErrorKind::NotFound),
            Ok(()) => return Err("something was signalled".into()),
        }
    }
    // To kill it is no error: it is not there any more.
    process.kill().await?;
    let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(0));
    Ok(())
}

async fn a_dropped_command_ends_with_its_whole_tree(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (other, other_marker) = bystander(cx, &sandbox).await?;
    let marker = cx.marker();
    let running = {
        let (sandbox, command) = (sandbox.clone(), tree(&marker));
        tokio::spawn(async move { sandbox.exec(command, &Suppressed).await })
    };
    cx.until_count(&sandbox, &marker, |count| count >= TREE_SIZE).await?;
    running.abort();
    let _ = running.await;
    cx.until_recorded(&sandbox, cancelled).await?;
    cx.until_count(&sandbox, &marker, |count| count == 0).await?;
    cx.until_count(&sandbox, &other_marker, |count| count == 1).await?;
    drop(other);
    Ok(())
}

async fn a_dropped_handle_ends_its_command(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(tree(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count >= TREE_SIZE).await?;
    drop(process);
    cx.until_recorded(&sandbox, cancelled).await?;
    cx.until_count(&sandbox, &marker, |count| count == 0).await
}

async fn a_dropped_wait_ends_its_command(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    let waiting = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { process.wait(&sandbox, &Suppressed).await })
    };
    tokio::task::yield_now().await;
    waiting.abort();
    let _ = waiting.await;
    cx.until_recorded(&sandbox, cancelled).await?;
    cx.until_count(&sandbox, &marker, |count| count == 0).await
}

async fn commands_that_are_dropped_at_once_leave_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    // Each a little later: before, while and after it is started.
    for n in 0..40_u32 {
        let (sandbox, command) = (sandbox.clone(), Command::new("sleep").arg(&marker));
        let running = tokio::spawn(async move { sandbox.exec(command, &Suppressed).await });
        tokio::time::sleep(Duration::from_micros(u64::from(n) * 100)).await;
        running.abort();
        let _ = running.await;
    }
    cx.until_count(&sandbox, &marker, |count| count == 0).await?;
    // What is in the history as started is in it as ended.
    let settled = async {
        loop {
            let kinds = cx.kinds(&sandbox).await?;
            let count = |kind: &str| kinds.iter().filter(|known| *known == kind).count();
            if count("process_started") == count("process_exited") {
                return Check::Ok(());
            }
            crate::context::pause().await;
        }
    };
    soon("a record of each end", settled).await??;
    same!(cx.count(&sandbox, &marker).await?, 0);
    Ok(())
}

async fn a_killed_supervisor_is_no_invented_exit_code(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    // What the command's parent is, the command may find out, and it may be allowed to kill it.
    let text = format!("echo said; kill -KILL $PPID; sleep {marker}");
    let running = {
        let (sandbox, command) = (sandbox.clone(), Command::shell(text));
        tokio::spawn(async move { sandbox.exec(command, &Suppressed).await })
    };
    let ended = tokio::time::timeout(Duration::from_secs(5), running).await;
    match ended {
        Ok(run) => match run? {
            Ok(run) => holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome),
            // It was faster than the word that it runs.
            Err(error) => same!(error.kind(), ErrorKind::Guest),
        },
        // It could not kill it, and runs.
        Err(_) => cx.until_count(&sandbox, &marker, |count| count == 2).await?,
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn zombies_do_not_pile_up(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "i=0; while [ $i -lt 2000 ]; do (true &); i=$((i+1)); done; echo $i";
    same!(cx.sh(&sandbox, text).await?, "2000");
    let clean = async {
        loop {
            let text =
                "grep -ls '^State:.Z' /proc/[0-9]*/status | wc -l; ls -d /proc/[0-9]* | wc -l";
            let said = cx.sh(&sandbox, text).await?;
            let numbers: Vec<usize> = said.split_whitespace().flat_map(str::parse).collect();
            same!(numbers.len(), 2);
            // The guest, and what looks.
            if numbers[0] == 0 && numbers[1] < 10 {
                return Check::Ok(());
            }
        }
    };
    soon("a clean process table", clean).await?
}

async fn the_figures_of_a_run_are_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 0.3";
    let run = cx.run(&sandbox, Command::shell(text)).await?;
    holds!(run.duration >= Duration::from_millis(300), "{:?} is as long as it took", run.duration);
    holds!(!run.cpu.is_zero() && run.cpu < run.duration * 2, "{:?} of CPU time is told", run.cpu);
    holds!(run.max_memory > 100 * 1024, "{} bytes are a process", run.max_memory);
    Ok(())
}

async fn a_stop_ends_every_process(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(tree(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count >= TREE_SIZE).await?;
    sandbox.stop(&cx.sink).await?;
    let run = soon("a command whose sandbox stops", process.wait(&sandbox, &cx.sink)).await??;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    sandbox.start(&cx.sink).await?;
    same!(cx.count(&sandbox, &marker).await?, 0);
    Ok(())
}
