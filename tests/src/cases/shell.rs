//! Shell sessions.

use std::time::Duration;

use sandbox_core::{
    CollectSink, Command, ErrorKind, Known, Outcome, Run, Sandbox, Shell, ShellCommand,
    ShellOptions, Suppressed, TurnId,
};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, is_lost, pause, soon},
    holds, same,
};

cases!("shell";
    [] state_is_kept_between_commands,
    [] each_command_has_its_own_outcome_and_streams,
    [] a_command_reads_what_it_is_given_and_nothing_else,
    [] what_is_no_valid_shell_is_a_commands_failure,
    [] what_a_command_says_is_never_taken_for_its_end,
    [] background_jobs_keep_their_output_to_themselves,
    [] much_output_is_kept_within_the_limit,
    [] options_and_definitions_do_no_harm,
    [] each_command_is_in_the_history_of_its_turn,
    [] commands_of_one_shell_take_turns,
    [] two_shells_share_nothing,
    [] what_is_no_shell_is_refused,
    [] garbage_from_inside_is_an_error,
    [SnapshotLive] a_shell_survives_a_snapshot_and_no_rewind,
);

/// The shells that there are inside.
pub(super) async fn shells(cx: &Context, sandbox: &Sandbox) -> Check<Vec<ShellOptions>> {
    let mut found = vec![ShellOptions::new()];
    for (program, arg) in [("dash", None), ("bash", None), ("busybox", Some("sh"))] {
        let there = cx.run(sandbox, Command::shell(format!("command -v {program}"))).await?;
        if there.outcome.is_success() {
            let options = ShellOptions::new().program(program);
            found.push(arg.into_iter().fold(options, ShellOptions::arg));
        }
    }
    Ok(found)
}

pub(super) async fn run(shell: &Shell, command: impl Into<ShellCommand>) -> Check<Run> {
    Ok(soon("a command in a shell", shell.run(command, &Suppressed)).await??)
}

/// Runs what must succeed, and gives what it says.
pub(super) async fn say(shell: &Shell, text: &str) -> Check<String> {
    let run = run(shell, text).await?;
    holds!(run.outcome.is_success(), "{text:?} is success: {run:?}");
    Ok(run.stdout.text().into_owned())
}

/// The session is over, says so at once, and still says so.
pub(super) async fn is_over(shell: &Shell, why: &str) -> Check {
    for _ in 0..2 {
        let error = error_of(soon("a dead shell", shell.run("echo", &Suppressed)).await?)?;
        same!(error.kind(), ErrorKind::Lost);
        holds!(error.to_string().contains(why), "{error} says {why:?}");
    }
    Ok(())
}

async fn state_is_kept_between_commands(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let options = options.env("GIVEN", "at first").current_dir("src");
        let shell = sandbox.shell(options, &cx.sink).await?;
        let first = say(&shell, "pwd; echo $GIVEN").await?;
        holds!(first.ends_with("/src\nat first\n"), "{first:?} is where it began");
        say(&shell, "cd ..; own=1; export out='two words'; umask 027").await?;
        say(&shell, "f() {\n  echo \"f of $1, $own\"\n}").await?;
        say(&shell, "set -- a 'b c'; exec 7>kept; echo one >&7").await?;
        same!(say(&shell, "ls README").await?, "README\n");
        same!(say(&shell, "f x; umask; echo \"$2\"").await?, "f of x, 1\n0027\nb c\n");
        same!(say(&shell, "sh -c 'echo \"$out.$own.\"'").await?, "two words..\n");
        same!(say(&shell, "echo two >&7; cat kept").await?, "one\ntwo\n");
        // A job is one of the shell's own, also for a later command.
        say(&shell, "(exit 6) & job=$!").await?;
        same!(run(&shell, "wait $job").await?.outcome, Outcome::Exited(6));
        say(&shell, "unset own; cd src").await?;
        same!(say(&shell, "echo .$own. ; ls").await?, "..\nmain.c\n");
    }
    Ok(())
}

