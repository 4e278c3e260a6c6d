//! Sandboxes whose time is over, and what is left over.

use std::{sync::Arc, time::Duration};

use sandbox_core::{Command, ErrorKind, Known, LeftoverKind, ReapPolicy, SandboxState, Suppressed};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, pause, soon},
    decorate::{Decorated, Slow},
    holds, same,
};

const TWO: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(3600);

cases!("lifetime";
    [] a_sandbox_whose_time_is_over_ends_by_itself,
    [] a_sandbox_without_a_manager_ends_with_its_lease,
    [] a_creation_may_take_longer_than_its_lease,
    [] an_idle_sandbox_ends_by_itself,
    [] an_extended_sandbox_outlives_its_first_time,
    [] time_is_not_extended_past_its_maximum,
    [Snapshot] a_rewound_sandbox_still_ends_at_its_time,
    [Stop] a_restarted_sandbox_still_ends_at_its_time,
    [] reaping_only_reports_unless_it_is_told_to_remove,
    [] reaping_never_touches_what_lives_or_is_anothers,
    [] an_instance_that_belongs_to_no_sandbox_is_reaped,
);

async fn a_sandbox_whose_time_is_over_ends_by_itself(cx: &Context) -> Check {
    let lasting = cx.sandbox().await?;
    let sandbox = cx.manager.create(cx.request().ttl(TWO), &cx.sink).await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    cx.until_ended(&sandbox).await?;
    let run = soon("a command whose sandbox expired", process.wait(&sandbox, &cx.sink)).await??;
    holds!(!run.outcome.is_success(), "{:?} is no success", run.outcome);
    let error = error_of(cx.run(&sandbox, Command::new("true")).await)?;
    same!(error.kind(), ErrorKind::Lost);
    holds!(error.to_string().contains("time was over"), "{error} says that its time was over");
    same!(sandbox.info().await?.state, SandboxState::Expired);
    let kinds = cx.kinds(&sandbox).await?;
    same!(kinds.iter().filter(|kind| *kind == "expired").count(), 1);
    holds!(!kinds.contains(&"lost".to_owned()), "{kinds:?} does not say lost");
    same!(cx.sh(&lasting, "cat README").await?, "v1");
    Ok(())
}

async fn a_sandbox_without_a_manager_ends_with_its_lease(cx: &Context) -> Check {
    let request = || cx.request().lease(TWO);
    let kept = cx.manager.create(request(), &cx.sink).await?;
    cx.sh(&kept, "true").await?;
    let abandoned = {
        let manager = cx.another_manager().await?;
        manager.create(request(), &Suppressed).await?.id().clone()
    };
    let abandoned = cx.manager.open(abandoned.as_str()).await?;
    cx.until_ended(&abandoned).await?;
    same!(cx.sh(&kept, "cat README").await?, "v1");
    let error = error_of(cx.run(&abandoned, Command::new("true")).await)?;
    same!(error.kind(), ErrorKind::Lost);
    Ok(())
}

async fn a_creation_may_take_longer_than_its_lease(cx: &Context) -> Check {
    let backend = Decorated::new(Arc::clone(&cx.backend), Slow::default());
    let manager = cx.manager_with(Arc::<Decorated<Slow>>::clone(&backend)).await?;
    let creation = {
        let (manager, request) = (manager.clone(), cx.request().lease(TWO));
        tokio::spawn(async move { manager.create(request, &Suppressed).await })
    };
    let made = async {
        while !backend.decoration().has_made_one() {
            pause().await;
        }
    };
    soon("an instance", made).await?;
    tokio::time::sleep(TWO * 2).await;
    backend.decoration().go_on();
    let sandbox = soon("the sandbox", creation).await???;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    // It counts from there.
    drop((sandbox, manager));
    let sandbox = cx.manager.list().await?.pop().ok_or("it is not listed")?;
    cx.until_ended(&cx.manager.open(sandbox.sandbox_id.as_str()).await?).await
}

async fn an_idle_sandbox_ends_by_itself(cx: &Context) -> Check {
    // Longer than clocks may differ, so that what says that it was idle is that it was not used.
    let request = cx.request().idle_limit(TWO * 2);
    let sandbox = match cx.manager.create(request, &cx.sink).await {
        Ok(sandbox) => sandbox,
        // Refused is honest; forgotten is not.
        Err(error) => {
            same!(error.kind(), ErrorKind::Unsupported);
            return Ok(());
        }
    };
    // A process is use: with it, the sandbox outlives its limit.
    let run = cx.run(&sandbox, Command::new("sleep").arg("5")).await?;
    holds!(run.outcome.is_success(), "{:?} is success", run.outcome);
    cx.until_ended(&sandbox).await?;
    let error = error_of(cx.run(&sandbox, Command::new("true")).await)?;
    same!(error.kind(), ErrorKind::Lost);
    same!(sandbox.info().await?.state, SandboxState::Expired);
    // Nothing was begun in it.
    let kinds = cx.kinds(&sandbox).await?;
    same!(kinds.last().map(String::as_str), Some("expired"));
    Ok(())
}

