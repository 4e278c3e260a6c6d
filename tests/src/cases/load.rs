//! Many at once.

use sandbox_core::{Command, Sandbox, Suppressed};

use super::cases;
use crate::{Check, Context, context::soon, holds, same};

cases!("load";
    [] thirty_two_commands_at_once_get_their_own_output,
    [] eight_sandboxes_with_eight_commands_each,
    [] life_and_commands_at_once_do_not_mix_sandboxes_up,
    [Snapshot] snapshots_and_rewinds_asked_for_at_once_take_turns,
    [] a_thousand_commands_leave_nothing_behind,
);

/// Says much that only this command says.
fn chatter(own: &str) -> (Command, String) {
    let text = "i=0; while [ $i -lt 500 ]; do echo \"$1 $i\"; i=$((i+1)); done; cat; exit 0";
    let expected: String = (0..500).map(|n| format!("{own} {n}\n")).collect();
    let command = Command::new("sh").args(["-c", text, "sh", own]).stdin(own);
    (command, expected + own)
}

async fn at_once(sandboxes: &[Sandbox], each: usize) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for sandbox in sandboxes {
        for n in 0..each {
            let (command, expected) = chatter(&format!("{}-{n}", sandbox.id()));
            let sandbox = sandbox.clone();
            tasks.spawn(async move { (sandbox.exec(command, &Suppressed).await, expected) });
        }
    }
    while let Some(done) = soon("the commands", tasks.join_next()).await? {
        let (run, expected) = done?;
        let run = run?;
        holds!(run.outcome.is_success(), "{:?} is success: {}", run.outcome, run.stderr.text());
        holds!(run.stdout.text() == expected, "the output is its own");
    }
    Ok(())
}

async fn thirty_two_commands_at_once_get_their_own_output(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    at_once(&[sandbox], 32).await
}

async fn eight_sandboxes_with_eight_commands_each(cx: &Context) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (manager, request) = (cx.manager.clone(), cx.request());
        tasks.spawn(async move { manager.create(request, &Suppressed).await });
    }
    let mut sandboxes = Vec::new();
    while let Some(made) = tasks.join_next().await {
        sandboxes.push(made??);
    }
    at_once(&sandboxes, 8).await?;
    same!(cx.backend.inventory().await?.len(), 8);
    Ok(())
}

async fn life_and_commands_at_once_do_not_mix_sandboxes_up(cx: &Context) -> Check {
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..6 {
        let (manager, request) = (cx.manager.clone(), cx.request());
        tasks.spawn(async move {
            for round in 0..3 {
                let own = format!("{n}.{round}");
                let sandbox = manager.create(request.clone(), &Suppressed).await?;
                let text = format!("echo {own} > own; cat own README");
                let run = sandbox.exec(Command::shell(text), &Suppressed).await?;
                same!(run.stdout.text(), format!("{own}\nv1\n"));
                same!(sandbox.files().read("own").await?, format!("{own}\n").into_bytes());
                sandbox.destroy(&Suppressed).await?;
            }
            Check::Ok(())
        });
    }
    while let Some(done) = soon("the sandboxes", tasks.join_next()).await? {
        done??;
    }
    same!(cx.backend.inventory().await?, []);
    Ok(())
}

async fn snapshots_and_rewinds_asked_for_at_once_take_turns(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let first = sandbox.snapshot("first", &cx.sink).await?;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..9 {
        let (sandbox, first) = (sandbox.clone(), first.id.clone());
        tasks.spawn(async move {
            match n % 3 {
                0 => sandbox.snapshot(format!("{n}"), &Suppressed).await.map(drop),
                1 => sandbox.rewind(&first, &Suppressed).await,
                _ => sandbox.recreate(&Suppressed).await,
            }
        });
    }
    while let Some(done) = soon("the changes", tasks.join_next()).await? {
        done??;
    }
    same!(cx.backend.inventory().await?.len(), 1);
    same!(sandbox.info().await?.generation, 7);
    same!(sandbox.snapshots().await?.len(), 4);
    // No intent is begun before the one before it is settled.
    let kinds = cx.kinds(&sandbox).await?;
    for pair in kinds.windows(2) {
        let expected = match pair[0].as_str() {
            "snapshot_requested" => "snapshotted",
            "rewind_requested" => "rewound",
            "provisioning" => "ready",
            _ => continue,
        };
        same!(pair[1], expected);
    }
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_thousand_commands_leave_nothing_behind(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let open = || -> Check<usize> { Ok(std::fs::read_dir("/proc/self/fd")?.count()) };
    cx.sh(&sandbox, "true").await?;
    let before = open()?;
    for _ in 0..100 {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let sandbox = sandbox.clone();
            tasks.spawn(async move { sandbox.exec(Command::new("true"), &Suppressed).await });
        }
        while let Some(done) = soon("a command", tasks.join_next()).await? {
            same!(done??.outcome.code(), Some(0));
        }
    }
    // Other cases run beside this one in the same process; one descriptor for each command they are not.
    let after = open()?;
    holds!(after < before + 500, "{after} descriptors are open, {before} were");
    same!(cx.manager.history(sandbox.id(), 0).await?.len(), 3 + 2 * 1001);
    Ok(())
}
