//! What a connection to the guest that is cut, once or again and again, is to what goes over it.

use std::{sync::Arc, time::Duration};

use sandbox_core::{
    Chunk, Command, ErrorKind, Outcome, OutputStream, ProcessState, Sandbox, SandboxManager,
    Suppressed,
};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, is_lost, until_said},
    cut::Cutting,
    decorate::Decorated,
    holds, same,
};

cases!("connection";
    [] output_is_whole_over_a_connection_that_is_cut,
    [] input_is_whole_over_a_connection_that_is_cut,
    [] a_conversation_goes_on_over_a_connection_that_is_cut,
    [] a_command_is_started_once_wherever_the_connection_is_cut,
    [] detached_output_is_whole_over_a_connection_that_is_cut,
    [] a_detached_command_is_started_once_wherever_the_connection_is_cut,
    [] a_command_ends_over_a_connection_that_is_cut_again_and_again,
    [] a_command_is_lost_when_the_connection_never_comes_back,
    [] questions_are_asked_again_over_a_connection_that_is_cut,
    [] a_kill_arrives_over_a_connection_that_is_cut,
    [Pty] a_terminal_has_its_size_over_a_connection_that_is_cut,
    [] a_sandbox_is_used_on_while_a_connection_is_cut,
    [] files_are_read_whole_over_a_connection_that_is_cut,
    [] a_file_is_written_whole_or_not_at_all_over_a_connection_that_is_cut,
    [] an_append_is_not_doubled_over_a_connection_that_is_cut,
);

/// How long what waits for a connection in vain may take.
const LATE: Duration = Duration::from_secs(150);

/// What must come, though the connection may have to be made anew many times before, which takes a multiple
/// where it is made over another one.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Check<T> {
    match tokio::time::timeout(LATE, future).await {
        Ok(result) => Ok(result),
        Err(_) => Err(format!("it hangs: {what}").into()),
    }
}

/// A sandbox, and the same by a manager whose connections are cut.
struct Scene {
    sandbox: Sandbox,
    cutting: Arc<Decorated<Cutting>>,
    /// Lives as long as what it does is looked at.
    _manager: SandboxManager,
    cut: Sandbox,
}

impl Scene {
    async fn new(cx: &Context) -> Check<Self> {
        let sandbox = cx.sandbox().await?;
        let cutting = Decorated::new(Arc::clone(&cx.backend), Cutting::default());
        let backend: Arc<dyn sandbox_core::SandboxBackend> = cutting.clone();
        let manager = cx.manager_with(backend).await?;
        let cut = manager.open(sandbox.id().as_str()).await?;
        Ok(Self { sandbox, cutting, _manager: manager, cut })
    }

    fn cutting(&self) -> &Cutting {
        self.cutting.decoration()
    }
}

fn numbers(to: u32) -> String {
    (1..=to).map(|n| format!("{n}\n")).collect()
}

async fn output_is_whole_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let expected = numbers(150_000);
    // At the end of a frame, or in its middle: wherever it is.
    for each in [150_000, 77_777, 40_001] {
        scene.cutting().cut();
        scene.cutting().each(each);
        let before = scene.cutting().cuts();
        let text = "seq 1 150000 & seq 1 150000 >&2; wait $!; exit 3";
        let command = Command::shell(text).output_limit(4 << 20);
        let run = soon("much output", scene.cut.exec(command, &cx.sink)).await??;
        same!(run.outcome, Outcome::Exited(3));
        holds!(run.stdout.head == expected.as_bytes(), "standard output is whole ({each})");
        holds!(run.stderr.head == expected.as_bytes(), "standard error is whole ({each})");
        let cuts = scene.cutting().cuts() - before;
        holds!(cuts > 5, "it was cut {cuts} times");
    }
    Ok(())
}

async fn input_is_whole_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let input = numbers(200_000).into_bytes();
    for each in [250_000, 123_457] {
        scene.cutting().cut();
        scene.cutting().each(each);
        let before = scene.cutting().cuts();
        // All of it at once, and the same in pieces.
        let command = Command::shell("sleep 0.05; exec cat").stdin(input.clone());
        let command = command.output_limit(input.len());
        let run = soon("cat", scene.cut.exec(command, &cx.sink)).await??;
        same!(run.outcome, Outcome::Exited(0));
        holds!(run.stdout.head == input, "what was sent comes back ({each})");
        let command = Command::shell("exec cat > piped").stdin_piped();
        let mut process = soon("a start", scene.cut.spawn(command, &cx.sink)).await??;
        for piece in input.chunks(99_999) {
            soon("room", process.write_stdin(piece)).await??;
        }
        let run = soon("cat", process.wait(&scene.cut, &cx.sink)).await??;
        same!(run.outcome, Outcome::Exited(0));
        let piped = soon("reading", scene.sandbox.files().read("piped")).await??;
        holds!(piped == input, "what was piped has arrived ({each})");
        let cuts = scene.cutting().cuts() - before;
        holds!(cuts > 10, "it was cut {cuts} times");
    }
    Ok(())
}

