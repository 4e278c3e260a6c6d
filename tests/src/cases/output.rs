//! What a command says, and what it is told.

use std::{collections::BTreeMap, sync::Arc};

use sandbox_core::{Chunk, Command, DEFAULT_OUTPUT_LIMIT, Outcome, Suppressed};

use super::cases;
use crate::{Check, Context, context::soon, holds, same};

const TEN: usize = 10 * 1024 * 1024;

cases!("output";
    [] every_byte_of_both_streams_is_there,
    [] a_background_child_does_not_hold_up_the_outcome,
    [] output_comes_while_the_command_runs,
    [] output_that_nobody_takes_holds_up_nobody_else,
    [] output_over_the_limit_keeps_head_and_tail,
    [] a_limit_of_nothing_still_counts,
    [] output_is_bytes,
    [] sixty_four_mib_of_input_come_back,
    [] a_command_that_never_reads_does_not_block,
    [] the_end_of_the_input_is_seen,
    [] without_input_there_is_nothing_to_read,
    [] a_closed_output_is_no_harm,
    [] a_conversation_goes_back_and_forth,
);

/// Bytes of which each place shows where it is.
fn pattern(length: usize, seed: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + 4);
    let mut state = seed;
    while bytes.len() < length {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

async fn every_byte_of_both_streams_is_there(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (out, err) = (pattern(TEN, 1), pattern(TEN, 2));
    sandbox.files().write("out", &out, &cx.sink).await?;
    sandbox.files().write("err", &err, &cx.sink).await?;
    // Thirty times on each backend; what was lost once in a hundred would be noticed by the third run.
    for n in 0..30 {
        // The one that ends last has just written the last byte when the shell exits.
        let text = match n % 3 {
            0 => "cat err >&2 & cat out; wait $!",
            1 => "cat out & cat err >&2; wait $!",
            _ => "cat out & (exec cat err >&2) & wait; exit 3",
        };
        let command = Command::shell(text).output_limit(TEN + 1);
        let run = soon("twice ten megabytes", cx.run(&sandbox, command)).await??;
        same!(run.outcome, Outcome::Exited(if n % 3 == 2 { 3 } else { 0 }));
        same!((run.stdout.total, run.stderr.total), (TEN as u64, TEN as u64));
        holds!(run.stdout.head == out, "standard output is what was written ({n})");
        holds!(run.stderr.head == err, "standard error is what was written ({n})");
        holds!(!run.output_open, "nothing holds the output open");
    }
    Ok(())
}

async fn a_background_child_does_not_hold_up_the_outcome(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let command = Command::shell(format!("sleep {marker} & echo said; exit 4"));
    let run = soon("a command with a child behind it", cx.run(&sandbox, command)).await??;
    same!(run.outcome, Outcome::Exited(4));
    same!(run.stdout.text(), "said\n");
    holds!(run.output_open, "its output is said to be open");
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    Ok(())
}

async fn output_comes_while_the_command_runs(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("echo one; read x; echo $x >&2; read y; echo $y");
    let mut process = sandbox.spawn(command.stdin_piped(), &cx.sink).await?;
    let next = soon("the first line", process.next_output()).await?;
    same!(next, Some(Chunk::Stdout(b"one\n".to_vec())));
    process.write_stdin(b"two\n").await?;
    let next = soon("the second line", process.next_output()).await?;
    same!(next, Some(Chunk::Stderr(b"two\n".to_vec())));
    process.write_stdin(b"three\n").await?;
    let run = soon("the end", process.wait(&sandbox, &cx.sink)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(0), "three\n"));
    Ok(())
}

async fn output_that_nobody_takes_holds_up_nobody_else(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let flood = Command::shell("exec cat /dev/zero");
    let untaken = sandbox.spawn(flood, &cx.sink).await?;
    for n in 0..20 {
        let said = soon("another command", cx.sh(&sandbox, &format!("echo {n}"))).await??;
        same!(said, n.to_string());
    }
    soon("a file", sandbox.files().read("README")).await??;
    drop(untaken);
    Ok(())
}

async fn output_over_the_limit_keeps_head_and_tail(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let expected: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    let command = || Command::new("seq").arg("100000");
    let run = cx.run(&sandbox, command().output_limit(1000)).await?;
    same!(run.outcome, Outcome::Exited(0));
    same!(run.stdout.total, expected.len() as u64);
    same!((run.stdout.head.len(), run.stdout.tail.len()), (500, 500));
    holds!(expected.as_bytes().starts_with(&run.stdout.head), "the head is the beginning");
    holds!(expected.as_bytes().ends_with(&run.stdout.tail), "the tail is the end");
    holds!(run.stdout.is_cut(), "it is said to be cut");
    same!(run.stdout.missing(), expected.len() as u64 - 1000);
    holds!(run.stdout.text().contains("bytes left out"), "the text tells of the gap");
    holds!(!run.stderr.is_cut() && run.stderr.total == 0, "the other is not cut");
    let run = cx.run(&sandbox, command()).await?;
    holds!(!run.stdout.is_cut() && run.stdout.text() == expected, "the whole is not cut");
    // The default has a limit as well.
    let more = DEFAULT_OUTPUT_LIMIT + 1;
    let run =
        cx.run(&sandbox, Command::new("head").args(["-c", &more.to_string(), "/dev/zero"])).await?;
    same!((run.stdout.is_cut(), run.stdout.missing(), run.outcome), (true, 1, Outcome::Exited(0)));
    Ok(())
}

