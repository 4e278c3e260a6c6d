//! Snapshots and rewinds of one sandbox.

use std::sync::Arc;

use sandbox_core::{Command, ErrorKind, Sandbox};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, is_lost, is_ready, soon},
    decorate::{Decorated, Faulty, Step},
    holds, same,
};

cases!("snapshots";
    [Snapshot] a_rewind_brings_back_contents_and_deletions,
    [Snapshot] a_rewind_brings_back_everything_about_files,
    [Snapshot] names_that_are_not_utf8_come_back,
    [Snapshot, SparseSnapshots] sparse_files_stay_sparse,
    [Snapshot] hard_links_come_back_as_one_file,
    [Snapshot] a_directory_that_was_replaced_comes_back,
    [Snapshot] files_outside_the_workspace_come_back,
    [Snapshot] a_snapshot_does_not_change_when_the_sandbox_does,
    [Snapshot] a_rewind_ends_the_processes_and_keeps_the_id,
    [SnapshotLive] processes_go_on_after_a_snapshot,
    [SnapshotLive] a_snapshot_is_of_one_instant,
    [SnapshotLive] an_open_file_survives_a_snapshot,
    [SnapshotLive] commands_that_start_during_a_snapshot_wait_for_it,
    [Snapshot] a_failed_rewind_leaves_the_old_one_running,
    [Snapshot] a_failed_snapshot_leaves_the_sandbox_as_it_was,
    [Snapshot, Stop] a_stopped_sandbox_can_be_rewound,
    [Snapshot] the_repository_is_never_written_to,
);

async fn a_rewind_brings_back_contents_and_deletions(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo a > README; rm src/main.c; mkdir -p x/y; echo 1 > x/y/z").await?;
    let a = sandbox.snapshot("a", &cx.sink).await?;
    cx.sh(&sandbox, "echo b > README; echo new > new; rm -r x; echo int > src/main.c").await?;
    let b = sandbox.snapshot("b", &cx.sink).await?;
    same!((&a.parent, &b.parent), (&None, &Some(a.id.clone())));
    same!(sandbox.snapshots().await?, [a.clone(), b.clone()]);
    let text = "cat README; cat src/main.c x/y/z new 2>/dev/null || :";
    for _ in 0..2 {
        cx.sh(&sandbox, "rm -rf README x new src; echo spoilt > spoilt").await?;
        sandbox.rewind(&a.id, &cx.sink).await?;
        same!(cx.sh(&sandbox, text).await?, "a\n1");
        same!(cx.sh(&sandbox, "ls").await?, "README\nlink\nrun.sh\nsrc\nx");
        sandbox.rewind(&b.id, &cx.sink).await?;
        same!(cx.sh(&sandbox, text).await?, "b\nint\nnew");
        same!(cx.sh(&sandbox, "ls").await?, "README\nlink\nnew\nrun.sh\nsrc");
    }
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}

/// All that a rewind must bring back, one line for each file: kind, mode, owner, time, links, size and
/// what a link says; and the sums of the contents.
const DESCRIBE: &str = r"
    export LC_ALL=C
    find . -type d -exec stat -c '%n %F %a %u:%g %Y' {} + | sort
    find . ! -type d -exec stat -c '%N %F %a %u:%g %Y %h %s' {} + | sort
    find . -type f -exec cksum {} + | sort
";

async fn a_rewind_brings_back_everything_about_files(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let make = r"
        mkdir -p deep/er/and/deeper empty sticky
        echo data > deep/er/file; echo data > plain; echo x > executable
        chmod 640 plain; chmod 755 executable; chmod 1777 sticky; chmod 700 deep/er; chmod 400 deep/er/file
        : > nothing
        ln -s plain relative; ln -s /absolute/and/missing absolute; ln -s . loop
        ln plain hard; ln deep/er/file deep/hard
        mkfifo fifo; chmod 622 fifo
        echo spaced > 'a name with  spaces'; printf x > 'new
line'
        touch -d '2001-02-03 04:05:06 UTC' plain
        touch -h -d '2002-03-04 05:06:07 UTC' relative
        touch -d '2003-04-05 06:07:08 UTC' empty
        touch -d '2004-05-06 07:08:09 UTC' deep/er/and deep/er deep
    ";
    cx.sh(&sandbox, make).await?;
    let before = cx.sh(&sandbox, DESCRIBE).await?;
    holds!(before.contains("981173106 2"), "the description has times and links: {before}");
    let snapshot = sandbox.snapshot("all", &cx.sink).await?;
    same!(cx.sh(&sandbox, DESCRIBE).await?, before);
    let spoil = r"
        chmod 755 plain deep/er deep/er/file; echo spoilt > plain; rm -rf relative loop empty fifo
        mkdir fifo; echo spoilt > empty; mv deep/er/and deep/and; ln -s elsewhere relative
        touch hard executable sticky
    ";
    cx.sh(&sandbox, spoil).await?;
    holds!(cx.sh(&sandbox, DESCRIBE).await? != before, "it is spoilt");
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, DESCRIBE).await?, before);
    // Once more, with a snapshot of what was rewound.
    let again = sandbox.snapshot("again", &cx.sink).await?;
    cx.sh(&sandbox, spoil).await?;
    sandbox.rewind(&again.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, DESCRIBE).await?, before);
    Ok(())
}