async fn a_conversation_goes_on_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let text = "while read x; do echo \"$x$x\"; done; echo end";
    let command = Command::shell(text).stdin_piped();
    let mut process = scene.cut.spawn(command, &cx.sink).await?;
    for n in 0..60 {
        if n % 3 == 0 {
            scene.cutting().cut();
        }
        process.write_stdin(format!("{n}.").as_bytes()).await?;
        if n % 5 == 0 {
            scene.cutting().cut();
        }
        process.write_stdin(b"\n").await?;
        let answer = soon("an answer", process.next_output()).await?;
        same!(answer, Some(Chunk::Stdout(format!("{n}.{n}.\n").into_bytes())));
    }
    // The end of the input is not lost either.
    process.end_stdin().await?;
    scene.cutting().cut();
    let run = soon("the end", process.wait(&scene.cut, &cx.sink)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(0), "end\n"));
    holds!(scene.cutting().cuts() > 20, "it was cut");
    Ok(())
}

async fn a_command_is_started_once_wherever_the_connection_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let mut expected = String::new();
    for n in 0..40 {
        scene.cutting().cut();
        // In the greeting, in the request, in the answer, or after all of it.
        scene.cutting().next([40 + n * 17]);
        let command = Command::shell(format!("echo {n} >> log; echo said; exit 2"));
        let run = soon("a command", scene.cut.exec(command, &cx.sink)).await??;
        same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(2), "said\n"));
        expected += &format!("{n}\n");
    }
    same!(cx.sh(&scene.sandbox, "cat log").await? + "\n", expected);
    holds!(scene.cutting().cuts() > 20, "it was cut");
    let kinds = cx.kinds(&scene.sandbox).await?;
    for kind in ["process_started", "process_exited"] {
        same!(kinds.iter().filter(|known| *known == kind).count(), 41);
    }
    Ok(())
}

async fn detached_output_is_whole_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let expected = numbers(150_000);
    scene.cutting().each(60_001);
    let command = Command::shell("sleep 0.1; seq 1 150000; read code; exit $code");
    let command = command.stdin("4\n").detached();
    let process = soon("a start", scene.cut.spawn(command, &cx.sink)).await??;
    let id = process.id().clone();
    let run = soon("its end", process.wait(&scene.cut, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(4));
    same!((run.stdout.total, run.stdout.is_cut()), (expected.len() as u64, false));
    holds!(run.stdout.head == expected.as_bytes(), "it is whole");
    // Again from the middle, and as a whole from another offset.
    let process = scene.cut.process(&id).await?;
    let mut follow = soon("following", process.follow(500_000, 0)).await??;
    let mut said = Vec::new();
    while let Some(piece) = soon("output", follow.next()).await?? {
        same!(piece.offset, 500_000 + said.len() as u64);
        said.extend(piece.bytes);
    }
    holds!(said == expected.as_bytes()[500_000..], "the rest is whole");
    let read = soon("reading", process.read(OutputStream::Stdout, 100_000, 1 << 20)).await??;
    holds!(read.bytes == expected.as_bytes()[100_000..], "what is read is whole");
    same!(soon("waiting", process.wait(&cx.sink)).await??.outcome, Outcome::Exited(4));
    holds!(scene.cutting().cuts() > 15, "it was cut");
    Ok(())
}

async fn a_detached_command_is_started_once_wherever_the_connection_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let mut expected = String::new();
    for n in 0..30 {
        scene.cutting().cut();
        scene.cutting().next([40 + n * 23]);
        let text = format!("read all; echo {n} $all >> log; exit 5");
        let command = Command::shell(text).stdin("input\n").detached();
        let process = soon("a start", scene.cut.spawn(command, &cx.sink)).await??;
        let run = soon("its end", process.wait(&scene.cut, &cx.sink)).await??;
        same!(run.outcome, Outcome::Exited(5));
        expected += &format!("{n} input\n");
    }
    same!(cx.sh(&scene.sandbox, "cat log").await? + "\n", expected);
    let kinds = cx.kinds(&scene.sandbox).await?;
    for kind in ["process_started", "process_exited"] {
        same!(kinds.iter().filter(|known| *known == kind).count(), 31);
    }
    Ok(())
}

