//! What a sandbox changed. Directories are the workspace's, which every backend shows at `/workspace`.

use sandbox_core::{Change, ChangeKind, ErrorKind, Sandbox, SnapshotId};

use super::cases;
use crate::{Check, Context, context::error_of, same};

cases!("changes";
    [] a_fresh_sandbox_has_changed_nothing,
    [] what_was_added_changed_and_deleted_is_told,
    [] what_is_as_it_was_is_not_told,
    [] names_are_bytes_and_links_are_not_followed,
    [] a_closed_directory_hides_nothing,
    [Snapshot] a_snapshot_is_compared_with,
    [Snapshot] after_a_rewind_it_is_as_the_snapshot_was,
    [Snapshot] a_snapshot_that_was_not_gone_on_from_is_compared_with,
    [Stop] a_stopped_sandbox_is_looked_at,
    [] an_unknown_snapshot_is_not_found,
);

/// The changes of the workspace, one a line.
async fn told(sandbox: &Sandbox, since: Option<&SnapshotId>) -> Check<String> {
    let changes = sandbox.changes(since).await?;
    let line = |Change { path, kind, .. }: &Change| {
        let letter = match kind {
            ChangeKind::Added => 'A',
            ChangeKind::Modified => 'M',
            ChangeKind::Deleted => 'D',
        };
        let below = path.strip_prefix("/workspace").unwrap_or(path);
        format!("{letter} {}", below.display())
    };
    Ok(changes.iter().map(line).collect::<Vec<_>>().join("\n"))
}

async fn a_fresh_sandbox_has_changed_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    same!(sandbox.changes(None).await?, []);
    cx.sh(&sandbox, "cat README src/*; ls -laR . > /dev/null").await?;
    same!(sandbox.changes(None).await?, []);
    Ok(())
}

async fn what_was_added_changed_and_deleted_is_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "echo v2 > README; rm link; mkdir -p new/deep; echo 1 > new/deep/file; chmod 700 src; \
                chmod 600 src/main.c; ln -s nowhere dangling; mkfifo fifo";
    cx.sh(&sandbox, text).await?;
    let first = "M README\nA dangling\nA fifo\nD link\nA new\nA new/deep\nA new/deep/file\n\
                 M src\nM src/main.c";
    same!(told(&sandbox, None).await?, first);
    // One kind instead of another, and a directory instead of a directory.
    cx.sh(
        &sandbox,
        "rm README; mkdir README; echo 1 > README/x; rm -r src; mkdir src; echo > src/y",
    )
    .await?;
    cx.sh(&sandbox, "rm -r new dangling fifo; rm run.sh; ln -s README run.sh").await?;
    let second = "M README\nA README/x\nD link\nM run.sh\nD src/main.c\nA src/y";
    same!(told(&sandbox, None).await?, second);
    cx.sh(&sandbox, "rm -r src").await?;
    same!(told(&sandbox, None).await?, "M README\nA README/x\nD link\nM run.sh\nD src");
    Ok(())
}

async fn what_is_as_it_was_is_not_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "chmod 600 README; chmod 644 README; echo > new; rm new; mkdir dir; rmdir dir; \
                cp -p src/main.c kept; rm src/main.c; cp -p kept src/main.c; rm kept; \
                chmod 700 src; chmod 755 src; : >> run.sh";
    cx.sh(&sandbox, text).await?;
    same!(told(&sandbox, None).await?, "");
    Ok(())
}

async fn names_are_bytes_and_links_are_not_followed(cx: &Context) -> Check {
    use std::os::unix::ffi::OsStrExt;
    let sandbox = cx.sandbox().await?;
    let text = "echo > \"$(printf 'a\\377\\nb')\"; ln -s / out; ln -s /etc/passwd src/passwd";
    cx.sh(&sandbox, text).await?;
    let changes = sandbox.changes(None).await?;
    let paths: Vec<&[u8]> = changes.iter().map(|c| c.path.as_os_str().as_bytes()).collect();
    let wanted: [&[u8]; 3] = [b"/workspace/a\xff\nb", b"/workspace/out", b"/workspace/src/passwd"];
    same!(paths, wanted);
    Ok(())
}

