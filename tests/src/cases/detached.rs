//! Processes that go on without their harness.

use std::sync::Arc;

use sandbox_core::{
    Chunk, CollectSink, Command, Error, ErrorKind, Known, Outcome, OutputStream, ProcessEnd,
    ProcessId, ProcessRef, ProcessState, Sandbox, SandboxEvent, SandboxManager, Suppressed,
};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, is_lost, pause, soon},
    holds, same,
};

cases!("detached";
    [] another_manager_reads_waits_and_has_the_exit_code,
    [] its_output_is_kept_up_to_its_limit_and_the_limit_is_told,
    [] it_is_followed_while_it_runs,
    [] a_dropped_handle_leaves_it_alone,
    [] its_end_is_recorded_once_whoever_sees_it,
    [] an_end_that_nobody_saw_is_recorded_by_the_next_manager,
    [] one_key_starts_one_process,
    [] one_key_starts_one_process_from_two_managers_at_once,
    [] a_key_of_another_command_is_refused,
    [] a_key_whose_start_failed_is_free_again,
    [] what_makes_no_sense_is_refused_and_in_no_history,
    [] processes_are_listed,
    [] it_is_killed_with_its_tree_by_another_manager,
    [] it_is_signalled_by_another_manager,
    [] its_input_is_all_there_before_its_harness_may_go,
    [] what_is_forgotten_is_gone,
    [Snapshot] a_rewind_loses_it_and_frees_its_key,
    [Snapshot] a_snapshot_keeps_what_has_ended,
    [Stop] a_stop_loses_it_and_keeps_what_had_ended_in_the_history,
    [] a_destroyed_sandbox_has_an_end_for_each,
);

fn detached(text: &str) -> Command {
    Command::shell(text).detached()
}

/// The same sandbox, as another process's manager has it.
async fn elsewhere(cx: &Context, sandbox: &Sandbox) -> Check<(SandboxManager, Sandbox)> {
    let manager = cx.another_manager().await?;
    let same = manager.open(sandbox.id().as_str()).await?;
    Ok((manager, same))
}

async fn end(process: &ProcessRef) -> Check<ProcessEnd> {
    Ok(soon("the end of a detached process", process.wait(&Suppressed)).await??)
}

/// How often a process is in the history as started, and with which outcomes as ended.
async fn recorded(
    cx: &Context,
    sandbox: &Sandbox,
    id: &ProcessId,
) -> Check<(usize, Vec<Option<Outcome>>)> {
    let (mut started, mut ended) = (0, Vec::new());
    for event in cx.manager.history(sandbox.id(), 0).await? {
        match event.known() {
            Some(Known::ProcessStarted { process, detached, .. }) if process == id => {
                holds!(*detached, "it is said to be detached");
                started += 1;
            }
            Some(Known::ProcessExited { process, outcome, .. }) if process == id => {
                ended.push(outcome.clone());
            }
            _ => {}
        }
    }
    Ok((started, ended))
}

async fn another_manager_reads_waits_and_has_the_exit_code(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let expected: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    let text = "seq 1 50000; echo problem >&2; while [ ! -e go ]; do sleep 0.02; done; \
                seq 50001 100000; exit 7";
    // A manager of its own, which is gone before the process ends.
    let id = {
        let (manager, sandbox) = elsewhere(cx, &sandbox).await?;
        let process = sandbox.spawn(detached(text), &Suppressed).await?;
        let id = process.id().clone();
        drop((process, sandbox, manager));
        id
    };
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let process = same.process(&id).await?;
    let info = process.info().await?;
    same!((info.detached, info.state), (true, ProcessState::Running));
    same!(info.argv, ["/bin/sh", "-c", text]);
    cx.sh(&sandbox, "touch go").await?;
    let ended = end(&process).await?;
    same!((ended.outcome, ended.stdout), (Outcome::Exited(7), expected.len() as u64));
    // From the beginning, and from the middle.
    for offset in [0, 1, 300_000, expected.len() as u64 - 1, expected.len() as u64] {
        let read = soon("reading", process.read(OutputStream::Stdout, offset, 1 << 20)).await??;
        same!(read.offset, offset);
        holds!(read.bytes == expected.as_bytes()[offset as usize..], "all after {offset} is there");
    }
    let some = process.read(OutputStream::Stdout, 10, 5).await?;
    same!((some.offset, some.bytes.as_slice()), (10, &expected.as_bytes()[10..15]));
    let errors = process.read(OutputStream::Stderr, 0, 100).await?;
    same!(errors.bytes, b"problem\n");
    same!(recorded(cx, &sandbox, &id).await?, (1, vec![Some(Outcome::Exited(7))]));
    Ok(())
}

