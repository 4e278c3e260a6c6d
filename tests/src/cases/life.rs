//! Names and life.

use sandbox_core::{Command, ErrorKind, SandboxState};

use super::cases;
use crate::{Check, Context, holds, same};

cases!("life";
    [] destroy_twice_succeeds_twice,
    [] acquire_gives_the_same_sandbox,
    [] another_spec_is_a_mismatch_that_names_the_fields,
    [Stop] acquire_starts_a_stopped_sandbox_with_its_files,
    [] a_destroyed_name_can_be_used_again,
    [] twenty_tasks_acquire_one_sandbox,
);

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
        tasks.spawn(async move {
            manager.acquire("main", request, &sandbox_core::Suppressed).await
        });
    }
    let mut ids = std::collections::BTreeSet::new();
    while let Some(made) = tasks.join_next().await {
        ids.insert(made??.id().clone());
    }
    same!(ids.len(), 1);
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}
