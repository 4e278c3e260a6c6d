//! The history, and what sinks see of it.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use sandbox_core::{
    CollectSink, Command, Consumer, ErrorKind, Known, Outcome, Run, Sandbox, SandboxEvent,
    SinkError, Suppressed, TurnEventSink, TurnId,
};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, soon},
    holds, same,
};

cases!("events";
    [Snapshot] each_call_leaves_exactly_its_documented_kinds,
    [Stop] stop_and_start_leave_exactly_their_documented_kinds,
    [Snapshot] the_history_is_what_the_sink_saw,
    [] a_command_that_cannot_start_says_why_in_the_history,
    [] file_operations_are_in_the_history,
    [] a_sink_that_refuses_the_third_event_gets_it_first_next_time,
    [] a_refused_event_leaves_the_effect_and_carries_the_outcome,
    [] a_sink_that_always_refuses_holds_up_nobody_else,
    [] two_turns_at_once_see_their_own_sandboxes_only,
    [] two_turns_on_one_sandbox_see_their_own_calls_only,
    [] suppressed_events_are_not_told_to_the_next_sink,
    [] a_history_can_be_followed_from_another_manager,
    [] what_a_command_is_given_in_its_environment_is_not_in_the_history,
);

/// The kinds that a call has left, the last of them.
async fn since(cx: &Context, sandbox: &Sandbox, seen: &mut usize) -> Check<String> {
    let kinds = cx.kinds(sandbox).await?;
    let new = kinds[*seen..].join(" ");
    *seen = kinds.len();
    Ok(new)
}

async fn each_call_leaves_exactly_its_documented_kinds(cx: &Context) -> Check {
    let (sandbox, seen) = (cx.sandbox().await?, &mut 0);
    same!(since(cx, &sandbox, seen).await?, "requested provisioning ready");
    cx.sh(&sandbox, "true").await?;
    same!(since(cx, &sandbox, seen).await?, "process_started process_exited");
    let snapshot = sandbox.snapshot("s", &cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "snapshot_requested snapshotted");
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "rewind_requested rewound");
    let fork = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "forked");
    same!(since(cx, &fork, &mut 0).await?, "requested provisioning ready");
    fork.destroy(&cx.sink).await?;
    let other = sandbox.snapshot("t", &cx.sink).await?;
    sandbox.delete_snapshot(&snapshot.id, &cx.sink).await?;
    let kinds = "snapshot_requested snapshotted snapshot_delete_requested snapshot_deleted";
    same!(since(cx, &sandbox, seen).await?, kinds);
    same!(sandbox.snapshots().await?.iter().map(|s| &s.id).collect::<Vec<_>>(), [&other.id]);
    sandbox.destroy(&cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "destroying destroyed");
    // What changes nothing leaves nothing.
    sandbox.destroy(&cx.sink).await?;
    sandbox.info().await?;
    cx.manager.list().await?;
    same!(since(cx, &sandbox, seen).await?, "");
    Ok(())
}

async fn stop_and_start_leave_exactly_their_documented_kinds(cx: &Context) -> Check {
    let (sandbox, seen) = (cx.sandbox().await?, &mut 3);
    sandbox.stop(&cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "stop_requested stopped");
    sandbox.stop(&cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "");
    sandbox.start(&cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "start_requested started");
    sandbox.recreate(&cx.sink).await?;
    same!(since(cx, &sandbox, seen).await?, "provisioning ready");
    Ok(())
}

async fn the_history_is_what_the_sink_saw(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for n in 0..5 {
        cx.sh(&sandbox, &format!("echo {n} > file")).await?;
    }
    sandbox.files().write("other", "x", &cx.sink).await?;
    let snapshot = sandbox.snapshot("s", &cx.sink).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    sandbox.destroy(&cx.sink).await?;
    let seen = cx.sink.events();
    let written = cx.another_manager().await?.history(sandbox.id(), 0).await?;
    same!(seen.len(), written.len());
    for (seen, written) in seen.iter().zip(&written) {
        same!(seen, written);
    }
    for (n, event) in written.iter().enumerate() {
        same!(event.seq, n as u64 + 1);
        same!(event.turn, Some(TurnId::new("turn")));
        same!(event.consumer, Consumer::agent("conformance").run("1"));
        same!(&event.sandbox_id, sandbox.id());
    }
    same!(written.iter().map(|event| &event.id).collect::<BTreeSet<_>>().len(), written.len());
    let times = written.iter().map(|event| event.at);
    holds!(times.clone().zip(times.skip(1)).all(|(a, b)| a <= b), "time goes on");
    let half = cx.manager.history(sandbox.id(), 5).await?;
    same!(half.as_slice(), &written[5..]);
    Ok(())
}