async fn names_that_are_not_utf8_come_back(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = r#"
        mkdir "$(printf 'd\377')"; echo inside > "$(printf 'd\377/\200\376')"
        ln -s "$(printf '\303\050')" "$(printf 'l\001')"
    "#;
    cx.sh(&sandbox, text).await?;
    let list = "ls -R -b; readlink l* | od -An -c";
    let before = cx.sh(&sandbox, list).await?;
    holds!(before.contains(r"d\377"), "{before} has the name");
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "rm -r d* l?").await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, list).await?, before);
    same!(cx.sh(&sandbox, r#"cat "$(printf 'd\377/\200\376')""#).await?, "inside");
    Ok(())
}

async fn sparse_files_stay_sparse(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "truncate -s 1G sparse; printf end >> sparse").await?;
    let blocks = "stat -c '%s %b' sparse; tail -c 3 sparse";
    let small = |said: &str| -> Check {
        let blocks: u64 = said.split_whitespace().nth(1).ok_or("it says nothing")?.parse()?;
        holds!(said.starts_with("1073741827 ") && said.ends_with("end"), "{said} is the file");
        holds!(blocks < 2048, "{blocks} blocks are less than 1 MiB");
        Ok(())
    };
    small(&cx.sh(&sandbox, blocks).await?)?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "rm sparse").await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    small(&cx.sh(&sandbox, blocks).await?)
}

/// Until one of them is written to: on layered filesystems that separates them, here as in containers.
async fn hard_links_come_back_as_one_file(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo 1 > one; ln one two").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    same!(cx.sh(&sandbox, "stat -c %h one; [ one -ef two ] && echo same").await?, "2\nsame");
    cx.sh(&sandbox, "rm one").await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat one two; stat -c %h one").await?, "1\n1\n2");
    same!(cx.sh(&sandbox, "[ one -ef two ] && echo same").await?, "same");
    Ok(())
}

async fn a_directory_that_was_replaced_comes_back(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    // One of the repository's, and one that was made here.
    cx.sh(&sandbox, "mkdir made; echo 1 > made/old").await?;
    let a = sandbox.snapshot("a", &cx.sink).await?;
    cx.sh(&sandbox, "rm -r src made; mkdir src made; echo 2 > made/new; echo 2 > src/new").await?;
    let b = sandbox.snapshot("b", &cx.sink).await?;
    cx.sh(&sandbox, "rm -r src; echo file > src; rm -r made; mkdir made").await?;
    let c = sandbox.snapshot("c", &cx.sink).await?;
    for (snapshot, list) in [
        (&b, "made/new src/new"),
        (&a, "made/old src/main.c"),
        (&c, "src"),
        (&b, "made/new src/new"),
    ] {
        sandbox.rewind(&snapshot.id, &cx.sink).await?;
        let text = "find made src -type f | sort | tr '\\n' ' '";
        same!(cx.sh(&sandbox, text).await?.trim(), list);
    }
    cx.sh(&sandbox, "mv src moved; mkdir src; mv moved/new src/; rmdir moved").await?;
    same!(cx.sh(&sandbox, "cat src/new").await?, "2");
    Ok(())
}

async fn files_outside_the_workspace_come_back(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir -p \"$HOME/tools\"; echo 1 > \"$HOME/tools/one\"").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "rm -r \"$HOME/tools\"; echo 2 > \"$HOME/two\"").await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    let text = "cat \"$HOME/tools/one\"; ls \"$HOME/two\" 2>/dev/null || echo gone";
    same!(cx.sh(&sandbox, text).await?, "1\ngone");
    Ok(())
}

async fn a_snapshot_does_not_change_when_the_sandbox_does(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "i=0; while [ $i -lt 20 ]; do echo $i > f$i; i=$((i+1)); done").await?;
    let first = sandbox.snapshot("first", &cx.sink).await?;
    // In place, by appending, by truncating, by renaming over, by mode.
    let spoil = "printf X | dd of=f1 conv=notrunc 2>/dev/null; echo more >> f2; : > f3; \
                 echo new > n; mv n f4; chmod 000 f5; mv f6 f7";
    for _ in 0..2 {
        cx.sh(&sandbox, spoil).await?;
        sandbox.snapshot("spoilt", &cx.sink).await?;
        sandbox.rewind(&first.id, &cx.sink).await?;
        same!(cx.sh(&sandbox, "cat f1 f2 f3 f4 f5 f6 f7 | tr '\\n' ' '").await?, "1 2 3 4 5 6 7 ");
    }
    Ok(())
}

