//! Names and life.

use std::{sync::Arc, time::Instant};

use rustix::process::Signal;
use sandbox_core::{
    Command, ErrorKind, Feature, Level, Network, Run, Sandbox, SandboxState, Suppressed,
};

use super::cases;
use crate::{
    Check, Context,
    context::{SOON, error_of, is_lost, pause, soon},
    decorate::{Decorated, Faulty, Slow, Step},
    holds, same,
};

cases!("life";
    [] destroy_twice_succeeds_twice,
    [] an_instance_that_many_remove_at_once_is_gone,
    [] acquire_gives_the_same_sandbox,
    [] another_spec_is_a_mismatch_that_names_the_fields,
    [Stop] acquire_starts_a_stopped_sandbox_with_its_files,
    [] a_destroyed_name_can_be_used_again,
    [] twenty_tasks_acquire_one_sandbox,
    [] four_managers_at_once_acquire_one_sandbox,
    [Snapshot] acquire_after_a_rewind_gives_the_restored_files,
    [] recreate_gives_fresh_files_and_keeps_the_id,
    [] stop_and_start_twice_are_no_errors,
    [] what_does_not_exist_is_not_found,
    [] a_creation_that_fails_leaves_nothing,
    [] a_creation_that_is_dropped_leaves_nothing,
    [] what_the_host_cannot_enforce_is_refused_before_anything_is_made,
    [] destroy_ends_a_running_command_as_lost,
    [] destroy_leaves_no_process,
    [] a_destroy_that_fails_can_be_repeated,
    [Pause] a_paused_sandbox_holds_still_and_goes_on,
    [] one_stuck_sandbox_slows_no_other,
);

async fn an_instance_that_many_remove_at_once_is_gone(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir -p a/b/c; i=0; until [ $i = 200 ]; do i=$((i+1)); : > a/b/$i; done")
        .await?;
    let (instance, _) = cx.instance(&sandbox).await?.ok_or("it lists no instance")?;
    let mut removing = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (backend, instance) = (Arc::clone(&cx.backend), instance.clone());
        removing.spawn(async move { backend.teardown(&instance).await });
    }
    while let Some(removed) = soon("a removal", removing.join_next()).await? {
        removed??;
    }
    same!(cx.backend.inventory().await?, []);
    Ok(())
}

async fn destroy_twice_succeeds_twice(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    sandbox.destroy(&cx.sink).await?;
    sandbox.destroy(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Destroyed);
    let error = cx.run(&sandbox, Command::new("/bin/true")).await.err();
    same!(error.map(|error| error.kind()), Some(ErrorKind::Lost));
    Ok(())
}

async fn acquire_gives_the_same_sandbox(cx: &Context) -> Check {
    let first = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    cx.sh(&first, "echo kept > kept").await?;
    let second = cx.another_manager().await?.acquire("main", cx.request(), &cx.sink).await?;
    same!(first.id(), second.id());
    same!(cx.sh(&second, "cat kept").await?, "kept");
    Ok(())
}

async fn another_spec_is_a_mismatch_that_names_the_fields(cx: &Context) -> Check {
    let first = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    let other = cx.request().env("A", "1");
    let error = cx.manager.acquire("main", other, &cx.sink).await.err().ok_or("it was given")?;
    same!(error.kind(), ErrorKind::SpecMismatch);
    holds!(error.to_string().contains("env.A"), "{error} names the field");
    same!(cx.sh(&first, "cat README").await?, "v1");
    Ok(())
}

async fn acquire_starts_a_stopped_sandbox_with_its_files(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    cx.sh(&sandbox, "echo v2 > README").await?;
    sandbox.stop(&cx.sink).await?;
    let error = cx.run(&sandbox, Command::new("/bin/true")).await.err();
    same!(error.map(|error| error.kind()), Some(ErrorKind::Conflict));
    let again = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    same!(again.id(), sandbox.id());
    same!(cx.sh(&again, "cat README").await?, "v2");
    Ok(())
}

