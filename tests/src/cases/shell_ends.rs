//! How shell sessions end.

use std::time::Duration;

use sandbox_core::{ErrorKind, Known, Outcome, ShellCommand, ShellOptions, Suppressed};

use super::{
    cases,
    shell::{is_over, run, say, shells},
};
use crate::{
    Check, Context,
    context::{is_lost, soon},
    holds, same,
};

cases!("shell_ends";
    [] an_exit_ends_the_session,
    [] an_exec_ends_the_session,
    [] errexit_ends_the_session_at_the_first_failure,
    [] a_killed_shell_is_an_error_not_a_hang,
    [] a_shell_that_cannot_open_anything_is_no_hang,
    [] a_timeout_ends_all_of_the_session,
    [] a_dropped_command_ends_all_of_the_session,
    [] a_dropped_shell_leaves_nothing_behind,
    [] a_closed_shell_ends_as_a_shell_does,
);

async fn an_exit_ends_the_session(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let marker = cx.marker();
        let shell = sandbox.shell(options, &cx.sink).await?;
        let left = format!("sleep {marker} & trap 'echo trapped' EXIT");
        say(&shell, &left).await?;
        let ended = run(&shell, "echo before; exit 3; echo after").await?;
        same!(ended.outcome, Outcome::Exited(3));
        holds!(ended.stdout.text().starts_with("before\n"), "{ended:?} says what was before");
        holds!(!ended.stdout.text().contains("after"), "{ended:?} says nothing afterwards");
        is_over(&shell, "the shell exited with 3").await?;
        // What a session leaves running ends with it.
        same!(cx.count(&sandbox, &marker).await?, 0);
    }
    Ok(())
}

async fn an_exec_ends_the_session(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        let command = ShellCommand::new("exec sh -c 'cat; echo said >&2; exit 7'").stdin("given\n");
        let ended = run(&shell, command).await?;
        same!(ended.outcome, Outcome::Exited(7));
        same!((ended.stdout.text().as_ref(), ended.stderr.text().as_ref()), ("given\n", "said\n"));
        is_over(&shell, "exited with 7").await?;
    }
    Ok(())
}

async fn errexit_ends_the_session_at_the_first_failure(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options.clone(), &cx.sink).await?;
        same!(say(&shell, "set -e; true; echo on").await?, "on\n");
        same!(say(&shell, "false || echo tested; if false; then :; fi").await?, "tested\n");
        let ended = run(&shell, "echo before; (exit 4); echo after").await?;
        same!(ended.outcome, Outcome::Exited(4));
        same!(ended.stdout.text(), "before\n");
        is_over(&shell, "exited with 4").await?;
        let shell = sandbox.shell(options, &cx.sink).await?;
        let ended = run(&shell, "set -e; cd no-such-directory; echo after").await?;
        holds!(!ended.outcome.is_success(), "{ended:?} failed");
        same!(ended.stdout.total, 0);
    }
    Ok(())
}

async fn a_killed_shell_is_an_error_not_a_hang(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options.clone(), &cx.sink).await?;
        let killed = run(&shell, "echo before; kill -KILL $$; echo after").await?;
        same!(killed.outcome, Outcome::Signaled(9));
        same!(killed.stdout.text(), "before\n");
        is_over(&shell, "signal 9").await?;

        // By somebody else, while nothing is asked of it.
        let shell = sandbox.shell(options.clone(), &cx.sink).await?;
        let pid = say(&shell, "echo $$").await?;
        let pid = pid.trim();
        let kill =
            format!("kill -KILL {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.01; done");
        soon("killing a shell", cx.sh(&sandbox, &kill)).await??;
        is_over(&shell, "over").await?;

        // And the process that keeps it.
        let shell = sandbox.shell(options, &cx.sink).await?;
        let lost = run(&shell, "echo before; kill -KILL $PPID; sleep 60").await?;
        holds!(is_lost(&lost.outcome), "{:?} is lost", lost.outcome);
        is_over(&shell, "over").await?;
    }
    Ok(())
}