async fn a_limit_of_nothing_still_counts(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let run = cx.run(&sandbox, Command::shell("echo hidden").output_limit(0)).await?;
    same!((run.stdout.total, run.stdout.missing()), (7, 7));
    same!(run.stdout.head.len() + run.stdout.tail.len(), 0);
    Ok(())
}

async fn output_is_bytes(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let all: Vec<u8> = (0..=255).cycle().take(256 * 300).collect();
    let run =
        cx.run(&sandbox, Command::shell("cat; printf '\\377' >&2").stdin(all.clone())).await?;
    holds!(run.stdout.head == all, "each byte comes as it is");
    same!(run.stderr.head, [255]);
    Ok(())
}

async fn sixty_four_mib_of_input_come_back(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let input = pattern(64 << 20, 3);
    let command = Command::new("cat").stdin(input.clone()).output_limit(input.len());
    let run = soon("64 MiB through cat", cx.run(&sandbox, command)).await??;
    same!(run.outcome, Outcome::Exited(0));
    same!(run.stdout.total, input.len() as u64);
    holds!(run.stdout.head == input, "they come back as they were");
    Ok(())
}

async fn a_command_that_never_reads_does_not_block(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let input = vec![b'x'; 64 << 20];
    for text in ["exit 5", "exec <&-; exit 5", "head -c 1000 > /dev/null; exit 5"] {
        let command = Command::shell(text).stdin(input.clone());
        let run = soon("a command that does not read", cx.run(&sandbox, command)).await??;
        same!(run.outcome, Outcome::Exited(5));
    }
    Ok(())
}

async fn the_end_of_the_input_is_seen(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for input in ["", "x", "no newline"] {
        let run = soon("cat", cx.run(&sandbox, Command::new("cat").stdin(input))).await??;
        same!((run.stdout.text().as_ref(), run.outcome), (input, Outcome::Exited(0)));
    }
    let mut process = sandbox.spawn(Command::new("cat").stdin_piped(), &cx.sink).await?;
    process.write_stdin(b"some").await?;
    process.write_stdin(b"").await?;
    process.write_stdin(b"thing").await?;
    process.end_stdin().await?;
    holds!(process.write_stdin(b"more").await.is_err(), "it is ended");
    let run = soon("cat", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.stdout.text(), "something");
    Ok(())
}

async fn without_input_there_is_nothing_to_read(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::shell("cat; read x || echo end");
    let run = soon("cat", cx.run(&sandbox, command)).await??;
    same!(run.stdout.text(), "end\n");
    Ok(())
}

async fn a_closed_output_is_no_harm(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    // Long after it has closed both, it is still waited for.
    let text = format!("echo said; exec >&- 2>&-; sleep {marker}; :");
    let process = sandbox.spawn(Command::shell(text), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count > 0).await?;
    // The word is the argument of the shell and of what it waits for: only the latter's name matches.
    let end = format!(
        "for p in /proc/[0-9]*; do [ \"$(tr '\\0' ' ' < $p/cmdline 2>/dev/null)\" = \
                       \"sleep {marker} \" ] && kill ${{p#/proc/}}; done; :"
    );
    cx.sh(&sandbox, &end).await?;
    let run = soon("the end", process.wait(&sandbox, &cx.sink)).await??;
    same!((run.stdout.text().as_ref(), run.outcome), ("said\n", Outcome::Exited(0)));
    Ok(())
}

async fn a_conversation_goes_back_and_forth(cx: &Context) -> Check {
    let sandbox = Arc::new(cx.sandbox().await?);
    let mut said = BTreeMap::new();
    for n in 0..4 {
        let command = Command::shell("while read x; do echo \"$x$x\"; done").stdin_piped();
        said.insert(n, sandbox.spawn(command, &Suppressed).await?);
    }
    for round in 0..100 {
        for (n, process) in &mut said {
            process.write_stdin(format!("{n}.{round} ").as_bytes()).await?;
            process.write_stdin(b"\n").await?;
            let answer = soon("an answer", process.next_output()).await?;
            let expected = format!("{n}.{round}{n}.{round}\n");
            same!(answer, Some(Chunk::Stdout(expected.into_bytes())));
        }
    }
    for (_, process) in said {
        let run = soon("the end", process.wait(&sandbox, &Suppressed)).await??;
        same!(run.outcome, Outcome::Exited(0));
    }
    Ok(())
}