async fn its_output_is_kept_up_to_its_limit_and_the_limit_is_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    let total = expected.len() as u64;
    // Below and above what is kept in memory.
    for limit in [0, 1000, 600_000] {
        let command = Command::new("seq").arg("200000").detached().kept_output(limit);
        let id = sandbox.spawn(command, &cx.sink).await?.id().clone();
        let process = sandbox.process(&id).await?;
        same!(end(&process).await?.outcome, Outcome::Exited(0));
        let kept = process.info().await?.stdout;
        same!((kept.begin, kept.end, kept.limit), (total - limit, total, limit));
        let read = process.read(OutputStream::Stdout, 0, 1 << 20).await?;
        same!(read.offset, total - limit);
        holds!(expected.as_bytes().ends_with(&read.bytes), "the newest are kept");
        same!(read.bytes.len() as u64, limit);
    }
    Ok(())
}

async fn it_is_followed_while_it_runs(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "echo one; while [ ! -e a ]; do sleep 0.02; done; echo two >&2; \
                while [ ! -e b ]; do sleep 0.02; done; echo three";
    let mut process = sandbox.spawn(detached(text), &cx.sink).await?;
    let next = soon("the first line", process.next_output()).await?;
    same!(next, Some(Chunk::Stdout(b"one\n".to_vec())));
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let mut follow = same.process(process.id()).await?.follow(2, 0).await?;
    let piece = soon("what was said", follow.next()).await??.ok_or("it has ended")?;
    same!((piece.stream, piece.offset), (OutputStream::Stdout, 2));
    same!(piece.bytes, b"e\n");
    cx.sh(&sandbox, "touch a").await?;
    let piece = soon("the second line", follow.next()).await??.ok_or("it has ended")?;
    same!((piece.stream, piece.offset), (OutputStream::Stderr, 0));
    cx.sh(&sandbox, "touch b").await?;
    let piece = soon("the third line", follow.next()).await??.ok_or("it has ended")?;
    same!((piece.offset, piece.bytes.as_slice()), (4, &b"three\n"[..]));
    same!(soon("the end", follow.next()).await??, None);
    let run = soon("the end", process.wait(&sandbox, &cx.sink)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(0), "three\n"));
    let beyond = same.process(&run.process).await?.follow(1000, 0).await;
    same!(error_of(beyond)?.kind(), ErrorKind::InvalidSpec);
    Ok(())
}

async fn a_dropped_handle_leaves_it_alone(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (kept, control) = (cx.marker(), cx.marker());
    let process = sandbox.spawn(Command::new("sleep").arg(&kept).detached(), &cx.sink).await?;
    let other = sandbox.spawn(Command::new("sleep").arg(&control), &cx.sink).await?;
    cx.until_count(&sandbox, &kept, |count| count == 1).await?;
    cx.until_count(&sandbox, &control, |count| count == 1).await?;
    let id = process.id().clone();
    drop((process, other));
    // The control: one that is not detached ends.
    cx.until_count(&sandbox, &control, |count| count == 0).await?;
    cx.until_count(&sandbox, &kept, |count| count == 1).await?;
    same!(sandbox.process(&id).await?.info().await?.state, ProcessState::Running);
    // Waiting for it and not waiting any more changes nothing either.
    let waiting = tokio::spawn({
        let process = sandbox.process(&id).await?;
        async move { process.wait(&Suppressed).await }
    });
    tokio::task::yield_now().await;
    waiting.abort();
    let _ = waiting.await;
    cx.until_count(&sandbox, &kept, |count| count == 1).await?;
    Ok(())
}

