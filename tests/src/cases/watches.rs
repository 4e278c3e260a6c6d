//! What happens to files, as it happens.

use std::{fmt::Debug, path::Path};

use sandbox_core::{ErrorKind, FileEvent, FileWatch};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, pause, soon},
    holds, same,
};

cases!("watches";
    [] what_happens_is_told,
    [] a_file_is_watched_through_its_replacement,
    [] directories_below_are_watched_where_that_is_asked_for,
    [] a_directory_that_moves_is_told_of_under_its_new_name,
    [] what_the_guest_makes_on_its_way_is_not_told,
    [] what_cannot_be_kept_is_told_as_an_overflow,
    [] a_watch_ends_when_what_it_watches_is_gone,
    [] watches_are_bounded_and_end_when_they_are_dropped,
    [] what_is_missing_cannot_be_watched,
    [Stop] a_stopped_sandbox_is_lost_to_its_watches,
    [Snapshot] a_rewound_sandbox_is_lost_to_its_watches,
    [Snapshot] a_watch_goes_on_after_a_snapshot,
);

/// The events up to one that is waited for.
async fn until(
    watch: &mut FileWatch,
    what: impl Debug,
    wanted: impl Fn(&FileEvent) -> bool,
) -> Check<Vec<FileEvent>> {
    let mut seen = Vec::new();
    let found = async {
        loop {
            match watch.next().await? {
                Some(event) => {
                    let found = wanted(&event);
                    seen.push(event);
                    if found {
                        return Check::Ok(());
                    }
                }
                None => return Err("the watch ended".into()),
            }
        }
    };
    match soon("an event", found).await {
        Ok(Ok(())) => Ok(seen),
        Ok(Err(failure)) | Err(failure) => {
            let seen: Vec<&FileEvent> = seen.iter().rev().take(20).collect();
            Err(format!("{}: no {what:?} after (latest first) {seen:?}", failure.message()).into())
        }
    }
}

fn ends(path: &Path, with: &str) -> bool {
    path.ends_with(with)
}

fn created(event: &FileEvent, name: &str) -> bool {
    matches!(event, FileEvent::Created(path) if ends(path, name))
}

fn modified(event: &FileEvent, name: &str) -> bool {
    matches!(event, FileEvent::Modified(path) if ends(path, name))
}

fn removed(event: &FileEvent, name: &str) -> bool {
    matches!(event, FileEvent::Removed(path) if ends(path, name))
}

fn renamed(event: &FileEvent, old: &str, new: &str) -> bool {
    matches!(event, FileEvent::Renamed { from, to } if ends(from, old) && ends(to, new))
}

async fn what_happens_is_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let mut watch = files.watch(".", false).await?;
    cx.sh(&sandbox, "echo 1 > new").await?;
    let seen = until(&mut watch, "created", |event| created(event, "new")).await?;
    let Some(FileEvent::Created(path)) = seen.last() else { return Err("it was created".into()) };
    same!(*path, files.canonicalize("new").await?);
    until(&mut watch, "modified", |event| modified(event, "new")).await?;
    cx.sh(&sandbox, "echo 2 >> README").await?;
    until(&mut watch, "README", |event| modified(event, "README")).await?;
    cx.sh(&sandbox, "chmod 600 README").await?;
    until(&mut watch, "mode", |event| modified(event, "README")).await?;
    cx.sh(&sandbox, "mv new other").await?;
    until(&mut watch, "renamed", |event| renamed(event, "new", "other")).await?;
    cx.sh(&sandbox, "mkdir dir; mv other dir/").await?;
    until(&mut watch, "moved away", |event| removed(event, "other")).await?;
    cx.sh(&sandbox, "mv dir/other back; rm back").await?;
    until(&mut watch, "moved here", |event| created(event, "back")).await?;
    until(&mut watch, "removed", |event| removed(event, "back")).await?;
    // What is done from outside too, and what is below not.
    files.write("dir/below", "x", &cx.sink).await?;
    files.write("README", "x", &cx.sink).await?;
    let seen = until(&mut watch, "README", |event| created(event, "README")).await?;
    holds!(!seen.iter().any(|event| created(event, "below")), "{seen:?} has nothing below");
    Ok(())
}