async fn a_command_that_cannot_start_says_why_in_the_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    error_of(cx.run(&sandbox, Command::new("./nothing").arg("a b")).await)?;
    let run = cx.run(&sandbox, Command::shell("exit 7")).await?;
    let history = cx.manager.history(sandbox.id(), 3).await?;
    let known: Vec<&Known> = history.iter().filter_map(SandboxEvent::known).collect();
    let [
        Known::ProcessStarted { process: first, argv, .. },
        Known::ProcessExited { process, outcome: None, error: Some(error) },
        Known::ProcessStarted { .. },
        Known::ProcessExited { process: second, outcome: Some(Outcome::Exited(7)), error: None },
    ] = known.as_slice()
    else {
        return Err(format!("the history is {known:?}").into());
    };
    same!(process, first);
    same!(argv.join("|"), "./nothing|a b");
    holds!(error.contains("./nothing"), "{error} names the program");
    same!(second, &run.process);
    Ok(())
}

async fn file_operations_are_in_the_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    files.write("a", "1", &cx.sink).await?;
    files.rename("a", "b", &cx.sink).await?;
    files.remove("b", &cx.sink).await?;
    files.list(".").await?;
    let mut operations = Vec::new();
    for event in cx.manager.history(sandbox.id(), 3).await? {
        let Some(Known::FileOperation { operation, path }) = event.known() else {
            return Err(format!("{event:?} is none").into());
        };
        operations.push(format!("{operation} {path}"));
    }
    same!(operations, ["write a", "rename a", "remove b"]);
    Ok(())
}

/// Takes so many events, refuses one, and takes all others.
struct Refuses {
    left: AtomicUsize,
    taken: CollectSink,
}

impl Refuses {
    fn after(events: usize) -> Self {
        let taken = CollectSink::new(TurnId::new("refuses"));
        Self { left: AtomicUsize::new(events), taken }
    }
}

#[async_trait]
impl TurnEventSink for Refuses {
    fn turn(&self) -> Option<TurnId> {
        self.taken.turn()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(SinkError::new("not now"));
        }
        self.taken.emit(event).await
    }
}

async fn a_sink_that_refuses_the_third_event_gets_it_first_next_time(cx: &Context) -> Check {
    let refuses = Refuses::after(2);
    let error = error_of(cx.manager.acquire("main", cx.request(), &refuses).await)?;
    same!(error.kind(), ErrorKind::EventDelivery);
    holds!(error.to_string().contains("not now"), "{error} says what the sink said");
    same!(refuses.taken.kinds(), ["requested", "provisioning"]);
    let sandbox: Sandbox = error.take_outcome().ok_or("the outcome is missing")?;
    same!(cx.kinds(&sandbox).await?, ["requested", "provisioning", "ready"]);
    cx.sh(&sandbox, "true").await?;
    same!(cx.sink.kinds(), ["ready", "process_started", "process_exited"]);
    let seq: Vec<u64> = cx.sink.events().iter().map(|event| event.seq).collect();
    same!(seq, [3, 4, 5]);
    same!(cx.sink.events()[0].turn, Some(TurnId::new("refuses")));
    Ok(())
}

async fn a_refused_event_leaves_the_effect_and_carries_the_outcome(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let refuses = Refuses::after(0);
    let command = Command::shell("echo said; echo done > done");
    let error = error_of(sandbox.exec(command, &refuses).await)?;
    same!(error.kind(), ErrorKind::EventDelivery);
    let run: Run = error.take_outcome().ok_or("the outcome is missing")?;
    same!(run.stdout.text(), "said\n");
    let refuses = Refuses::after(1);
    // It takes what is owed first, and of that one event only.
    let error = error_of(sandbox.files().write("more", "x", &refuses).await)?;
    same!(error.kind(), ErrorKind::EventDelivery);
    same!(refuses.taken.kinds(), ["process_started"]);
    same!(cx.sh(&sandbox, "cat done more").await?, "done\nx");
    let tail: Vec<u64> = cx.sink.events()[3..].iter().map(|event| event.seq).collect();
    same!(tail, [5, 6, 7, 8]);
    Ok(())
}