async fn a_destroyed_name_can_be_used_again(cx: &Context) -> Check {
    let first = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    first.destroy(&cx.sink).await?;
    let second = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    holds!(first.id() != second.id(), "a destroyed sandbox's name gives a new one");
    Ok(())
}

async fn twenty_tasks_acquire_one_sandbox(cx: &Context) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (manager, request) = (cx.manager.clone(), cx.request());
        tasks.spawn(async move { manager.acquire("main", request, &Suppressed).await });
    }
    let mut ids = std::collections::BTreeSet::new();
    while let Some(made) = tasks.join_next().await {
        ids.insert(made??.id().clone());
    }
    same!(ids.len(), 1);
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}

async fn four_managers_at_once_acquire_one_sandbox(cx: &Context) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let manager = cx.another_manager().await?;
        for _ in 0..5 {
            let (manager, request) = (manager.clone(), cx.request());
            tasks.spawn(async move { manager.acquire("main", request, &Suppressed).await });
        }
    }
    let mut ids = std::collections::BTreeSet::new();
    while let Some(made) = tasks.join_next().await {
        ids.insert(made??.id().clone());
    }
    same!(ids.len(), 1);
    same!(cx.backend.inventory().await?.len(), 1);
    same!(cx.manager.list().await?.len(), 1);
    Ok(())
}

async fn acquire_after_a_rewind_gives_the_restored_files(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    cx.sh(&sandbox, "echo saved > README").await?;
    let snapshot = sandbox.snapshot("saved", &cx.sink).await?;
    cx.sh(&sandbox, "echo spoilt > README; echo new > new").await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    let before = cx.instance(&sandbox).await?.map(|(instance, _)| instance);
    let again = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    same!(again.id(), sandbox.id());
    same!(cx.sh(&again, "cat README; ls new 2>/dev/null || echo gone").await?, "saved\ngone");
    same!(cx.instance(&sandbox).await?.map(|(instance, _)| instance), before);
    let again = cx.another_manager().await?.acquire("main", cx.request(), &cx.sink).await?;
    same!(again.id(), sandbox.id());
    same!(cx.sh(&again, "cat README").await?, "saved");
    Ok(())
}