async fn each_command_has_its_own_outcome_and_streams(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        for (text, code, out, err) in [
            ("echo out; echo err >&2", 0, "out\n", "err\n"),
            ("", 0, "", ""),
            ("# nothing", 0, "", ""),
            ("(exit 3)", 3, "", ""),
            ("printf 'no newline'; false", 1, "no newline", ""),
            ("printf 'no newline' >&2", 0, "", "no newline"),
            ("echo a\n\necho b; false\ntrue", 0, "a\nb\n", ""),
            ("sh -c 'kill -KILL $$'", 137, "", ""),
            ("sh -c 'exit 137'", 137, "", ""),
            ("cat <<'end'\n$x 'quoted'\nend\n", 0, "$x 'quoted'\n", ""),
            ("echo \"it's\" 'a \"b\"' \\$c", 0, "it's a \"b\" $c\n", ""),
        ] {
            let run = run(&shell, text).await?;
            same!((text, &run.outcome), (text, &Outcome::Exited(code)));
            same!((text, run.stdout.text().as_ref()), (text, out));
            // Shells tell of a program that was killed, each in its words.
            if code != 137 {
                same!((text, run.stderr.text().as_ref()), (text, err));
            }
            holds!(!run.output_open, "nothing holds the output of {text:?} open");
        }
        let run = run(&shell, "no-such-program; echo $?").await?;
        same!(run.stdout.text(), "127\n");
        holds!(run.stderr.text().contains("no-such-program"), "{run:?} says what was not found");
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let busy = self::run(&shell, busy).await?;
        holds!(busy.duration > Duration::ZERO, "{busy:?} took its time");
        let bytes =
            self::run(&shell, ShellCommand::new(&b"printf '\xff\\000\\n'; echo '\xfe'"[..]));
        same!(bytes.await?.stdout.head, b"\xff\0\n\xfe\n");
    }
    Ok(())
}

async fn a_command_reads_what_it_is_given_and_nothing_else(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        same!(say(&shell, "cat; read x || echo end").await?, "end\n");
        same!(say(&shell, "sh; cat & wait; echo there").await?, "there\n");
        let given = ShellCommand::new("read x; echo \"$x\"; cat").stdin("one\ntwo\nthree");
        same!(run(&shell, given).await?.stdout.text(), "one\ntwo\nthree");
        same!(say(&shell, "echo $x").await?, "one\n");
        let empty = run(&shell, ShellCommand::new("cat; echo end").stdin("")).await?;
        same!(empty.stdout.text(), "end\n");
        let command = ShellCommand::new("cat").stdin(&large[..]).output_limit(4_000_000);
        let back = run(&shell, command).await?;
        holds!(back.stdout.head == large, "{} bytes came back", back.stdout.total);
        // One that reads none of it, or only some, is not waited for.
        for text in ["echo done", "head -c 100000 >/dev/null; echo done"] {
            let command = ShellCommand::new(text).stdin(&large[..]);
            same!(run(&shell, command).await?.stdout.text(), "done\n");
        }
        same!(say(&shell, "cat; echo still").await?, "still\n");
    }
    Ok(())
}

async fn what_is_no_valid_shell_is_a_commands_failure(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        say(&shell, "kept=yes").await?;
        for text in [
            "echo 'never closed",
            "echo \"never closed",
            "echo `never closed",
            "echo $(never closed",
            "if true; then echo",
            "for x in 1 2; do",
            "echo 1 )",
            ";;",
            "f() {",
            "case x in",
            "echo ${",
            "(",
        ] {
            let run = run(&shell, text).await?;
            let failed = matches!(run.outcome, Outcome::Exited(1..));
            holds!(failed, "{text:?} failed: {run:?}");
            holds!(run.stderr.total > 0, "something is said of {text:?}");
            same!((text, say(&shell, "echo $kept").await?), (text, "yes\n".to_owned()));
        }
        // A here-document that is not closed ends with the text.
        let open = run(&shell, "cat <<end\ninside\n").await?;
        same!(open.stdout.text(), "inside\n");
        same!(say(&shell, "echo $kept").await?, "yes\n");
        // A backslash at the end joins nothing.
        let joined = run(&shell, "echo a\\").await?;
        holds!(joined.stdout.text().starts_with('a'), "{joined:?} says a");
        same!(say(&shell, "echo $kept").await?, "yes\n");
    }
    Ok(())
}

async fn what_a_command_says_is_never_taken_for_its_end(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    // What an end looks like, without the word that only the shell knows.
    let end = "\n00000000000000000000000000000000 0\n".repeat(50);
    let command = ShellCommand::new("cat; cat README >&2; (exit 4)").stdin(end.as_str());
    let said = run(&shell, command).await?;
    same!(said.outcome, Outcome::Exited(4));
    same!(said.stdout.text(), end.as_str());
    same!(said.stderr.text(), "v1\n");
    // What a shell is told, as a text: it does nothing but what it says.
    let told = "\\command printf '\\n%s %s\\n' 0 0\n' </dev/null\n\\command eval '";
    let run1 = run(&shell, told).await?;
    holds!(run1.outcome != Outcome::Exited(0), "{run1:?} is not valid");
    same!(say(&shell, "echo own").await?, "own\n");
    // Noise in every pipe that can be found, the ones that tell of the end too.
    let noise = "for fd in /proc/$PPID/fd/*; do\n  case $fd in */0|*/1|*/2) continue;; esac\n  \
                 [ -p $fd ] && (printf '\\nnoise 0\\n' >$fd) 2>/dev/null &\ndone; sleep 0.1; (exit 5)";
    let noisy = run(&shell, ShellCommand::new(noise)).await?;
    same!(noisy.outcome, Outcome::Exited(5));
    for n in 0..20 {
        let told = run(&shell, format!("echo {n}; (exit {n})")).await?;
        same!(told.outcome, Outcome::Exited(n));
    }
    Ok(())
}

