//! Forks, and long or pruned lines of snapshots.

use sandbox_core::{Command, ErrorKind, OnLost, Retention, SandboxState, Suppressed};

use super::cases;
use crate::{Check, Context, context::error_of, holds, same};

cases!("lineage";
    [Snapshot] forks_see_nothing_of_each_other,
    [Snapshot, ProcessIsolation] forks_are_machines_of_their_own,
    [Snapshot] a_fork_can_be_named_and_forked_again,
    [Snapshot] a_fork_outlives_its_origin,
    [Snapshot] sixty_snapshots_can_all_be_returned_to,
    [Snapshot] deleting_a_snapshot_keeps_those_that_build_on_it,
    [Snapshot] the_snapshot_that_a_sandbox_runs_from_is_not_deleted,
    [Snapshot] deleting_a_snapshot_keeps_the_fork_that_runs_from_it,
    [Snapshot] pruning_keeps_what_it_is_told_to_keep,
    [Snapshot] snapshots_form_a_tree,
    [Snapshot] a_destroyed_sandbox_has_no_snapshots,
);

async fn forks_see_nothing_of_each_other(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo base > README; mkdir shared; echo 1 > shared/one").await?;
    let snapshot = sandbox.snapshot("base", &cx.sink).await?;
    let left = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    let right = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    let all = [&sandbox, &left, &right];
    for (n, one) in all.into_iter().enumerate() {
        same!(cx.sh(one, "cat README shared/one").await?, "base\n1");
        let text =
            format!("echo {n} >> README; echo {n} > own{n}; echo {n} >> shared/one; rm run.sh");
        cx.sh(one, &text).await?;
    }
    for (n, one) in all.into_iter().enumerate() {
        let text = "cat README shared/one own* | tr '\\n' ' '; ls own*";
        same!(cx.sh(one, text).await?, format!("base {n} 1 {n} {n} own{n}"));
    }
    // Nor does the snapshot.
    let third = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    same!(cx.sh(&third, "cat README shared/one; ls own* 2>/dev/null || :").await?, "base\n1");
    same!(cx.backend.inventory().await?.len(), 4);
    Ok(())
}

async fn forks_are_machines_of_their_own(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    let mut seen = std::collections::BTreeSet::new();
    // Whether the file ends with a newline is an engine's own business.
    let text = "uname -n; echo $(cat /etc/hostname); cat /etc/machine-id";
    let own = cx.sh(&sandbox, text).await?;
    for _ in 0..2 {
        let fork = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
        seen.insert(cx.sh(&fork, text).await?);
    }
    seen.insert(own.clone());
    same!(seen.len(), 3);
    for identity in &seen {
        let lines: Vec<&str> = identity.lines().collect();
        same!(lines.len(), 3);
        same!(lines[0], lines[1]);
        same!(lines[2].len(), 32);
    }
    for part in 0..3 {
        let parts: std::collections::BTreeSet<_> =
            seen.iter().filter_map(|identity| identity.lines().nth(part)).collect();
        same!(parts.len(), 3);
    }
    // A rewind does not make it another machine.
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, text).await?, own);
    Ok(())
}

async fn a_fork_can_be_named_and_forked_again(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request().env("A", "1"), &cx.sink).await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    let taken = error_of(cx.manager.fork(&snapshot.id, Some("main"), &cx.sink).await)?;
    same!(taken.kind(), ErrorKind::NameTaken);
    let fork = cx.manager.fork(&snapshot.id, Some("fork"), &cx.sink).await?;
    same!(cx.manager.open("fork").await?.id(), fork.id());
    same!(cx.sh(&fork, "echo $A; echo fork > README").await?, "1");
    let second = fork.snapshot("", &cx.sink).await?;
    same!(second.parent, Some(snapshot.id.clone()));
    let grandchild = cx.manager.fork(&second.id, None, &cx.sink).await?;
    same!(cx.sh(&grandchild, "cat README").await?, "fork");
    cx.sh(&fork, "echo spoilt > README").await?;
    fork.rewind(&second.id, &cx.sink).await?;
    same!(cx.sh(&fork, "cat README").await?, "fork");
    // Another sandbox's snapshot is no place to go back to.
    let strange = error_of(sandbox.rewind(&second.id, &cx.sink).await)?;
    same!(strange.kind(), ErrorKind::NotFound);
    Ok(())
}

async fn a_fork_outlives_its_origin(cx: &Context) -> Check {
    let request = cx.request().on_lost(OnLost::RestoreLatestSnapshot);
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    cx.sh(&sandbox, "echo base > README; echo 1 > one").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    let fork = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    sandbox.destroy(&cx.sink).await?;
    same!(cx.sh(&fork, "cat README one").await?, "base\n1");
    let gone = error_of(cx.manager.fork(&snapshot.id, None, &cx.sink).await)?;
    same!(gone.kind(), ErrorKind::NotFound);
    cx.sh(&fork, "echo fork > README").await?;
    let own = fork.snapshot("", &cx.sink).await?;
    cx.sh(&fork, "rm README one").await?;
    fork.rewind(&own.id, &cx.sink).await?;
    same!(cx.sh(&fork, "cat README one").await?, "fork\n1");
    if cx.has(sandbox_core::Feature::Stop) {
        fork.stop(&cx.sink).await?;
        fork.start(&cx.sink).await?;
        same!(cx.sh(&fork, "cat README one").await?, "fork\n1");
    }
    Ok(())
}