async fn a_command_ends_over_a_connection_that_is_cut_again_and_again(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let command = Command::shell("echo begun; while [ ! -e go ]; do sleep 0.02; done; echo over");
    let running = {
        let cut = scene.cut.clone();
        tokio::spawn(async move { cut.exec(command, &Suppressed).await })
    };
    let before = scene.cutting().cuts();
    let cut_often = async {
        while scene.cutting().cuts() < before + 30 {
            scene.cutting().cut();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("thirty cuts", cut_often).await?;
    cx.sh(&scene.sandbox, "touch go").await?;
    let run = soon("its end", running).await???;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(0), "begun\nover\n"));
    Ok(())
}

async fn a_command_is_lost_when_the_connection_never_comes_back(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let marker = cx.marker();
    let command = Command::shell(format!("echo said; sleep {marker}; :"));
    let running = {
        let cut = scene.cut.clone();
        tokio::spawn(async move { cut.exec(command, &Suppressed).await })
    };
    cx.until_count(&scene.sandbox, &marker, |count| count > 0).await?;
    scene.cutting().sever();
    let asked = scene.cut.processes();
    let (run, asked) = tokio::join!(tokio::time::timeout(LATE, running), asked);
    let run = run.map_err(|_| "it hangs: a command without a connection")???;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    same!(run.stdout.text(), "said\n");
    let error = error_of(asked)?;
    same!((error.kind(), error.is_retryable()), (ErrorKind::Unavailable, true));
    // It is the connection that is gone, and nothing else.
    same!(cx.sh(&scene.sandbox, "cat README").await?, "v1");
    scene.cutting().heal();
    same!(cx.sh(&scene.cut, "cat README").await?, "v1");
    Ok(())
}

async fn questions_are_asked_again_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let marker = cx.marker();
    let command = Command::new("sleep").arg(&marker).detached();
    let id = scene.sandbox.spawn(command, &cx.sink).await?.id().clone();
    for n in 0..12 {
        scene.cutting().cut();
        scene.cutting().next([60 + n * 61, 200 + n * 31]);
        let all = soon("a list", scene.cut.processes()).await??;
        same!(all.iter().filter(|info| info.id == id).count(), 1);
        scene.cutting().cut();
        scene.cutting().next([60 + n * 61, 200 + n * 31]);
        let stats = soon("figures", scene.cut.stats()).await??;
        holds!(stats.usage.pids.is_some(), "{stats:?} has figures");
        scene.cutting().cut();
        scene.cutting().next([60 + n * 61]);
        let info = scene.cut.process(&id).await?.info().await?;
        same!(info.state, ProcessState::Running);
    }
    Ok(())
}

async fn a_kill_arrives_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    for n in 0..8 {
        let marker = cx.marker();
        let command = Command::shell(format!("sleep {marker} & sleep {marker}; :")).detached();
        let id = scene.sandbox.spawn(command, &cx.sink).await?.id().clone();
        cx.until_count(&scene.sandbox, &marker, |count| count >= 2).await?;
        let process = scene.cut.process(&id).await?;
        scene.cutting().cut();
        scene.cutting().next([60 + n * 90]);
        soon("a kill", process.kill(&cx.sink)).await??;
        same!(cx.count(&scene.sandbox, &marker).await?, 0);
        same!(soon("its end", process.wait(&cx.sink)).await??.outcome, Outcome::Cancelled);
    }
    Ok(())
}

async fn a_terminal_has_its_size_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let size = |rows, cols| sandbox_core::TerminalSize { rows, cols };
    let text = "stty -echo; echo ready; while read x; do stty size; done";
    let command = Command::shell(text).pty(size(10, 20)).stdin_piped();
    let mut process = scene.cut.spawn(command, &cx.sink).await?;
    soon("ready", until_said(&mut process, &mut String::new(), "ready\r\n")).await??;
    for rows in 30..40 {
        scene.cutting().cut();
        process.resize(size(rows, 100)).await?;
        scene.cutting().cut();
        process.write_stdin(b"\n").await?;
        let mut said = String::new();
        soon("the size", until_said(&mut process, &mut said, "\n")).await??;
        same!(said, format!("{rows} 100\r\n"));
    }
    Ok(())
}