async fn its_end_is_recorded_once_whoever_sees_it(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let process = sandbox.spawn(detached("read x < /dev/null; exit 3"), &cx.sink).await?;
    let id = process.id().clone();
    let others = Arc::new(CollectSink::default());
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (manager, same) = elsewhere(cx, &sandbox).await?;
        let (id, others) = (id.clone(), Arc::clone(&others));
        waiting.spawn(async move {
            let end = same.process(&id).await?.wait(&*others).await?;
            // Whatever this manager recorded by itself is told with its next call.
            same.exec(Command::new("true"), &*others).await?;
            drop(manager);
            Ok::<_, Error>(end)
        });
    }
    let run = soon("the end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(3));
    while let Some(end) = soon("the others", waiting.join_next()).await? {
        same!(end??.outcome, Outcome::Exited(3));
    }
    sandbox.processes().await?;
    same!(recorded(cx, &sandbox, &id).await?, (1, vec![Some(Outcome::Exited(3))]));
    cx.sh(&sandbox, "true").await?;
    let is_its_end = |event: &&SandboxEvent| match event.known() {
        Some(Known::ProcessExited { process, .. }) => *process == id,
        _ => false,
    };
    let told = [cx.sink.events(), others.events()].concat();
    same!(told.iter().filter(is_its_end).count(), 1);
    Ok(())
}

async fn an_end_that_nobody_saw_is_recorded_by_the_next_manager(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let id = {
        let (manager, same) = elsewhere(cx, &sandbox).await?;
        let text = "while [ ! -e go ]; do sleep 0.02; done; exit 5";
        let process = same.spawn(detached(text), &Suppressed).await?;
        let id = process.id().clone();
        drop((process, same, manager));
        id
    };
    // Whatever tells the guest tells no manager of the end.
    cx.sh(&sandbox, "touch go").await?;
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let ended = async {
        loop {
            let all = same.processes().await?;
            let mine = all.into_iter().find(|info| info.id == id).ok_or("it is not listed")?;
            if let ProcessState::Ended(end) = mine.state {
                return Check::Ok(end.outcome);
            }
            pause().await;
        }
    };
    same!(soon("its end", ended).await??, Outcome::Exited(5));
    same!(recorded(cx, &sandbox, &id).await?, (1, vec![Some(Outcome::Exited(5))]));
    Ok(())
}

async fn one_key_starts_one_process(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = || detached("echo started >> log; echo said; exit 4").key("once");
    let first = sandbox.spawn(command(), &cx.sink).await?;
    let second = sandbox.spawn(command(), &cx.sink).await?;
    same!(first.id(), second.id());
    let id = first.id().clone();
    for process in [first, second] {
        let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
        same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(4), "said\n"));
    }
    // Now that it has ended as well, and for another manager.
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let third = same.spawn(command(), &cx.sink).await?;
    same!(third.id(), &id);
    let run = soon("its end", third.wait(&same, &cx.sink)).await??;
    same!((run.outcome, run.stdout.text().as_ref()), (Outcome::Exited(4), "said\n"));
    same!(cx.sh(&sandbox, "cat log").await?, "started");
    same!(recorded(cx, &sandbox, &id).await?, (1, vec![Some(Outcome::Exited(4))]));
    // Another key is another process.
    let other = sandbox.spawn(command().key("twice"), &cx.sink).await?;
    holds!(*other.id() != id, "it is another one");
    soon("its end", other.wait(&sandbox, &cx.sink)).await??;
    same!(cx.sh(&sandbox, "cat log").await?, "started\nstarted");
    Ok(())
}

async fn one_key_starts_one_process_from_two_managers_at_once(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for round in 0..5 {
        let mut starting = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let (manager, same) = elsewhere(cx, &sandbox).await?;
            for _ in 0..4 {
                let (manager, same) = (manager.clone(), same.clone());
                let text = format!("echo {round} >> log; exit 9");
                let command = detached(&text).key(format!("round {round}"));
                starting.spawn(async move {
                    let process = same.spawn(command, &Suppressed).await?;
                    let run = process.wait(&same, &Suppressed).await;
                    drop(manager);
                    run
                });
            }
        }
        let mut ids = Vec::new();
        while let Some(run) = soon("eight starts", starting.join_next()).await? {
            let run = run??;
            same!(run.outcome, Outcome::Exited(9));
            ids.push(run.process);
        }
        ids.dedup();
        same!(ids.len(), 1);
        same!(recorded(cx, &sandbox, &ids[0]).await?, (1, vec![Some(Outcome::Exited(9))]));
    }
    same!(cx.sh(&sandbox, "cat log").await?, "0\n1\n2\n3\n4");
    Ok(())
}