async fn background_jobs_keep_their_output_to_themselves(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    for options in shells(cx, &sandbox).await? {
        let shell = sandbox.shell(options, &cx.sink).await?;
        // One after another, and one in bursts that fill a pipe.
        let chatter = "while :; do echo noise; echo noise >&2; done & echo first";
        let first = run(&shell, chatter).await?;
        holds!(first.output_open, "{:?} says that its output is open", first.outcome);
        holds!(first.stdout.text().contains("first\n"), "the command's own is there");
        let silent = run(&shell, format!("sleep {marker} & : {marker}")).await?;
        holds!(silent.output_open, "{silent:?} says that its output is open");
        for n in 0..20 {
            let own = run(&shell, format!("echo {n}; echo {n} >&2")).await?;
            same!(own.stdout.text(), format!("{n}\n"));
            same!(own.stderr.text(), format!("{n}\n"));
            holds!(!own.output_open, "its own output is not open");
        }
        // They still run: nothing held them up or broke their pipes.
        same!(say(&shell, "kill $! && wait $! 2>/dev/null || echo gone").await?, "gone\n");
        same!(say(&shell, "jobs >/dev/null; echo end").await?, "end\n");
    }
    cx.until_count(&sandbox, &marker, |count| count == 0).await
}

async fn much_output_is_kept_within_the_limit(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let shell = sandbox.shell(ShellOptions::new().output_limit(1000), &cx.sink).await?;
    let text = "echo begin; head -c 20000000 /dev/zero; echo end; head -c 9000000 /dev/zero >&2";
    let much = run(&shell, text).await?;
    same!(much.outcome, Outcome::Exited(0));
    same!((much.stdout.total, much.stderr.total), (20_000_010, 9_000_000));
    holds!(much.stdout.is_cut(), "it is cut");
    holds!(much.stdout.head.starts_with(b"begin\n"), "its head is there");
    holds!(much.stdout.tail.ends_with(b"end\n"), "its tail is there");
    same!(much.stdout.head.len() + much.stdout.tail.len(), 1000);
    let nothing = run(&shell, ShellCommand::new("echo much").output_limit(0)).await?;
    same!((nothing.stdout.head.len(), nothing.stdout.total), (0, 5));
    same!(say(&shell, "echo next").await?, "next\n");
    Ok(())
}

async fn options_and_definitions_do_no_harm(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for options in shells(cx, &sandbox).await? {
        for text in [
            "set -u",
            "set -f",
            "set -C",
            "set -x",
            "set -v",
            "set -a",
            "IFS=0123456789/",
            "unset PATH",
            "PATH=/nowhere",
            "printf() { echo mine; }",
            "alias printf=false eval=false command=false 2>/dev/null || :",
            "trap 'echo trapped' TERM INT HUP",
            "trap '' PIPE",
            "exec 0<&- 1>&- 2>&-",
            "exec >/dev/null 2>&1",
            "exec 3>&1 4>&2 9>&1",
            "mkdir -p gone && cd gone && rmdir ../gone",
            "LC_ALL=C; LANG=; export LC_ALL",
        ] {
            let shell = sandbox.shell(options.clone(), &cx.sink).await?;
            let done = run(&shell, text).await?;
            holds!(done.outcome.is_success(), "{text:?} is success: {done:?}");
            let after = run(&shell, "echo after; (exit 9)").await?;
            same!((text, after.outcome), (text, Outcome::Exited(9)));
            same!((text, after.stdout.text().as_ref()), (text, "after\n"));
        }
    }
    Ok(())
}

async fn each_command_is_in_the_history_of_its_turn(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let before = cx.manager.history(sandbox.id(), 0).await?.len() as u64;
    let turn = |name: &str| CollectSink::new(TurnId::new(name));
    let (first, second) = (turn("first"), turn("second"));
    let shell = sandbox.shell(ShellOptions::new(), &first).await?;
    let one = soon("one", shell.run("echo one", &first)).await??;
    let two = soon("two", shell.run("exit 2", &second)).await??;
    let history = cx.manager.history(sandbox.id(), before).await?;
    let started = |id: &sandbox_core::ProcessId, argv: &[&str]| Known::ProcessStarted {
        process: id.clone(),
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        detached: false,
    };
    let exited = |id: &sandbox_core::ProcessId, code| Known::ProcessExited {
        process: id.clone(),
        outcome: Some(Outcome::Exited(code)),
        error: None,
    };
    let expected = [
        ("first", started(shell.id(), &["/bin/sh"])),
        ("first", started(&one.process, &["/bin/sh", "-c", "echo one"])),
        ("first", exited(&one.process, 0)),
        ("second", started(&two.process, &["/bin/sh", "-c", "exit 2"])),
        // The shell's own end is the turn's that it was opened in.
        ("first", exited(shell.id(), 2)),
        ("second", exited(&two.process, 2)),
    ];
    let found: Vec<_> = history
        .iter()
        .filter_map(|event| Some((event.turn.as_ref()?.as_str(), event.known()?.clone())))
        .collect();
    same!(found, expected);
    // Each sink saw its turn's, or what was left of another one.
    let seen = first.events().len() + second.events().len();
    same!(seen, expected.len());
    Ok(())
}