async fn recreate_gives_fresh_files_and_keeps_the_id(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    cx.sh(&sandbox, "echo spoilt > README; echo new > new").await?;
    sandbox.recreate(&cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README; ls new 2>/dev/null || echo gone").await?, "v1\ngone");
    same!(cx.backend.inventory().await?.len(), 1);
    same!(sandbox.info().await?.generation, 2);
    let again = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    same!(again.id(), sandbox.id());
    Ok(())
}

async fn stop_and_start_twice_are_no_errors(cx: &Context) -> Check {
    if !cx.has(Feature::Stop) {
        let sandbox = cx.sandbox().await?;
        same!(error_of(sandbox.stop(&cx.sink).await)?.kind(), ErrorKind::Unsupported);
        return Ok(());
    }
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    sandbox.start(&cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    sandbox.stop(&cx.sink).await?;
    sandbox.stop(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Stopped);
    let run =
        soon("a command whose sandbox is stopped", process.wait(&sandbox, &cx.sink)).await??;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    sandbox.start(&cx.sink).await?;
    same!(cx.count(&sandbox, &marker).await?, 0);
    Ok(())
}

async fn what_does_not_exist_is_not_found(cx: &Context) -> Check {
    let missing = sandbox_core::SandboxId::new();
    for name in ["nobody", missing.as_str()] {
        let error = error_of(cx.manager.open(name).await)?;
        same!(error.kind(), ErrorKind::NotFound);
    }
    let sandbox = cx.sandbox().await?;
    let missing = sandbox_core::SnapshotId::new();
    let error = error_of(sandbox.rewind(&missing, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    let error = error_of(cx.manager.fork(&missing, None, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_creation_that_fails_leaves_nothing(cx: &Context) -> Check {
    for step in [Step::Provision, Step::Greeting] {
        let backend = Decorated::new(Arc::clone(&cx.backend), Faulty::default());
        let manager = cx.manager_with(Arc::<Decorated<Faulty>>::clone(&backend)).await?;
        backend.decoration().fail_at(step);
        let error = error_of(manager.acquire("main", cx.request(), &cx.sink).await)?;
        holds!(error.to_string().contains("told to fail"), "{error} says why ({step:?})");
        same!(cx.backend.inventory().await?, []);
        same!(manager.list().await?, []);
        let last = manager.list_all().await?.pop().ok_or("it is not in the history")?;
        same!(last.state, SandboxState::Failed);
        same!(cx.sink.kinds().last().map(String::as_str), Some("failed"));
        same!(error_of(manager.open("main").await)?.kind(), ErrorKind::NotFound);
        backend.decoration().heal();
        let sandbox = manager.acquire("main", cx.request(), &cx.sink).await?;
        same!(cx.sh(&sandbox, "cat README").await?, "v1");
        sandbox.destroy(&cx.sink).await?;
    }
    Ok(())
}

async fn a_creation_that_is_dropped_leaves_nothing(cx: &Context) -> Check {
    let backend = Decorated::new(Arc::clone(&cx.backend), Slow::default());
    let manager = cx.manager_with(Arc::<Decorated<Slow>>::clone(&backend)).await?;
    let request = cx.request();
    let creation = {
        let manager = manager.clone();
        tokio::spawn(async move { manager.acquire("main", request, &Suppressed).await })
    };
    let deadline = Instant::now() + SOON;
    while !backend.decoration().has_made_one() {
        holds!(Instant::now() < deadline, "an instance is made");
        pause().await;
    }
    same!(cx.backend.inventory().await?.len(), 1);
    creation.abort();
    let _ = creation.await;
    backend.decoration().go_on();
    while !cx.backend.inventory().await?.is_empty() {
        holds!(Instant::now() < deadline, "the instance that nobody waits for is removed");
        pause().await;
    }
    let info = manager.list_all().await?.pop().ok_or("it is not in the history")?;
    let mut watch = manager.watch(&info.sandbox_id, 0);
    let last = async {
        loop {
            let event = watch.next().await?;
            if event.name() == "failed" {
                return Check::Ok(());
            }
        }
    };
    soon("the record of the failure", last).await??;
    // The name is free.
    backend.decoration().go_on();
    let sandbox =
        soon("another creation", manager.acquire("main", cx.request(), &cx.sink)).await??;
    holds!(*sandbox.id() != info.sandbox_id, "it is another sandbox");
    Ok(())
}

async fn what_the_host_cannot_enforce_is_refused_before_anything_is_made(cx: &Context) -> Check {
    for (feature, request) in [
        (Feature::NetworkDeny, cx.request().network(Network::Deny)),
        (Feature::NetworkHost, cx.request().network(Network::Host)),
        (Feature::LimitPids, cx.request().pids(256)),
        (Feature::LimitMemory, cx.request().memory(1 << 30)),
        (Feature::LimitCpu, cx.request().cpu_millis(500)),
    ] {
        let made = cx.manager.create(request, &cx.sink).await;
        let level = cx.capabilities.level(feature);
        match (level, made) {
            (Level::Full, Ok(sandbox)) => sandbox.destroy(&cx.sink).await?,
            (Level::None | Level::PerProcess, Err(error)) => {
                same!(error.kind(), ErrorKind::Unsupported);
            }
            (level, made) => {
                return Err(format!("{feature} is {level:?}, and it gave {made:?}").into());
            }
        }
        same!(cx.backend.inventory().await?, []);
    }
    Ok(())
}

async fn destroy_ends_a_running_command_as_lost(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let command = Command::new("sleep").arg(&marker);
    let running = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { sandbox.exec(command, &Suppressed).await })
    };
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    sandbox.destroy(&cx.sink).await?;
    match soon("a command in a destroyed sandbox", running).await?? {
        Ok(Run { outcome, .. }) => holds!(is_lost(&outcome), "{outcome:?} is lost"),
        Err(error) => same!(error.kind(), ErrorKind::Lost),
    }
    Ok(())
}

async fn destroy_leaves_no_process(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    // Where its processes are this host's, they can be seen from here.
    let sandbox_core::Reachability::Local(local) = sandbox.reachability().await? else {
        return Ok(());
    };
    let seen = || -> Check<usize> {
        let mut seen = 0;
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let line = std::fs::read(format!("/proc/{}/cmdline", name.to_string_lossy()));
            let found =
                line.unwrap_or_default().split(|byte| *byte == 0).any(|w| w == marker.as_bytes());
            seen += usize::from(found || name == *local.pid.to_string());
        }
        Ok(seen)
    };
    same!(seen()?, 2);
    sandbox.destroy(&cx.sink).await?;
    let deadline = Instant::now() + SOON / 3;
    while seen()? > 0 {
        holds!(Instant::now() < deadline, "nothing of it runs any more");
        pause().await;
    }
    drop(process);
    Ok(())
}

async fn a_destroy_that_fails_can_be_repeated(cx: &Context) -> Check {
    let backend = Decorated::new(Arc::clone(&cx.backend), Faulty::default());
    let manager = cx.manager_with(Arc::<Decorated<Faulty>>::clone(&backend)).await?;
    let sandbox = manager.acquire("main", cx.request(), &cx.sink).await?;
    backend.decoration().fail_at(Step::Teardown);
    let error = error_of(sandbox.destroy(&cx.sink).await)?;
    holds!(error.to_string().contains("told to fail"), "{error} says why");
    holds!(sandbox.info().await?.state != SandboxState::Destroyed, "it is not destroyed");
    backend.decoration().heal();
    sandbox.destroy(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Destroyed);
    same!(cx.backend.inventory().await?, []);
    Ok(())
}

async fn a_paused_sandbox_holds_still_and_goes_on(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "while :; do echo tick; done";
    let mut process = sandbox.spawn(Command::shell(text), &cx.sink).await?;
    soon("the first output", process.next_output()).await?.ok_or("it said nothing")?;
    sandbox.pause(&cx.sink).await?;
    sandbox.pause(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Paused);
    let error = error_of(cx.run(&sandbox, Command::new("true")).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    sandbox.resume(&cx.sink).await?;
    sandbox.resume(&cx.sink).await?;
    // More than was on its way before.
    let mut bytes = 0;
    while bytes < 8 << 20 {
        let chunk = soon("output after the pause", process.next_output()).await?;
        bytes += match chunk.ok_or("it ended")? {
            sandbox_core::Chunk::Stdout(bytes) | sandbox_core::Chunk::Stderr(bytes) => bytes.len(),
        };
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn one_stuck_sandbox_slows_no_other(cx: &Context) -> Check {
    let (stuck, other) = (cx.sandbox().await?, cx.sandbox().await?);
    cx.sh(&stuck, "true").await?;
    let fifty = async |sandbox: &Sandbox| -> Check<std::time::Duration> {
        let begin = Instant::now();
        for n in 0..50 {
            same!(cx.sh(sandbox, &format!("echo {n}")).await?, n.to_string());
        }
        Ok(begin.elapsed())
    };
    let usual = fifty(&other).await?;
    cx.signal_guest(&stuck, Signal::STOP).await?;
    let waiting = {
        let stuck = stuck.clone();
        tokio::spawn(async move { stuck.exec(Command::new("true"), &Suppressed).await })
    };
    let meanwhile = async {
        let beside = soon("fifty commands elsewhere", fifty(&other)).await??;
        holds!(beside < usual * 10 + SOON / 10, "{beside:?} is as fast as {usual:?}");
        soon("a list", cx.manager.list()).await??;
        soon("another manager", cx.another_manager()).await??;
        soon("a new sandbox", cx.sandbox()).await??;
        holds!(!waiting.is_finished(), "the stuck one is stuck");
        Check::Ok(())
    };
    let result = meanwhile.await;
    cx.signal_guest(&stuck, Signal::CONT).await?;
    result?;
    let run = soon("the stuck one, let go on", waiting).await???;
    holds!(run.outcome.is_success(), "{:?} is success", run.outcome);
    Ok(())
}