async fn a_shell_that_cannot_open_anything_is_no_hang(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        // It cannot even say how this went.
        run(&shell, "ulimit -n 4").await?;
        let mut ended = false;
        for _ in 0..3 {
            match soon("a command", shell.run("echo x", &Suppressed)).await? {
                Ok(_) => {}
                Err(error) => {
                    same!(error.kind(), ErrorKind::Lost);
                    ended = true;
                }
            }
        }
        holds!(ended, "the session is over");
    }
    Ok(())
}

async fn a_timeout_ends_all_of_the_session(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        for last in ["sleep", "while :; do :; done; sleep"] {
            let marker = cx.marker();
            let shell = sandbox.shell(options.clone(), &cx.sink).await?;
            say(&shell, &format!("setsid sleep {marker} & trap '' TERM INT")).await?;
            let text = format!("(sleep {marker} &) ; echo before; {last} {marker}; echo after");
            let command = ShellCommand::new(text).timeout(Duration::from_secs(1));
            let ended = run(&shell, command).await?;
            same!(ended.outcome, Outcome::TimedOut);
            same!(ended.stdout.text(), "before\n");
            is_over(&shell, "time was over").await?;
            same!(cx.count(&sandbox, &marker).await?, 0);
        }
        // One that is not over does no harm.
        let shell = sandbox.shell(options.clone(), &cx.sink).await?;
        let quick = ShellCommand::new("echo quick").timeout(Duration::from_secs(60));
        same!(run(&shell, quick).await?.stdout.text(), "quick\n");
        same!(say(&shell, "echo next").await?, "next\n");
    }
    Ok(())
}

async fn a_dropped_command_ends_all_of_the_session(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    say(&shell, &format!("setsid sleep {marker} &")).await?;
    let text = format!("sleep {marker}");
    {
        let running = shell.run(text.as_str(), &Suppressed);
        tokio::pin!(running);
        let started = cx.until_count(&sandbox, &marker, |count| count >= 2);
        tokio::select! {
            run = &mut running => return Err(format!("it ended: {run:?}").into()),
            started = started => started?,
        }
    }
    is_over(&shell, "cancelled").await?;
    cx.until_count(&sandbox, &marker, |count| count == 0).await?;
    // The history has the command's end, and the shell's.
    let history = cx.manager.history(sandbox.id(), 0).await?;
    let argv = |known: &Known| match known {
        Known::ProcessStarted { process, argv, .. } if argv.last() == Some(&text) => {
            Some(process.clone())
        }
        _ => None,
    };
    let command = history.iter().filter_map(|event| event.known()).find_map(argv);
    let command = command.ok_or("the command is in the history")?;
    for id in [&command, shell.id()] {
        let ended = |known: &Known| {
            matches!(known, Known::ProcessExited { process, outcome, .. }
                if process == id && outcome.is_some())
        };
        cx.until_recorded(&sandbox, ended).await?;
    }
    Ok(())
}

async fn a_dropped_shell_leaves_nothing_behind(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    say(&shell, &format!("setsid sleep {marker} & sleep {marker} &")).await?;
    cx.until_count(&sandbox, &marker, |count| count == 2).await?;
    drop(shell);
    cx.until_count(&sandbox, &marker, |count| count == 0).await
}

async fn a_closed_shell_ends_as_a_shell_does(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options.clone(), &cx.sink).await?;
        say(&shell, &format!("sleep {marker} & trap 'echo trapped >trapped; exit 8' EXIT")).await?;
        same!(soon("the end", shell.close(&cx.sink)).await??, Outcome::Exited(8));
        same!(cx.sh(&sandbox, "cat trapped; rm trapped").await?, "trapped");
        same!(cx.count(&sandbox, &marker).await?, 0);
        let shell = sandbox.shell(options, &cx.sink).await?;
        same!(soon("the end", shell.close(&cx.sink)).await??, Outcome::Exited(0));
    }
    Ok(())
}
