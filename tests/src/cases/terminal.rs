//! Terminals.

use sandbox_core::{Command, ErrorKind, Outcome, TerminalSize};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, soon, until_said},
    holds, same,
};

const SIZE: TerminalSize = TerminalSize { rows: 33, cols: 101 };

cases!("terminal";
    [Pty] a_terminal_has_its_size_from_the_start,
    [Pty] a_resize_is_told_by_a_signal,
    [Pty] all_three_are_the_terminal_and_it_is_its_own,
    [Pty] ctrl_c_interrupts,
    [Pty] ctrl_d_ends_the_input,
    [Pty] all_output_before_the_end_is_there,
    [Pty] a_terminal_without_a_size_is_refused,
    [Pty] a_closed_terminal_hangs_up,
    [] without_a_terminal_there_is_none,
);

async fn a_terminal_has_its_size_from_the_start(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("stty size; [ -n \"$TERM\" ] && echo term").pty(SIZE);
    let run = soon("stty", cx.run(&sandbox, command)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(0), "33 101\r\nterm\r\n"));
    Ok(())
}

async fn a_resize_is_told_by_a_signal(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut process = sandbox.spawn(Command::shell(text).pty(SIZE), &cx.sink).await?;
    let said = &mut String::new();
    soon("ready", until_said(&mut process, said, "ready")).await??;
    process.resize(TerminalSize { rows: 50, cols: 200 }).await?;
    soon("50 200", until_said(&mut process, said, "50 200")).await??;
    let error = error_of(process.resize(TerminalSize { rows: 0, cols: 80 }).await)?;
    same!(error.kind(), ErrorKind::InvalidSpec);
    process.resize(TerminalSize { rows: 1, cols: 1 }).await?;
    soon("1 1", until_said(&mut process, said, "1 1")).await?
}

async fn all_three_are_the_terminal_and_it_is_its_own(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "test -t 0 && test -t 1 && test -t 2 && echo three; echo err >&2; tty; \
                echo controlling > /dev/tty";
    let run = soon("test", cx.run(&sandbox, Command::shell(text).pty(SIZE))).await??;
    let said = run.stdout.text().into_owned();
    let lines: Vec<&str> = said.split("\r\n").collect();
    same!(lines.len(), 5);
    same!([lines[0], lines[1], lines[3], lines[4]], ["three", "err", "controlling", ""]);
    holds!(lines[2].starts_with("/dev/"), "{} is a terminal's name", lines[2]);
    same!(run.stderr.total, 0);
    Ok(())
}

async fn ctrl_c_interrupts(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::new("sleep").arg(cx.marker()).pty(SIZE).stdin_piped();
    let mut process = sandbox.spawn(command, &cx.sink).await?;
    process.write_stdin(b"\x03").await?;
    while soon("the terminal's echo", process.next_output()).await?.is_some() {}
    let run = soon("an interrupted command", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Signaled(2));

    let text = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.05; done";
    let command = Command::shell(text).pty(SIZE).stdin_piped();
    let mut process = sandbox.spawn(command, &cx.sink).await?;
    soon("ready", until_said(&mut process, &mut String::new(), "ready")).await??;
    process.write_stdin(b"\x03").await?;
    soon("caught", until_said(&mut process, &mut String::new(), "caught")).await??;
    let run = soon("an interrupted command", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(3));
    Ok(())
}

async fn ctrl_d_ends_the_input(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("stty -echo; echo ready; cat; echo end").pty(SIZE).stdin_piped();
    let mut process = sandbox.spawn(command, &cx.sink).await?;
    let said = &mut String::new();
    soon("ready", until_said(&mut process, said, "ready\r\n")).await??;
    process.write_stdin(b"a line\n\x04").await?;
    soon("end", until_said(&mut process, said, "end\r\n")).await??;
    same!(said, "ready\r\na line\r\nend\r\n");
    let run = soon("the end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(0));
    Ok(())
}

async fn all_output_before_the_end_is_there(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let expected: String = (1..=20_000).map(|n| format!("{n}\r\n")).collect();
    for _ in 0..10 {
        let run =
            soon("seq", cx.run(&sandbox, Command::new("seq").arg("20000").pty(SIZE))).await??;
        same!((run.outcome, run.stdout.total), (Outcome::Exited(0), expected.len() as u64));
        holds!(run.stdout.head == expected.as_bytes(), "it is what was said");
    }
    Ok(())
}

async fn a_terminal_without_a_size_is_refused(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (rows, cols) in [(0, 0), (0, 80), (24, 0)] {
        let command = Command::new("true").pty(TerminalSize { rows, cols });
        same!(error_of(cx.run(&sandbox, command).await)?.kind(), ErrorKind::InvalidSpec);
    }
    Ok(())
}

async fn a_closed_terminal_hangs_up(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let command = Command::shell(format!("sleep {marker} & sleep {marker}")).pty(SIZE);
    let process = sandbox.spawn(command, &cx.sink).await?;
    // The shell, and the two that it started.
    cx.until_count(&sandbox, &marker, |count| count == 3).await?;
    drop(process);
    cx.until_count(&sandbox, &marker, |count| count == 0).await
}

async fn without_a_terminal_there_is_none(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "test -t 0 || test -t 1 || test -t 2 || echo none; tty; \
                (exec 3< /dev/tty) 2> /dev/null || echo detached";
    let run = cx.run(&sandbox, Command::shell(text).stdin("x")).await?;
    same!(run.stdout.text(), "none\nnot a tty\ndetached\n");
    Ok(())
}
