//! Transfers that do not come to their end.

use std::{fs, path::Path};

use rustix::process::Signal;
use sandbox_core::{DownloadOptions, ErrorKind, UploadOptions};

use super::{
    cases,
    transfers::{download, names, plant_large, upload},
};
use crate::{
    Check, Context,
    context::{error_of, pause, soon},
    holds, same,
};

/// All that is there. What goes while it is looked at is no failure.
const ALL: &str = "ls -AR 2>/dev/null || true";

cases!("cut_transfers";
    [] a_cancelled_upload_leaves_nothing,
    [] a_cancelled_download_leaves_nothing,
    [] a_failed_transfer_leaves_nothing,
    [Stop] a_download_from_a_guest_that_dies_leaves_nothing,
);

async fn a_cancelled_upload_leaves_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let tree = cx.scratch().join("tree");
    let size = plant_large(&tree)?;
    let before = cx.sh(&sandbox, ALL).await?;
    for (n, (local, remote)) in
        [("tree", "new"), ("tree", "src"), ("tree/large", "file")].iter().enumerate()
    {
        // Dropped when some of it has been sent, and not all.
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let options = UploadOptions::new().progress(move |progress| {
            let _ = tell.send(progress.bytes);
        });
        let (files, local) = (sandbox.files(), cx.scratch().join(local));
        let upload = files.upload(&local, remote, options, &cx.sink);
        tokio::select! {
            biased;
            sent = told.recv() => holds!(sent.is_some_and(|sent| sent < size), "{n}: it was cut off"),
            done = upload => holds!(false, "{n}: it was cut off, not {done:?}"),
        }
        let cleaned = async {
            while cx.sh(&sandbox, ALL).await? != before {
                pause().await;
            }
            Check::Ok(())
        };
        soon("an end of the half-sent files", cleaned).await??;
    }
    // And then it can be done.
    upload(cx, &sandbox, &tree, "new").await?;
    same!(cx.sh(&sandbox, "ls new | wc -l").await?.trim(), "16");
    Ok(())
}

/// Options of a download that tells of its first part, and then writes no more until the last of what is
/// returned is dropped.
fn held_up()
-> (DownloadOptions, tokio::sync::mpsc::UnboundedReceiver<()>, std::sync::mpsc::Sender<()>) {
    let (tell, told) = tokio::sync::mpsc::unbounded_channel();
    let (go, wait) = std::sync::mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    let options = DownloadOptions::new().progress(move |_| {
        let _ = tell.send(());
        if let Ok(wait) = wait.lock() {
            let _ = wait.recv();
        }
    });
    (options, told, go)
}

/// Waits until nothing is on its way in a directory of this host.
async fn until_only(path: &Path, wanted: &[&str]) -> Check {
    let cleaned = async {
        while names(path)? != wanted {
            pause().await;
        }
        Check::Ok(())
    };
    soon("an end of the half-written files", cleaned).await?
}

async fn a_cancelled_download_leaves_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "mkdir tree; head -c 16777216 /dev/zero > tree/large
        i=0; while [ $i -lt 15 ]; do head -c 1048576 /dev/zero > tree/$i; i=$((i+1)); done";
    cx.sh(&sandbox, text).await?;
    let downloads = cx.scratch().join("downloads");
    fs::create_dir_all(downloads.join("merged"))?;
    for (remote, local) in [("tree", "new"), ("tree", "merged"), ("tree/large", "file")] {
        // What has come is not written on until the download has been dropped.
        let (options, mut told, go) = held_up();
        let files = sandbox.files();
        let local = downloads.join(local);
        let mut download = Box::pin(files.download(remote, &local, options));
        tokio::select! {
            some = told.recv() => holds!(some.is_some(), "it was cut off"),
            done = &mut download => holds!(false, "it was cut off, not {done:?}"),
        }
        drop(download);
        drop(go);
        until_only(&downloads, &["merged"]).await?;
        until_only(&downloads.join("merged"), &[]).await?;
    }
    download(&sandbox, "tree", &downloads.join("new")).await?;
    same!(names(&downloads.join("new"))?.len(), 16);
    Ok(())
}

async fn a_failed_transfer_leaves_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (tree, to) = (cx.scratch().join("tree"), cx.scratch().join("downloads"));
    plant_large(&tree)?;
    fs::create_dir_all(tree.join("z"))?;
    fs::create_dir(&to)?;
    // A socket is what ordinary users can make everywhere.
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("z/socket"))?;
    let before = cx.sh(&sandbox, ALL).await?;
    let failed = sandbox.files().upload(&tree, "new", UploadOptions::new(), &cx.sink).await;
    let failed = error_of(failed)?;
    same!(failed.kind(), ErrorKind::Unsupported);
    holds!(failed.to_string().contains("z/socket"), "{failed} names it");
    let cleaned = async {
        while cx.sh(&sandbox, ALL).await? != before {
            pause().await;
        }
        Check::Ok(())
    };
    soon("an end of the half-sent files", cleaned).await??;
    let text = "mkdir tree; head -c 5000000 /dev/zero > tree/a; mkdir tree/z; ln -s / tree/z/bad";
    cx.sh(&sandbox, text).await?;
    let failed = sandbox.files().download("tree", to.join("new"), DownloadOptions::new()).await;
    let failed = error_of(failed)?;
    same!(failed.kind(), ErrorKind::PermissionDenied);
    holds!(failed.to_string().contains("z/bad"), "{failed} names it");
    // An error comes when it is all cleaned up.
    same!(names(&to)?, Vec::<String>::new());
    Ok(())
}

async fn a_download_from_a_guest_that_dies_leaves_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "head -c 100000000 /dev/zero > large").await?;
    let to = cx.scratch().join("downloads");
    fs::create_dir(&to)?;
    let (options, mut told, go) = held_up();
    let (files, local) = (sandbox.files(), to.join("large"));
    let download = tokio::spawn(async move { files.download("large", &local, options).await });
    soon("some of it", told.recv()).await?;
    cx.signal_guest(&sandbox, Signal::KILL).await?;
    cx.until_ended(&sandbox).await?;
    drop(go);
    let error = error_of(soon("an end of the download", download).await??)?;
    holds!(
        matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Lost),
        "{error:?} says that it was cut"
    );
    same!(names(&to)?, Vec::<String>::new());
    Ok(())
}