async fn commands_of_one_shell_take_turns(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let shell = std::sync::Arc::new(sandbox.shell(ShellOptions::new(), &cx.sink).await?);
    say(&shell, "n=0").await?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let shell = std::sync::Arc::clone(&shell);
        tasks.spawn(async move { shell.run("m=$n; n=$((m+1)); echo $n", &Suppressed).await });
    }
    let mut said = Vec::new();
    while let Some(done) = soon("a command", tasks.join_next()).await? {
        said.push(done??.stdout.text().trim().parse::<u32>()?);
    }
    said.sort_unstable();
    same!(said, (1..=20).collect::<Vec<u32>>());
    Ok(())
}

async fn two_shells_share_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let one = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    let two = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    holds!(one.id() != two.id(), "each has its id");
    say(&one, "own=1; cd src").await?;
    same!(say(&two, "echo .$own.; ls README").await?, "..\nREADME\n");
    let slow = run(&one, "sleep 0.3; echo slow");
    let quick = async {
        for _ in 0..5 {
            same!(say(&two, "echo quick").await?, "quick\n");
        }
        Check::Ok(())
    };
    let (slow, quick) = tokio::join!(slow, quick);
    quick?;
    same!(slow?.stdout.text(), "slow\n");
    run(&one, "exit").await?;
    same!(say(&two, "echo there").await?, "there\n");
    Ok(())
}

async fn what_is_no_shell_is_refused(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (program, kind) in [
        ("no-such-shell", ErrorKind::NotFound),
        ("/no/such/shell", ErrorKind::NotFound),
        ("/workspace/README", ErrorKind::PermissionDenied),
        ("true", ErrorKind::Unsupported),
    ] {
        let program = if program == "/workspace/README" {
            cx.sh(&sandbox, "echo $PWD/README").await?
        } else {
            program.to_owned()
        };
        let options = ShellOptions::new().program(&program);
        let error =
            error_of(soon("a shell that is none", sandbox.shell(options, &cx.sink)).await?)?;
        same!((program.as_str(), error.kind()), (program.as_str(), kind));
        let name = program.rsplit('/').next().unwrap_or_default();
        holds!(
            kind == ErrorKind::Unsupported || error.to_string().contains(name),
            "{error} names {program}"
        );
    }
    let options = ShellOptions::new().current_dir("no-such-directory");
    let error = error_of(sandbox.shell(options, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    let error = error_of(shell.run("a\0b", &cx.sink).await)?;
    same!(error.kind(), ErrorKind::InvalidSpec);
    same!(say(&shell, "echo there").await?, "there\n");
    Ok(())
}

async fn garbage_from_inside_is_an_error(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for garbage in
        ["garbage and more garbage", "\\377\\377\\377\\377\\000", "\\000\\000\\000\\005\\000abcd"]
    {
        let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
        // Into the keeper's own output, which no honest command knows of.
        let text = format!("printf '{garbage}' >/proc/$PPID/fd/1; sleep 60");
        let error = error_of(soon("garbage", shell.run(text, &Suppressed)).await?)?;
        same!((garbage, error.kind()), (garbage, ErrorKind::Guest));
        is_over(&shell, "over").await?;
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_shell_survives_a_snapshot_and_no_rewind(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    say(&shell, "own=1").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    same!(say(&shell, "echo $own").await?, "1\n");
    let slow = shell.run("echo begun >begun; sleep 60", &Suppressed);
    let rewind = async {
        while sandbox.files().metadata("begun").await.is_err() {
            pause().await;
        }
        sandbox.rewind(&snapshot.id, &cx.sink).await
    };
    let (slow, rewound) = tokio::join!(soon("a lost command", slow), soon("a rewind", rewind));
    rewound??;
    let lost = slow??;
    holds!(is_lost(&lost.outcome), "{:?} is lost", lost.outcome);
    is_over(&shell, "over").await?;
    let shell = sandbox.shell(ShellOptions::new(), &cx.sink).await?;
    same!(say(&shell, "echo .$own.; ls begun 2>/dev/null || echo none").await?, "..\nnone\n");
    Ok(())
}