async fn a_key_of_another_command_is_refused(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    sandbox.spawn(detached("exit 0").key("k"), &cx.sink).await?;
    let error = error_of(sandbox.spawn(detached("exit 1").key("k"), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    Ok(())
}

async fn a_key_whose_start_failed_is_free_again(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = || Command::new("./later").detached().key("k");
    let error = error_of(sandbox.spawn(command(), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    cx.sh(&sandbox, "printf '#!/bin/sh\\nexit 6\\n' > later; chmod 755 later").await?;
    let process = sandbox.spawn(command(), &cx.sink).await?;
    let id = process.id().clone();
    let run = soon("its end", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Exited(6));
    same!(recorded(cx, &sandbox, &id).await?, (2, vec![None, Some(Outcome::Exited(6))]));
    Ok(())
}

async fn what_makes_no_sense_is_refused_and_in_no_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let before = cx.kinds(&sandbox).await?.len();
    for command in [
        Command::new("cat").stdin_piped().detached(),
        Command::new("cat").stdin(vec![b'x'; (1 << 20) + 1]).detached(),
        Command::new("true").detached().kept_output(u64::MAX),
        Command::new("true").key("k"),
    ] {
        let error = error_of(sandbox.spawn(command, &cx.sink).await)?;
        same!(error.kind(), ErrorKind::InvalidSpec);
    }
    let error = error_of(cx.run(&sandbox, Command::new("true").detached()).await)?;
    same!(error.kind(), ErrorKind::InvalidSpec);
    same!(cx.kinds(&sandbox).await?.len(), before);
    let unknown = error_of(sandbox.process(&ProcessId::new()).await)?;
    same!(unknown.kind(), ErrorKind::NotFound);
    Ok(())
}

async fn processes_are_listed(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    same!(sandbox.processes().await?, []);
    let marker = cx.marker();
    let long = sandbox.spawn(Command::new("sleep").arg(&marker).detached(), &cx.sink).await?;
    let mut short = sandbox.spawn(detached("echo said; exit 2"), &cx.sink).await?;
    while soon("its output", short.next_output()).await?.is_some() {}
    let plain = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let all = same.processes().await?;
    let ids: Vec<&ProcessId> = all.iter().map(|info| &info.id).collect();
    same!(ids.len(), 3);
    for id in [long.id(), short.id(), plain.id()] {
        holds!(ids.contains(&id), "{id} is listed");
    }
    let of = |id: &ProcessId| all.iter().find(|info| info.id == *id).ok_or("it is not listed");
    let info = of(long.id())?;
    same!((info.detached, &info.state, info.pid), (true, &ProcessState::Running, long.pid()));
    same!(info.argv, ["sleep", &marker]);
    holds!(!of(plain.id())?.detached, "the plain one is not detached");
    let ended = of(short.id())?;
    same!((ended.stdout.begin, ended.stdout.end), (0, 5));
    match &ended.state {
        ProcessState::Ended(end) => same!((&end.outcome, end.stdout), (&Outcome::Exited(2), 5)),
        other => return Err(format!("{other:?} is no end").into()),
    }
    // What it says can be put behind HTTP.
    let text = serde_json::to_string(&all)?;
    same!(serde_json::from_str::<Vec<sandbox_core::ProcessInfo>>(&text)?, all);
    // The output of one that is not detached is its caller's.
    let error = error_of(same.process(plain.id()).await?.follow(0, 0).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    Ok(())
}

async fn it_is_killed_with_its_tree_by_another_manager(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (marker, other) = (cx.marker(), cx.marker());
    let text = format!("trap '' TERM; (sleep {marker} &); sleep {marker} & sleep {marker}; :");
    let process = sandbox.spawn(detached(&text), &cx.sink).await?;
    let beside = sandbox.spawn(Command::new("sleep").arg(&other).detached(), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count >= 4).await?;
    cx.until_count(&sandbox, &other, |count| count == 1).await?;
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let killed = same.process(process.id()).await?;
    soon("a kill", killed.kill(&cx.sink)).await??;
    same!(cx.count(&sandbox, &marker).await?, 0);
    cx.until_count(&sandbox, &other, |count| count == 1).await?;
    same!(end(&killed).await?.outcome, Outcome::Cancelled);
    // A second time it is no error.
    soon("a second kill", killed.kill(&cx.sink)).await??;
    same!(recorded(cx, &sandbox, process.id()).await?, (1, vec![Some(Outcome::Cancelled)]));
    // One that is not detached can be killed as well; its caller hears of it.
    let plain = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    soon("a kill", same.process(plain.id()).await?.kill(&cx.sink)).await??;
    let run = soon("its end", plain.wait(&sandbox, &cx.sink)).await??;
    same!(run.outcome, Outcome::Cancelled);
    beside.kill().await?;
    Ok(())
}

async fn it_is_signalled_by_another_manager(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "trap 'echo caught; exit 8' USR1; echo ready; while :; do sleep 0.02; done";
    let mut process = sandbox.spawn(detached(text), &cx.sink).await?;
    soon("ready", process.next_output()).await?;
    let (_manager, same) = elsewhere(cx, &sandbox).await?;
    let there = same.process(process.id()).await?;
    same!(error_of(there.signal(99).await)?.kind(), ErrorKind::InvalidSpec);
    there.signal(10).await?;
    let ended = end(&there).await?;
    same!(ended.outcome, Outcome::Exited(8));
    same!(error_of(there.signal(10).await)?.kind(), ErrorKind::NotFound);
    same!(there.read(OutputStream::Stdout, 0, 100).await?.bytes, b"ready\ncaught\n");
    Ok(())
}

async fn its_input_is_all_there_before_its_harness_may_go(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let input = vec![b'i'; 1 << 20];
    let id = {
        let (manager, same) = elsewhere(cx, &sandbox).await?;
        let text = "while [ ! -e go ]; do sleep 0.02; done; wc -c";
        let command = detached(text).stdin(input);
        let process = soon("the start", same.spawn(command, &Suppressed)).await??;
        let id = process.id().clone();
        drop((process, same, manager));
        id
    };
    cx.sh(&sandbox, "touch go").await?;
    let process = sandbox.process(&id).await?;
    same!(end(&process).await?.outcome, Outcome::Exited(0));
    let read = process.read(OutputStream::Stdout, 0, 100).await?;
    same!(String::from_utf8_lossy(&read.bytes).trim(), "1048576");
    Ok(())
}

async fn what_is_forgotten_is_gone(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let command = || detached("echo said").key("k");
    let id = sandbox.spawn(command(), &cx.sink).await?.id().clone();
    let process = sandbox.process(&id).await?;
    end(&process).await?;
    process.forget().await?;
    process.forget().await?;
    let error = error_of(process.read(OutputStream::Stdout, 0, 10).await)?;
    same!(error.kind(), ErrorKind::Lost);
    // Its key still stands for it.
    same!(error_of(sandbox.spawn(command(), &cx.sink).await)?.kind(), ErrorKind::Lost);
    same!(recorded(cx, &sandbox, &id).await?, (1, vec![Some(Outcome::Exited(0))]));
    let runs = sandbox.spawn(Command::new("sleep").arg(&marker).detached(), &cx.sink).await?;
    let error = error_of(sandbox.process(runs.id()).await?.forget().await)?;
    same!(error.kind(), ErrorKind::InvalidSpec);
    Ok(())
}

async fn a_rewind_loses_it_and_frees_its_key(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("first", &cx.sink).await?;
    let marker = cx.marker();
    let command = || Command::new("sleep").arg(&marker).detached().key("server");
    let process = sandbox.spawn(command(), &cx.sink).await?;
    let id = process.id().clone();
    let ended = sandbox.spawn(detached("exit 1"), &cx.sink).await?;
    let ended_id = ended.id().clone();
    soon("its end", ended.wait(&sandbox, &cx.sink)).await??;
    let mut follow = sandbox.process(&id).await?.follow(0, 0).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    let run = soon("a process that was rewound", process.wait(&sandbox, &cx.sink)).await??;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    same!(error_of(soon("its output", follow.next()).await?)?.kind(), ErrorKind::Lost);
    same!(error_of(sandbox.process(&id).await)?.kind(), ErrorKind::Lost);
    let (started, outcomes) = recorded(cx, &sandbox, &id).await?;
    same!((started, outcomes.len()), (1, 1));
    holds!(outcomes[0].as_ref().is_some_and(is_lost), "{outcomes:?} is lost");
    same!(recorded(cx, &sandbox, &ended_id).await?, (1, vec![Some(Outcome::Exited(1))]));
    same!(sandbox.processes().await?, []);
    let again = sandbox.spawn(command(), &cx.sink).await?;
    holds!(*again.id() != id, "it is another one");
    cx.until_count(&sandbox, &marker, |count| count == 1).await
}

async fn a_snapshot_keeps_what_has_ended(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let runs = sandbox.spawn(Command::new("sleep").arg(&marker).detached(), &cx.sink).await?;
    let mut ended = sandbox.spawn(detached("seq 1 100000; exit 3"), &cx.sink).await?;
    while soon("its output", ended.next_output()).await?.is_some() {}
    sandbox.snapshot("while one runs", &cx.sink).await?;
    runs.kill().await?;
    sandbox.snapshot("when none does", &cx.sink).await?;
    let process = sandbox.process(ended.id()).await?;
    same!(end(&process).await?.outcome, Outcome::Exited(3));
    same!(process.read(OutputStream::Stdout, 588_888, 100).await?.bytes, b"100000\n");
    // What is kept of it is in no snapshot.
    let fork = sandbox.snapshots().await?.pop().ok_or("there is no snapshot")?;
    let fork = cx.manager.fork(&fork.id, None, &cx.sink).await?;
    same!(fork.processes().await?, []);
    same!(cx.sh(&fork, "cat README").await?, "v1");
    Ok(())
}

async fn a_stop_loses_it_and_keeps_what_had_ended_in_the_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let (id, ended) = {
        // Whose ends no living manager waits for.
        let (manager, same) = elsewhere(cx, &sandbox).await?;
        let process = same.spawn(Command::new("sleep").arg(&marker).detached(), &cx.sink).await?;
        let ended = same.spawn(detached("echo > done; exit 2"), &cx.sink).await?;
        let ids = (process.id().clone(), ended.id().clone());
        drop((process, ended, same, manager));
        ids
    };
    cx.sh(&sandbox, "while [ ! -e done ]; do sleep 0.02; done").await?;
    // Until the guest has seen it end, which it was about to.
    cx.until_count(&sandbox, "echo > done", |count| count == 0).await?;
    sandbox.stop(&cx.sink).await?;
    let (started, outcomes) = recorded(cx, &sandbox, &id).await?;
    same!((started, outcomes.len()), (1, 1));
    holds!(outcomes[0].as_ref().is_some_and(is_lost), "{outcomes:?} is lost");
    same!(recorded(cx, &sandbox, &ended).await?.1.len(), 1);
    same!(error_of(sandbox.processes().await)?.kind(), ErrorKind::Conflict);
    sandbox.start(&cx.sink).await?;
    same!(error_of(sandbox.process(&id).await)?.kind(), ErrorKind::Lost);
    same!(sandbox.processes().await?, []);
    Ok(())
}

async fn a_destroyed_sandbox_has_an_end_for_each(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker).detached(), &cx.sink).await?;
    let id = process.id().clone();
    drop(process);
    sandbox.destroy(&cx.sink).await?;
    let (started, outcomes) = recorded(cx, &sandbox, &id).await?;
    same!((started, outcomes.len()), (1, 1));
    holds!(outcomes[0].as_ref().is_some_and(is_lost), "{outcomes:?} is lost");
    same!(cx.kinds(&sandbox).await?.last().map(String::as_str), Some("destroyed"));
    Ok(())
}