async fn a_sandbox_is_used_on_while_a_connection_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let mut running = tokio::task::JoinSet::new();
    scene.cutting().each(20_000);
    for n in 0..8 {
        let cut = scene.cut.clone();
        running.spawn(async move {
            for round in 0..5 {
                let text = format!("seq {n} 2000; echo {round}");
                let run = cut.exec(Command::shell(text), &Suppressed).await?;
                let mut expected: String = (n..=2000).map(|k| format!("{k}\n")).collect();
                expected += &format!("{round}\n");
                same!(run.stdout.text(), expected);
            }
            Check::Ok(())
        });
    }
    while let Some(done) = soon("commands on cut connections", running.join_next()).await? {
        done??;
    }
    holds!(scene.cutting().cuts() > 10, "it was cut");
    Ok(())
}

async fn files_are_read_whole_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let contents = numbers(300_000).into_bytes();
    scene.sandbox.files().write("large", &contents, &cx.sink).await?;
    let text = "mkdir many; i=0; while [ $i -lt 1500 ]; do echo > many/$i; i=$((i+1)); done";
    cx.sh(&scene.sandbox, text).await?;
    let files = scene.cut.files();
    let before = scene.cutting().cuts();
    for n in 0..8 {
        scene.cutting().cut();
        scene.cutting().next([300 + n * 200_000, 1_000_000, 70]);
        let read = soon("reading", files.read("large")).await??;
        holds!(read == contents, "it is whole ({n})");
        scene.cutting().cut();
        scene.cutting().next([300 + n * 5_000, 20_000]);
        same!(soon("listing", files.list("many")).await??.len(), 1500);
        scene.cutting().cut();
        scene.cutting().next([60 + n * 70]);
        let metadata = soon("looking", files.metadata("large")).await??;
        same!(metadata.size, contents.len() as u64);
    }
    let cuts = scene.cutting().cuts() - before;
    holds!(cuts > 20, "it was cut {cuts} times");
    Ok(())
}

async fn a_file_is_written_whole_or_not_at_all_over_a_connection_that_is_cut(
    cx: &Context,
) -> Check {
    let scene = Scene::new(cx).await?;
    let files = scene.cut.files();
    let mut old = b"old".to_vec();
    scene.sandbox.files().write("dir/file", &old, &cx.sink).await?;
    let mut failed = 0;
    for n in 0..10 {
        let new = numbers(150_000 + n).into_bytes();
        scene.cutting().cut();
        scene.cutting().next([400 + u64::from(n) * 120_000]);
        let written = soon("writing", files.write("dir/file", &new, &cx.sink)).await?;
        let found = scene.sandbox.files().read("dir/file").await?;
        match written {
            Ok(()) => holds!(found == new, "what is said to be written is there ({n})"),
            Err(error) => {
                same!((error.kind(), error.is_retryable()), (ErrorKind::Unavailable, true));
                holds!(found == old || found == new, "it is the one or the other ({n})");
                failed += 1;
            }
        }
        old = found;
    }
    holds!(failed > 3, "it was cut {failed} times");
    // Nothing half is left beside it.
    let clean = async {
        while scene.sandbox.files().list("dir").await?.len() != 1 {
            crate::context::pause().await;
        }
        Check::Ok(())
    };
    soon("a clean directory", clean).await??;
    scene.cutting().heal();
    files.write("dir/file", "new", &cx.sink).await?;
    same!(files.read("dir/file").await?, b"new");
    Ok(())
}

async fn an_append_is_not_doubled_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let scene = Scene::new(cx).await?;
    let files = scene.cut.files();
    let mut surely = Vec::new();
    for n in 0..30 {
        scene.cutting().cut();
        scene.cutting().next([60 + n * 20]);
        let line = format!("{n}\n");
        if soon("appending", files.append("log", &line, &cx.sink)).await?.is_ok() {
            surely.push(n);
        }
    }
    holds!(surely.len() < 30, "some were cut");
    scene.cutting().heal();
    let said = String::from_utf8(files.read("log").await?)?;
    let there: Vec<u64> = said.lines().flat_map(str::parse).collect();
    let mut once = there.clone();
    once.dedup();
    same!(there, once);
    for n in surely {
        holds!(there.contains(&n), "{n} is said to be there, and is");
    }
    Ok(())
}