async fn a_file_is_watched_through_its_replacement(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let mut watch = files.watch("README", false).await?;
    cx.sh(&sandbox, "echo 1 > other; echo 1 >> README").await?;
    let mut seen = until(&mut watch, "modified", |event| modified(event, "README")).await?;
    files.write("README", "x", &cx.sink).await?;
    seen.extend(until(&mut watch, "replaced", |event| created(event, "README")).await?);
    cx.sh(&sandbox, "rm other README").await?;
    seen.extend(until(&mut watch, "removed", |event| removed(event, "README")).await?);
    cx.sh(&sandbox, "echo 1 > README").await?;
    seen.extend(until(&mut watch, "made again", |event| created(event, "README")).await?);
    let others = seen.iter().any(|event| format!("{event:?}").contains("other"));
    holds!(!others, "{seen:?} is only about the file");
    Ok(())
}

async fn directories_below_are_watched_where_that_is_asked_for(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir -p a/b/c").await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    cx.sh(&sandbox, "echo 1 > a/b/c/deep").await?;
    until(&mut watch, "deep", |event| created(event, "a/b/c/deep")).await?;
    // Made and filled before anybody could have looked.
    cx.sh(&sandbox, "mkdir -p new/er/still && echo 1 > new/er/still/file").await?;
    until(&mut watch, "still", |event| created(event, "new/er/still/file")).await?;
    cx.sh(&sandbox, "echo 2 >> new/er/still/file; rm -r new").await?;
    until(&mut watch, "modified", |event| modified(event, "new/er/still/file")).await?;
    until(&mut watch, "removed", |event| removed(event, "new")).await?;
    // A link is not followed.
    cx.sh(&sandbox, "mkdir /tmp/outside; ln -s /tmp/outside out; echo 1 > /tmp/outside/x").await?;
    cx.sh(&sandbox, "echo 1 > last; rm -r /tmp/outside").await?;
    let seen = until(&mut watch, "last", |event| created(event, "last")).await?;
    holds!(!seen.iter().any(|event| created(event, "x")), "{seen:?} does not lead outside");
    Ok(())
}

async fn a_directory_that_moves_is_told_of_under_its_new_name(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir -p old/deep").await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    cx.sh(&sandbox, "mv old new; echo 1 > new/deep/file").await?;
    until(&mut watch, "renamed", |event| renamed(event, "old", "new")).await?;
    let seen = until(&mut watch, "file", |event| created(event, "deep/file")).await?;
    let last = seen.last();
    holds!(last.is_some_and(|event| created(event, "new/deep/file")), "{last:?} has the new name");
    Ok(())
}

async fn what_the_guest_makes_on_its_way_is_not_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let mut watch = files.watch(".", true).await?;
    files.write("written", "x", &cx.sink).await?;
    let up = sandbox_core::UploadOptions::new;
    files.upload(cx.repository(), "copy", up(), &cx.sink).await?;
    files.upload(cx.repository().join("src"), ".", up(), &cx.sink).await?;
    files.write("copy/last", "x", &cx.sink).await?;
    let seen = until(&mut watch, "last", |event| created(event, "copy/last")).await?;
    for name in ["written", "copy", "copy/src/main.c", "main.c"] {
        holds!(seen.iter().any(|event| created(event, name)), "{seen:?} tells of {name}");
    }
    let temporary = seen.iter().find(|event| format!("{event:?}").contains(".sandbox-"));
    holds!(temporary.is_none(), "{temporary:?} is nobody's business");
    Ok(())
}

async fn what_cannot_be_kept_is_told_as_an_overflow(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    // More than the kernel keeps (16,384, as a rule) and than is on its way.
    let text =
        "mkdir many; cd many; limit=$(cat /proc/sys/fs/inotify/max_queued_events || echo 16384)
        seq 1 $((limit + 40000)) | xargs touch";
    cx.sh(&sandbox, text).await?;
    cx.sh(&sandbox, "mkdir later").await?;
    until(&mut watch, "overflow", |event| *event == FileEvent::Overflow).await?;
    // What was made meanwhile is watched all the same.
    cx.sh(&sandbox, "echo 1 > later/file").await?;
    until(&mut watch, "later", |event| created(event, "later/file")).await?;
    Ok(())
}