async fn a_rewind_ends_the_processes_and_keeps_the_id(cx: &Context) -> Check {
    let sandbox = cx.manager.acquire("main", cx.request(), &cx.sink).await?;
    let marker = cx.marker();
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count == 1).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    let run = soon("a command of the old generation", process.wait(&sandbox, &cx.sink)).await??;
    holds!(is_lost(&run.outcome), "{:?} is lost", run.outcome);
    same!(cx.count(&sandbox, &marker).await?, 0);
    same!(cx.manager.open("main").await?.id(), sandbox.id());
    same!(sandbox.info().await?.generation, 2);
    Ok(())
}

/// Writes lines to one file and then to another, for ever; what fails is written to a third.
const WRITER: &str = "
    n=0
    while :; do
        n=$((n + 1))
        echo line $n >> first || echo first >> errors
        echo line $n >> second || echo second >> errors
        [ -e stop ] && exit 0
    done
";

async fn lines(cx: &Context, sandbox: &Sandbox) -> Check<(u64, u64)> {
    // The second before the first: what is written in between cannot make it the longer one.
    let said = cx.sh(sandbox, "wc -l < second; wc -l < first").await?;
    let mut numbers = said.split_whitespace().map(str::parse::<u64>);
    let (Some(second), Some(first)) = (numbers.next(), numbers.next()) else {
        return Err(format!("{said} are no numbers").into());
    };
    Ok((first?, second?))
}

async fn until_lines(cx: &Context, sandbox: &Sandbox, wanted: u64) -> Check {
    let more = async {
        while lines(cx, sandbox).await?.1 < wanted {}
        Check::Ok(())
    };
    soon("the writer", more).await?
}

async fn processes_go_on_after_a_snapshot(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, ": > first; : > second").await?;
    let writer = sandbox.spawn(Command::shell(WRITER), &cx.sink).await?;
    for _ in 0..5 {
        let (_, before) = lines(cx, &sandbox).await?;
        until_lines(cx, &sandbox, before + 10).await?;
        let (_, before) = lines(cx, &sandbox).await?;
        sandbox.snapshot("", &cx.sink).await?;
        until_lines(cx, &sandbox, before + 10).await?;
    }
    cx.sh(&sandbox, ": > stop").await?;
    let run = soon("the writer", writer.wait(&sandbox, &cx.sink)).await??;
    holds!(run.outcome.is_success(), "{:?} is success: {}", run.outcome, run.stderr.text());
    same!(cx.sh(&sandbox, "cat errors 2>/dev/null; cmp first second && echo same").await?, "same");
    Ok(())
}

async fn a_snapshot_is_of_one_instant(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, ": > first; : > second").await?;
    let writer = sandbox.spawn(Command::shell(WRITER), &cx.sink).await?;
    let mut taken = Vec::new();
    for _ in 0..8 {
        let (_, before) = lines(cx, &sandbox).await?;
        until_lines(cx, &sandbox, before + 20).await?;
        let (_, at_least) = lines(cx, &sandbox).await?;
        let snapshot = sandbox.snapshot("", &cx.sink).await?;
        taken.push((snapshot.id, at_least));
    }
    drop(writer);
    for (snapshot, at_least) in taken {
        sandbox.rewind(&snapshot, &cx.sink).await?;
        let (first, second) = lines(cx, &sandbox).await?;
        holds!(first >= at_least, "{first} lines are no fewer than the {at_least} before");
        holds!(
            first == second || first == second + 1,
            "{first} and {second} lines are of one instant"
        );
        let torn = "cat first second | grep -vc '^line [1-9][0-9]*$' || :";
        same!(cx.sh(&sandbox, torn).await?, "0");
        same!(cx.sh(&sandbox, "ls errors 2>/dev/null || :").await?, "");
    }
    Ok(())
}

async fn an_open_file_survives_a_snapshot(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    // Opened before, written to and read from after it, with a working directory of its own.
    let text = "mkdir in; cd in; exec 3>>kept 4<../README; echo before >&3; echo ready; read go
        echo after >&3; cat <&4; cat kept; pwd > where; rm kept; ls";
    let command = Command::shell(text).stdin_piped();
    let mut process = sandbox.spawn(command, &cx.sink).await?;
    soon("the first output", process.next_output()).await?;
    sandbox.snapshot("", &cx.sink).await?;
    process.write_stdin(b"\n").await?;
    let run = soon("the process", process.wait(&sandbox, &cx.sink)).await??;
    same!(run.stdout.text(), "v1\nbefore\nafter\nwhere\n");
    same!(run.stderr.text(), "");
    Ok(())
}

