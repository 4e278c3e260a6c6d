//! Instances that vanish or die without anybody having asked for it.

use std::sync::Arc;

use rustix::process::Signal;
use sandbox_core::{Command, ErrorKind, OnLost, Sandbox, SandboxState, Suppressed};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, is_lost, is_ready, soon},
    decorate::{Decorated, Gathering},
    holds, same,
};

cases!("loss";
    [] a_vanished_instance_is_lost_and_recorded_once,
    [] a_killed_guest_is_lost_and_recorded_once,
    [] a_command_in_a_dying_sandbox_ends_as_lost,
    [] another_manager_notices_the_loss_when_it_is_built,
    [] one_that_does_not_answer_holds_up_no_other,
    [Snapshot] a_lost_sandbox_comes_back_with_its_latest_snapshot,
    [Snapshot] a_lost_sandbox_without_a_policy_can_be_rewound,
    [] a_lost_sandbox_is_made_anew_where_that_is_asked_for,
    [] many_calls_that_notice_record_one_loss,
    [] a_lost_sandbox_can_be_destroyed,
);

/// The next call says `Lost`, and the history has it once, however often one asks.
async fn is_lost_once(cx: &Context, sandbox: &Sandbox) -> Check {
    for _ in 0..3 {
        let called = soon("a call", cx.run(sandbox, Command::new("true"))).await?;
        same!(error_of(called)?.kind(), ErrorKind::Lost);
    }
    same!(sandbox.info().await?.state, SandboxState::Lost);
    same!(losses(cx, sandbox).await?, 1);
    Ok(())
}

async fn losses(cx: &Context, sandbox: &Sandbox) -> Check<usize> {
    Ok(cx.kinds(sandbox).await?.iter().filter(|kind| *kind == "lost").count())
}

async fn kill(cx: &Context, sandbox: &Sandbox) -> Check {
    cx.sh(sandbox, "true").await?;
    cx.signal_guest(sandbox, Signal::KILL).await?;
    cx.until_ended(sandbox).await
}

async fn a_vanished_instance_is_lost_and_recorded_once(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    let (instance, _) = cx.instance(&sandbox).await?.ok_or("it lists no instance")?;
    cx.backend.teardown(&instance).await?;
    is_lost_once(cx, &sandbox).await?;
    let error = error_of(cx.manager.acquire("main", cx.request(), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Lost);
    same!(cx.backend.inventory().await?, []);
    Ok(())
}

async fn a_killed_guest_is_lost_and_recorded_once(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    kill(cx, &sandbox).await?;
    is_lost_once(cx, &sandbox).await
}

async fn a_command_in_a_dying_sandbox_ends_as_lost(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let text = format!("echo said; sleep {marker}");
    let mut process = sandbox.spawn(Command::shell(text), &cx.sink).await?;
    let said = soon("the first output", process.next_output()).await?;
    same!(said, Some(sandbox_core::Chunk::Stdout(b"said\n".to_vec())));
    cx.signal_guest(&sandbox, Signal::KILL).await?;
    let run = soon("the command", process.wait(&sandbox, &cx.sink)).await??;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    Ok(())
}

async fn another_manager_notices_the_loss_when_it_is_built(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    kill(cx, &sandbox).await?;
    let info = cx.another_manager().await?.list().await?.pop().ok_or("it lists nothing")?;
    same!(info.state, SandboxState::Lost);
    is_lost_once(cx, &sandbox).await
}

async fn one_that_does_not_answer_holds_up_no_other(cx: &Context) -> Check {
    let (_first, second) = (cx.sandbox().await?, cx.sandbox().await?);
    kill(cx, &second).await?;
    let backend = Decorated::new(Arc::clone(&cx.backend), Gathering::default());
    let building = cx.manager_with(Arc::<Decorated<Gathering>>::clone(&backend));
    let manager = soon("a manager", building).await??;
    same!(backend.decoration().asked(), 2);
    same!(manager.open(second.id().as_str()).await?.info().await?.state, SandboxState::Lost);
    Ok(())
}

async fn a_lost_sandbox_comes_back_with_its_latest_snapshot(cx: &Context) -> Check {
    let request = cx.request().on_lost(OnLost::RestoreLatestSnapshot);
    let sandbox = cx.manager.acquire("main", request.clone(), &cx.sink).await?;
    for n in 1..=2 {
        cx.sh(&sandbox, &format!("echo s{n} > README")).await?;
        sandbox.snapshot("", &cx.sink).await?;
    }
    cx.sh(&sandbox, "echo unsaved > README").await?;
    kill(cx, &sandbox).await?;
    let called = soon("the call that notices", cx.run(&sandbox, Command::new("true"))).await?;
    same!(error_of(called)?.kind(), ErrorKind::Lost);
    same!(cx.sh(&sandbox, "cat README").await?, "s2");
    let again = cx.manager.acquire("main", request, &cx.sink).await?;
    same!(again.id(), sandbox.id());
    let kinds = cx.kinds(&sandbox).await?;
    let lost = kinds.iter().position(|kind| kind == "lost").ok_or("no loss is recorded")?;
    same!(kinds[lost + 1..lost + 3], ["rewind_requested", "recovered"]);
    same!(losses(cx, &sandbox).await?, 1);
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}

async fn a_lost_sandbox_without_a_policy_can_be_rewound(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo saved > README").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "echo unsaved > README").await?;
    kill(cx, &sandbox).await?;
    is_lost_once(cx, &sandbox).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "saved");
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}

async fn a_lost_sandbox_is_made_anew_where_that_is_asked_for(cx: &Context) -> Check {
    let request = cx.request().on_lost(OnLost::Recreate);
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    cx.sh(&sandbox, "echo unsaved > README").await?;
    kill(cx, &sandbox).await?;
    let called = soon("the call that notices", cx.run(&sandbox, Command::new("true"))).await?;
    same!(error_of(called)?.kind(), ErrorKind::Lost);
    holds!(is_ready(&sandbox).await?, "it is back");
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    same!(losses(cx, &sandbox).await?, 1);
    Ok(())
}

async fn many_calls_that_notice_record_one_loss(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    kill(cx, &sandbox).await?;
    let mut tasks = tokio::task::JoinSet::new();
    for manager in [cx.manager.clone(), cx.manager.clone()] {
        for _ in 0..8 {
            let sandbox = manager.open(sandbox.id().as_str()).await?;
            tasks.spawn(async move { sandbox.exec(Command::new("true"), &Suppressed).await });
        }
    }
    while let Some(called) = soon("a call", tasks.join_next()).await? {
        same!(error_of(called?)?.kind(), ErrorKind::Lost);
    }
    same!(losses(cx, &sandbox).await?, 1);
    Ok(())
}

async fn a_lost_sandbox_can_be_destroyed(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    kill(cx, &sandbox).await?;
    is_lost_once(cx, &sandbox).await?;
    sandbox.destroy(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Destroyed);
    same!(cx.backend.inventory().await?, []);
    let next = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    holds!(next.id() != sandbox.id(), "its name is free");
    Ok(())
}