async fn a_watch_ends_when_what_it_watches_is_gone(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (recursive, gone) in [(false, "rm -r dir"), (true, "rm -r dir"), (true, "mv dir /tmp/away")]
    {
        cx.sh(&sandbox, "mkdir -p dir/below").await?;
        let mut watch = sandbox.files().watch("dir", recursive).await?;
        cx.sh(&sandbox, gone).await?;
        until(&mut watch, "removed", |event| removed(event, "dir")).await?;
        let end = soon("the end of the watch", watch.next()).await??;
        same!(end, None);
        same!(watch.next().await?, None);
    }
    cx.sh(&sandbox, "rm -r /tmp/away").await?;
    Ok(())
}

async fn watches_are_bounded_and_end_when_they_are_dropped(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let mut watches = Vec::new();
    for _ in 0..16 {
        watches.push(files.watch(".", false).await?);
    }
    let error = error_of(files.watch(".", false).await)?;
    same!(error.kind(), ErrorKind::LimitExceeded);
    holds!(error.to_string().contains("16"), "{error} says the limit");
    drop(watches);
    let free = async {
        loop {
            match files.watch(".", false).await {
                Ok(_) => return Check::Ok(()),
                Err(error) if error.kind() == ErrorKind::LimitExceeded => pause().await,
                Err(error) => return Err(error.into()),
            }
        }
    };
    soon("a place for a watch", free).await?
}

async fn what_is_missing_cannot_be_watched(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let error = error_of(sandbox.files().watch("no/thing", true).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.to_string().contains("no/thing"), "{error} names the path");
    if cx.sh(&sandbox, "id -u; mkdir -p shut/in; chmod 0 shut").await? != "0" {
        let error = error_of(sandbox.files().watch("shut/in", true).await)?;
        same!(error.kind(), ErrorKind::PermissionDenied);
        holds!(error.to_string().contains("shut/in"), "{error} names the path");
    }
    Ok(())
}

/// The watch ends with an error that says what became of the sandbox.
async fn until_lost(watch: &mut FileWatch) -> Check {
    let lost = async {
        loop {
            match watch.next().await {
                Ok(Some(_)) => {}
                Ok(None) => return Err("it ended without an error".into()),
                Err(error) => return Check::Ok(error),
            }
        }
    };
    let error = soon("the end of the watch", lost).await??;
    same!(error.kind(), ErrorKind::Lost);
    same!(watch.next().await?, None);
    Ok(())
}

async fn a_stopped_sandbox_is_lost_to_its_watches(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    sandbox.stop(&cx.sink).await?;
    sandbox.start(&cx.sink).await?;
    until_lost(&mut watch).await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    sandbox.destroy(&cx.sink).await?;
    until_lost(&mut watch).await
}

async fn a_rewound_sandbox_is_lost_to_its_watches(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    until_lost(&mut watch).await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    cx.sh(&sandbox, "echo 1 > new").await?;
    until(&mut watch, "new", |event| created(event, "new")).await?;
    Ok(())
}

async fn a_watch_goes_on_after_a_snapshot(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut watch = sandbox.files().watch(".", true).await?;
    sandbox.snapshot("", &cx.sink).await?;
    // Where the guest gave way to another, what falls between is told as an overflow.
    let told = async {
        for n in 0_u32.. {
            sandbox.files().write(format!("new-{n}"), "", &cx.sink).await?;
            let next = tokio::time::timeout(std::time::Duration::from_millis(200), watch.next());
            match next.await {
                Ok(Ok(Some(FileEvent::Created(_)))) => return Check::Ok(()),
                Ok(Ok(Some(_))) | Err(_) => {}
                Ok(Ok(None)) => return Err("it ended".into()),
                Ok(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    };
    soon("an event after the snapshot", told).await?
}