async fn a_sink_that_always_refuses_holds_up_nobody_else(cx: &Context) -> Check {
    struct Never;
    #[async_trait]
    impl TurnEventSink for Never {
        fn turn(&self) -> Option<TurnId> {
            None
        }
        async fn emit(&self, _: &SandboxEvent) -> Result<(), SinkError> {
            Err(SinkError::new("never"))
        }
    }
    let (one, other) = (cx.sandbox().await?, cx.sandbox().await?);
    for _ in 0..10 {
        let error = error_of(one.exec(Command::new("true"), &Never).await)?;
        same!(error.kind(), ErrorKind::EventDelivery);
        cx.sh(&other, "true").await?;
    }
    let seen = |sandbox: &Sandbox| {
        let events = cx.sink.events();
        events
            .into_iter()
            .filter(|e| e.sandbox_id == *sandbox.id())
            .map(|e| e.seq)
            .collect::<Vec<_>>()
    };
    same!(seen(&other), (1..=23).collect::<Vec<_>>());
    same!(seen(&one), [1, 2, 3]);
    // All that is owed comes at last, in order.
    cx.sh(&one, "true").await?;
    same!(seen(&one), (1..=25).collect::<Vec<_>>());
    Ok(())
}

async fn two_turns_at_once_see_their_own_sandboxes_only(cx: &Context) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..2 {
        let (manager, request) = (cx.manager.clone(), cx.request());
        let sink = Arc::new(CollectSink::new(TurnId::new(format!("turn {n}"))));
        tasks.spawn(async move {
            let sandbox = manager.create(request, &sink).await?;
            for _ in 0..10 {
                sandbox.exec(Command::new("true"), &sink).await?;
            }
            Ok::<_, sandbox_core::Error>((sandbox, sink))
        });
    }
    while let Some(done) = tasks.join_next().await {
        let (sandbox, sink) = done??;
        same!(sink.events().len(), 23);
        for (n, event) in sink.events().iter().enumerate() {
            same!(&event.sandbox_id, sandbox.id());
            same!(event.turn, sink.turn());
            same!(event.seq, n as u64 + 1);
        }
    }
    Ok(())
}

async fn two_turns_on_one_sandbox_see_their_own_calls_only(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..2 {
        let sandbox = sandbox.clone();
        let sink = Arc::new(CollectSink::new(TurnId::new(format!("turn {n}"))));
        tasks.spawn(async move {
            for _ in 0..20 {
                sandbox.exec(Command::new("true"), &sink).await?;
            }
            Ok::<_, sandbox_core::Error>(sink)
        });
    }
    let mut seen = BTreeSet::new();
    while let Some(done) = tasks.join_next().await {
        let sink = done??;
        let seq: Vec<u64> = sink.events().iter().map(|event| event.seq).collect();
        same!(seq.len(), 40);
        holds!(seq.is_sorted(), "{seq:?} is in order");
        holds!(sink.events().iter().all(|event| event.turn == sink.turn()), "they are its own");
        seen.extend(seq);
    }
    same!(seen.into_iter().collect::<Vec<_>>(), (4..=83).collect::<Vec<_>>());
    Ok(())
}

async fn suppressed_events_are_not_told_to_the_next_sink(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request(), &Suppressed).await?;
    sandbox.exec(Command::new("true"), &Suppressed).await?;
    cx.sh(&sandbox, "true").await?;
    same!(cx.sink.kinds(), ["process_started", "process_exited"]);
    let history = cx.manager.history(sandbox.id(), 0).await?;
    same!(history.len(), 7);
    holds!(history[..5].iter().all(|event| event.turn.is_none()), "they are of no turn");
    Ok(())
}

async fn a_history_can_be_followed_from_another_manager(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let other = cx.another_manager().await?;
    let mut watch = other.watch(sandbox.id(), 0);
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(soon("a record", watch.next()).await??);
    }
    cx.sh(&sandbox, "true").await?;
    for _ in 0..2 {
        seen.push(soon("a new record", watch.next()).await??);
    }
    same!(seen, cx.sink.events());
    Ok(())
}

async fn what_a_command_is_given_in_its_environment_is_not_in_the_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let value = "c0nf1dent1al-value";
    let command = Command::shell("echo ${#TOKEN}").env("TOKEN", value).stdin(value);
    let run = cx.run(&sandbox, command).await?;
    same!(run.stdout.text().trim(), value.len().to_string());
    sandbox.files().write("file", value, &cx.sink).await?;
    let history = serde_json::to_string(&cx.manager.history(sandbox.id(), 0).await?)?;
    holds!(!history.contains(value), "the value is not in {history}");
    holds!(history.contains("${#TOKEN}"), "what was run is");
    Ok(())
}