async fn commands_that_start_during_a_snapshot_wait_for_it(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "head -c 50000000 /dev/urandom > large").await?;
    let busy = sandbox.spawn(Command::shell("while :; do :; done"), &cx.sink).await?;
    let snapshots = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move {
            for _ in 0..5 {
                sandbox.snapshot("", &sandbox_core::Suppressed).await?;
            }
            Ok::<_, sandbox_core::Error>(())
        })
    };
    let mut n = 0;
    while !snapshots.is_finished() {
        n += 1;
        let said = soon("a command", cx.sh(&sandbox, &format!("echo {n}"))).await??;
        same!(said, n.to_string());
        soon("a write", sandbox.files().write("n", n.to_string(), &cx.sink)).await??;
    }
    snapshots.await??;
    drop(busy);
    same!(sandbox.snapshots().await?.len(), 5);
    Ok(())
}

async fn a_failed_rewind_leaves_the_old_one_running(cx: &Context) -> Check {
    let backend = Decorated::new(Arc::clone(&cx.backend), Faulty::default());
    let manager = cx.manager_with(Arc::<Decorated<Faulty>>::clone(&backend)).await?;
    let sandbox = manager.acquire("main", cx.request(), &cx.sink).await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "echo v2 > README").await?;
    let marker = cx.marker();
    let process = sandbox.spawn(Command::new("sleep").arg(&marker), &cx.sink).await?;
    for step in [Step::Provision, Step::Greeting] {
        backend.decoration().fail_at(step);
        let error = error_of(sandbox.rewind(&snapshot.id, &cx.sink).await)?;
        holds!(error.to_string().contains("told to fail"), "{error} says why");
        backend.decoration().heal();
        let kinds = cx.kinds(&sandbox).await?;
        same!(kinds[kinds.len() - 2..], ["rewind_requested", "failed"]);
        same!(cx.sh(&sandbox, "cat README").await?, "v2");
        cx.until_count(&sandbox, &marker, |count| count == 1).await?;
        same!(cx.backend.inventory().await?.len(), 1);
        same!(sandbox.info().await?.generation, 1);
        let again = manager.acquire("main", cx.request(), &cx.sink).await?;
        same!(again.id(), sandbox.id());
    }
    drop(process);
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_failed_snapshot_leaves_the_sandbox_as_it_was(cx: &Context) -> Check {
    let backend = Decorated::new(Arc::clone(&cx.backend), Faulty::default());
    let manager = cx.manager_with(Arc::<Decorated<Faulty>>::clone(&backend)).await?;
    let sandbox = manager.create(cx.request(), &cx.sink).await?;
    cx.sh(&sandbox, ": > first; : > second").await?;
    let writer = sandbox.spawn(Command::shell(WRITER), &cx.sink).await?;
    backend.decoration().fail_at(Step::Snapshot);
    let error = error_of(sandbox.snapshot("", &cx.sink).await)?;
    holds!(error.to_string().contains("told to fail"), "{error} says why");
    backend.decoration().heal();
    holds!(is_ready(&sandbox).await?, "it is ready");
    same!(sandbox.snapshots().await?, []);
    let (_, before) = lines(cx, &sandbox).await?;
    until_lines(cx, &sandbox, before + 10).await?;
    drop(writer);
    sandbox.snapshot("", &cx.sink).await?;
    same!(sandbox.snapshots().await?.len(), 1);
    Ok(())
}

async fn a_stopped_sandbox_can_be_rewound(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    cx.sh(&sandbox, "echo v2 > README").await?;
    sandbox.stop(&cx.sink).await?;
    same!(error_of(sandbox.snapshot("", &cx.sink).await)?.kind(), ErrorKind::Conflict);
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    same!(cx.backend.inventory().await?.len(), 1);
    Ok(())
}

async fn the_repository_is_never_written_to(cx: &Context) -> Check {
    let describe = || -> Check<String> {
        let output = std::process::Command::new("sh")
            .args(["-c", "find . -exec stat -c '%n %F %a %u %i %Y %Z' {} + | sort; cat README"])
            .current_dir(cx.repository())
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let before = describe()?;
    holds!(before.contains("./src/main.c"), "{before} describes it");
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo v2 > README; rm -r src; chmod 777 run.sh; mkdir new; touch link").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v2");
    sandbox.destroy(&cx.sink).await?;
    same!(describe()?, before);
    Ok(())
}