async fn a_closed_directory_hides_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir -p shut/in; echo 1 > shut/in/file; chmod 0 shut/in shut").await?;
    let found = told(&sandbox, None).await?;
    // A backend that reads as the sandbox's own user may not look inside, but must not fail.
    let all = "A shut\nA shut/in\nA shut/in/file";
    crate::holds!(found == all || found == "A shut", "{found} tells of the directory");
    cx.sh(&sandbox, "chmod 700 shut shut/in").await?;
    same!(told(&sandbox, None).await?, all);
    Ok(())
}

async fn a_snapshot_is_compared_with(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo 1 > one; echo v2 > README; rm link; mkdir dir; echo > dir/a").await?;
    let first = sandbox.snapshot("first", &cx.sink).await?.id;
    same!(told(&sandbox, Some(&first)).await?, "");
    cx.sh(&sandbox, "echo 2 > two; rm one; echo 1 > link; rm -r dir; mkdir dir; echo > dir/b")
        .await?;
    let since_first = "D dir/a\nA dir/b\nA link\nD one\nA two";
    same!(told(&sandbox, Some(&first)).await?, since_first);
    let second = sandbox.snapshot("second", &cx.sink).await?.id;
    same!(told(&sandbox, Some(&second)).await?, "");
    same!(told(&sandbox, Some(&first)).await?, since_first);
    let since_start = "M README\nA dir\nA dir/b\nM link\nA two";
    same!(told(&sandbox, None).await?, since_start);
    Ok(())
}

async fn after_a_rewind_it_is_as_the_snapshot_was(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo 1 > one; rm run.sh").await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?.id;
    cx.sh(&sandbox, "echo 2 > two; rm one; rm -r src").await?;
    sandbox.rewind(&snapshot, &cx.sink).await?;
    same!(told(&sandbox, Some(&snapshot)).await?, "");
    same!(told(&sandbox, None).await?, "A one\nD run.sh");
    cx.sh(&sandbox, "rm one").await?;
    same!(told(&sandbox, Some(&snapshot)).await?, "D one");
    same!(told(&sandbox, None).await?, "D run.sh");
    Ok(())
}

/// With processes, where a snapshot is a copy, and from another branch.
async fn a_snapshot_that_was_not_gone_on_from_is_compared_with(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = sandbox_core::Command::new("sleep").arg(cx.marker());
    let sleeps = sandbox.spawn(command, &cx.sink).await?;
    cx.sh(&sandbox, "echo 1 > one; rm -r src").await?;
    let busy = sandbox.snapshot("busy", &cx.sink).await?.id;
    same!(told(&sandbox, Some(&busy)).await?, "");
    cx.sh(&sandbox, "echo 2 > two").await?;
    same!(told(&sandbox, Some(&busy)).await?, "A two");
    drop(sleeps);
    let left = sandbox.snapshot("left", &cx.sink).await?.id;
    sandbox.rewind(&busy, &cx.sink).await?;
    cx.sh(&sandbox, "rm one; mkdir src").await?;
    same!(told(&sandbox, Some(&left)).await?, "D one\nA src\nD two");
    Ok(())
}

async fn a_stopped_sandbox_is_looked_at(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo 1 > one").await?;
    sandbox.stop(&cx.sink).await?;
    same!(told(&sandbox, None).await?, "A one");
    Ok(())
}

async fn an_unknown_snapshot_is_not_found(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let error = error_of(sandbox.changes(Some(&SnapshotId::new())).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    sandbox.destroy(&cx.sink).await?;
    same!(error_of(sandbox.changes(None).await)?.kind(), ErrorKind::Lost);
    Ok(())
}