async fn sixty_snapshots_can_all_be_returned_to(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut taken = Vec::new();
    for n in 1..=60 {
        let text = format!("echo {n} > count; echo {n} > file{n}; rm -f file$(({n} - 10))");
        cx.sh(&sandbox, &text).await?;
        taken.push(sandbox.snapshot(format!("{n}"), &Suppressed).await?);
    }
    same!(sandbox.snapshots().await?.len(), 60);
    for n in [1, 30, 60, 2, 59] {
        sandbox.rewind(&taken[n - 1].id, &cx.sink).await?;
        let expected: Vec<String> =
            (1..=n).rev().take(10).map(|file| format!("file{file}")).collect();
        let said = cx.sh(&sandbox, "cat count; ls file*").await?;
        let mut lines: Vec<&str> = said.lines().collect();
        same!(lines.remove(0), n.to_string());
        lines.sort_by_key(|name| std::cmp::Reverse(name[4..].parse::<usize>().unwrap_or(0)));
        same!(lines, expected);
    }
    same!(cx.sh(&sandbox, "cat README src/main.c | wc -l").await?.trim(), "2");
    Ok(())
}

async fn deleting_a_snapshot_keeps_those_that_build_on_it(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut taken = Vec::new();
    for n in 0..5 {
        cx.sh(&sandbox, &format!("echo {n} > README; echo {n} > file{n}")).await?;
        taken.push(sandbox.snapshot(format!("{n}"), &cx.sink).await?.id);
    }
    for n in [0, 2] {
        sandbox.delete_snapshot(&taken[n], &cx.sink).await?;
        let error = error_of(sandbox.rewind(&taken[n], &cx.sink).await)?;
        same!(error.kind(), ErrorKind::NotFound);
        let error = error_of(sandbox.delete_snapshot(&taken[n], &cx.sink).await)?;
        same!(error.kind(), ErrorKind::NotFound);
    }
    same!(cx.sh(&sandbox, "cat README; ls file* | wc -l").await?, "4\n5");
    for n in [1, 3, 4] {
        sandbox.rewind(&taken[n], &cx.sink).await?;
        let text = "cat README; ls file* | wc -l";
        same!(cx.sh(&sandbox, text).await?, format!("{n}\n{}", n + 1));
    }
    Ok(())
}

async fn the_snapshot_that_a_sandbox_runs_from_is_not_deleted(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let first = sandbox.snapshot("first", &cx.sink).await?;
    cx.sh(&sandbox, "echo v2 > README").await?;
    let second = sandbox.snapshot("second", &cx.sink).await?;
    let error = error_of(sandbox.delete_snapshot(&second.id, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    sandbox.rewind(&first.id, &cx.sink).await?;
    let error = error_of(sandbox.delete_snapshot(&first.id, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    sandbox.delete_snapshot(&second.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    sandbox.rewind(&first.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn deleting_a_snapshot_keeps_the_fork_that_runs_from_it(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo base > README").await?;
    let first = sandbox.snapshot("first", &cx.sink).await?;
    let fork = cx.manager.fork(&first.id, None, &cx.sink).await?;
    sandbox.snapshot("second", &cx.sink).await?;
    match sandbox.delete_snapshot(&first.id, &cx.sink).await {
        Ok(()) => {}
        Err(error) => same!(error.kind(), ErrorKind::Conflict),
    }
    same!(cx.sh(&fork, "cat README; echo more >> README").await?, "base");
    let own = fork.snapshot("", &cx.sink).await?;
    cx.sh(&fork, "rm README").await?;
    fork.rewind(&own.id, &cx.sink).await?;
    same!(cx.sh(&fork, "cat README").await?, "base\nmore");
    Ok(())
}

async fn pruning_keeps_what_it_is_told_to_keep(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut taken = Vec::new();
    for n in 0..6 {
        cx.sh(&sandbox, &format!("echo {n} > README")).await?;
        let label = if n == 1 { "kept" } else { "" };
        taken.push(sandbox.snapshot(label, &cx.sink).await?.id);
    }
    let mut policy = Retention::default();
    policy.keep_last = 2;
    policy.keep_labelled = true;
    let removed = sandbox.prune_snapshots(policy, &cx.sink).await?;
    same!(removed, [taken[0].clone(), taken[2].clone(), taken[3].clone()]);
    let left: Vec<_> = sandbox.snapshots().await?.into_iter().map(|left| left.id).collect();
    same!(left, [taken[1].clone(), taken[4].clone(), taken[5].clone()]);
    for n in [1, 4, 5] {
        sandbox.rewind(&taken[n], &cx.sink).await?;
        same!(cx.sh(&sandbox, "cat README").await?, n.to_string());
    }
    Ok(())
}

async fn snapshots_form_a_tree(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let a = sandbox.snapshot("a", &cx.sink).await?;
    let b = sandbox.snapshot("b", &cx.sink).await?;
    sandbox.rewind(&a.id, &cx.sink).await?;
    let c = sandbox.snapshot("c", &cx.sink).await?;
    sandbox.recreate(&cx.sink).await?;
    let d = sandbox.snapshot("d", &cx.sink).await?;
    same!([a.parent, b.parent, c.parent, d.parent], [None, Some(a.id.clone()), Some(a.id), None]);
    let labels: Vec<_> = sandbox.snapshots().await?.into_iter().map(|kept| kept.label).collect();
    same!(labels, ["a", "b", "c", "d"]);
    Ok(())
}

async fn a_destroyed_sandbox_has_no_snapshots(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    sandbox.destroy(&cx.sink).await?;
    same!(sandbox.info().await?.state, SandboxState::Destroyed);
    same!(sandbox.snapshots().await?, []);
    let error = error_of(sandbox.rewind(&snapshot.id, &cx.sink).await)?;
    holds!(
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Lost),
        "{error} says that it is gone"
    );
    let error = error_of(sandbox.exec(Command::new("true"), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Lost);
    Ok(())
}