async fn an_extended_sandbox_outlives_its_first_time(cx: &Context) -> Check {
    let short = cx.manager.create(cx.request().ttl(TWO), &cx.sink).await?;
    let extended = cx.manager.create(cx.request().ttl(TWO), &cx.sink).await?;
    let before = jiff::Timestamp::now();
    let until = extended.extend_ttl(LONG, &cx.sink).await?;
    holds!(until.duration_since(before).as_secs() > 3000, "{until} is much later");
    cx.until_ended(&short).await?;
    same!(cx.sh(&extended, "cat README").await?, "v1");
    let told =
        |known: &Known| matches!(known, Known::TtlExtended { expires_at } if *expires_at == until);
    cx.until_recorded(&extended, told).await?;
    let lasting = cx.sandbox().await?;
    same!(error_of(lasting.extend_ttl(LONG, &cx.sink).await)?.kind(), ErrorKind::Conflict);
    Ok(())
}

async fn time_is_not_extended_past_its_maximum(cx: &Context) -> Check {
    let request = cx.request().ttl(LONG).max_ttl(LONG * 2);
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    let error = error_of(sandbox.extend_ttl(LONG * 3, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::LimitExceeded);
    let kinds = cx.kinds(&sandbox).await?;
    holds!(!kinds.contains(&"ttl_extended".to_owned()), "nothing was changed");
    sandbox.extend_ttl(LONG / 2, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_rewound_sandbox_still_ends_at_its_time(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().ttl(TWO * 3), &cx.sink).await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    cx.until_ended(&sandbox).await
}

async fn a_restarted_sandbox_still_ends_at_its_time(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().ttl(TWO * 3), &cx.sink).await?;
    sandbox.stop(&cx.sink).await?;
    sandbox.start(&cx.sink).await?;
    cx.until_ended(&sandbox).await
}

async fn reaping_only_reports_unless_it_is_told_to_remove(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request().ttl(TWO), &cx.sink).await?;
    let left = async |policy| cx.manager.reap(policy, &cx.sink).await;
    same!(left(ReapPolicy::apply()).await?.len(), 0);
    cx.until_ended(&sandbox).await?;
    let found = left(ReapPolicy::default()).await?;
    same!(found.len(), 1);
    same!((found[0].kind, found[0].removed), (LeftoverKind::Expired, false));
    same!(&found[0].sandbox, sandbox.id());
    holds!(sandbox.info().await?.state != SandboxState::Destroyed, "it was only reported");
    same!(left(ReapPolicy::apply().older_than(LONG)).await?.len(), 0);
    let found = left(ReapPolicy::apply()).await?;
    same!(found.iter().map(|left| left.removed).collect::<Vec<_>>(), [true]);
    same!(sandbox.info().await?.state, SandboxState::Destroyed);
    same!(cx.backend.inventory().await?, []);
    same!(left(ReapPolicy::default()).await?.len(), 0);
    cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    Ok(())
}

async fn reaping_never_touches_what_lives_or_is_anothers(cx: &Context) -> Check {
    let mine = cx.sandbox().await?;
    let strange = cx.strange_manager().await?;
    same!(strange.list().await?, []);
    same!(error_of(strange.open(mine.id().as_str()).await)?.kind(), ErrorKind::NotFound);
    let theirs = strange.create(cx.request(), &Suppressed).await?;
    for manager in [&strange, &cx.manager, &cx.another_manager().await?] {
        manager.reconcile().await?;
        same!(manager.reap(ReapPolicy::apply(), &Suppressed).await?.len(), 0);
        same!(manager.list().await?.len(), 1);
    }
    same!(cx.backend.inventory().await?.len(), 2);
    same!(cx.sh(&mine, "cat README").await?, "v1");
    same!(theirs.exec(Command::new("true"), &Suppressed).await?.outcome.code(), Some(0));
    theirs.destroy(&Suppressed).await?;
    Ok(())
}

async fn an_instance_that_belongs_to_no_sandbox_is_reaped(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let owner = cx.backend.inventory().await?.pop().ok_or("it lists nothing")?.owner;
    let spec = cx.request().spec;
    let orphan = sandbox_core::Provision::new(sandbox_core::SandboxId::new(), owner, spec);
    cx.backend.provision(&orphan).await?;
    let found = cx.manager.reap(ReapPolicy::default(), &cx.sink).await?;
    same!(found.len(), 1);
    same!((found[0].kind, found[0].removed), (LeftoverKind::Orphaned, false));
    same!(found[0].instance.as_ref(), Some(&orphan.instance));
    let found = cx.manager.reap(ReapPolicy::apply(), &cx.sink).await?;
    same!(found.iter().map(|left| left.removed).collect::<Vec<_>>(), [true]);
    same!(cx.backend.inventory().await?.len(), 1);
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}
