//! Files and trees, up and down.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use sandbox_core::{DownloadOptions, ErrorKind, Existing, OutsideLinks, Sandbox, UploadOptions};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, soon},
    holds, same,
};

cases!("transfers";
    [] a_file_goes_up_and_comes_down,
    [] a_tree_goes_up_and_comes_down_as_it_was,
    [] ten_thousand_small_files_go_up_and_come_down,
    [] a_sparse_file_stays_sparse,
    [] what_is_there_is_merged_replaced_or_kept_above,
    [] what_is_there_is_merged_replaced_or_kept_below,
    [] the_repository_is_replaced_and_merged_with,
    [] links_that_lead_outside_are_refused_and_others_kept,
    [] what_is_no_file_is_refused_or_left_out,
    [] limits_of_a_download_are_told,
    [] errors_name_the_path,
    [] progress_is_told,
    [] uploads_are_in_the_history,
);

/// Everything below a directory: path, mode, size, time, and what a link says.
fn listing(path: &Path) -> Check<Vec<String>> {
    let mut found = Vec::new();
    let mut left = vec![path.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let below = entry.path().strip_prefix(path)?.to_owned();
            let size = if metadata.is_dir() { 0 } else { metadata.len() };
            let says = fs::read_link(entry.path()).ok();
            let time = (metadata.mtime(), metadata.mtime_nsec());
            found.push(format!("{below:?} {:o} {size} {time:?} {says:?}", metadata.mode()));
            if metadata.is_dir() {
                left.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// What is in a directory of this host, by name.
pub(super) fn names(path: &Path) -> Check<Vec<String>> {
    let entries = fs::read_dir(path)?.collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

fn set_mode(path: &Path, mode: u32) -> Check {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// A tree with a bit of everything.
fn plant(at: &Path) -> Check {
    fs::create_dir_all(at.join("a/b/empty"))?;
    fs::write(at.join("a/file"), "contents\n")?;
    fs::write(at.join("a/none"), "")?;
    fs::write(at.join("a/b/large"), (0..=255).cycle().take(1_000_001).collect::<Vec<u8>>())?;
    for name in [&b"with  spaces "[..], b"new\nline", b"\xff\xfe", b"-rf", b"*$HOME`id`"] {
        fs::write(at.join(OsStr::from_bytes(name)), name)?;
    }
    symlink("a/file", at.join("link"))?;
    symlink("../../link", at.join("a/b/up"))?;
    symlink("no/where", at.join("dangling"))?;
    fs::hard_link(at.join("a/file"), at.join("a/same"))?;
    set_mode(&at.join("a/file"), 0o751)?;
    set_mode(&at.join("a/none"), 0o600)?;
    set_mode(&at.join("a/b/empty"), 0o700)?;
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(981_173_106);
    let long_ago = fs::FileTimes::new().set_modified(long_ago);
    fs::File::open(at.join("a/file"))?.set_times(long_ago)?;
    set_mode(&at.join("a/b"), 0o555)?;
    fs::File::open(at.join("a/b"))?.set_times(long_ago)?;
    Ok(())
}

/// A tree that takes a while, and how many bytes it has.
pub(super) fn plant_large(at: &Path) -> Check<u64> {
    fs::create_dir_all(at)?;
    for n in 0..15 {
        fs::write(at.join(format!("{n}")), vec![n; 1 << 20])?;
    }
    fs::write(at.join("large"), vec![7; 16 << 20])?;
    Ok(31 << 20)
}

pub(super) async fn upload(cx: &Context, sandbox: &Sandbox, from: &Path, to: &str) -> Check {
    sandbox.files().upload(from, to, UploadOptions::new(), &cx.sink).await?;
    Ok(())
}

pub(super) async fn download(sandbox: &Sandbox, from: &str, to: &Path) -> Check {
    sandbox.files().download(from, to, DownloadOptions::new()).await?;
    Ok(())
}

async fn a_file_goes_up_and_comes_down(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let here = cx.scratch().join("here");
    let all: Vec<u8> = (0..=255).cycle().take(3_000_001).collect();
    for contents in [&b""[..], b"text\n", b"\0\xff", &all] {
        fs::write(&here, contents)?;
        set_mode(&here, 0o640)?;
        let up = sandbox.files().upload(&here, "new/file", UploadOptions::new(), &cx.sink).await?;
        same!((up.bytes, up.files, up.skipped), (contents.len() as u64, 1, 0));
        holds!(sandbox.files().read("new/file").await? == contents, "it is there");
        same!(cx.sh(&sandbox, "stat -c %a new/file; ls -A new").await?, "640\nfile");
        let back = cx.scratch().join("back");
        download(&sandbox, "new/file", &back).await?;
        holds!(fs::read(&back)? == contents, "it comes back");
        same!(fs::metadata(&back)?.mode() & 0o7777, 0o640);
        same!(fs::metadata(&back)?.mtime(), fs::metadata(&here)?.mtime());
    }
    // Through a link, up and down.
    symlink(&here, cx.scratch().join("to-here"))?;
    upload(cx, &sandbox, &cx.scratch().join("to-here"), "linked").await?;
    cx.sh(&sandbox, "ln -s linked to-linked").await?;
    download(&sandbox, "to-linked", &cx.scratch().join("unlinked")).await?;
    same!(fs::read(cx.scratch().join("unlinked"))?.len(), all.len());
    holds!(!cx.scratch().join("unlinked").is_symlink(), "it is no link");
    Ok(())
}

async fn a_tree_goes_up_and_comes_down_as_it_was(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (tree, back) = (cx.scratch().join("tree"), cx.scratch().join("back"));
    fs::create_dir(&tree)?;
    plant(&tree)?;
    let up = sandbox.files().upload(&tree, "deep/tree", UploadOptions::new(), &cx.sink).await?;
    same!(up.files as usize, listing(&tree)?.len() + 1);
    let text = "cd deep/tree; stat -c '%n %a %F %s' a/file a/none a/b a/b/empty a/b/large
        stat -c %Y a/file a/b; readlink link a/b/up dangling; [ a/file -ef a/same ] && echo same; cat link";
    let said = "a/file 751 regular file 9\na/none 600 regular empty file 0\na/b 555 directory";
    let found = cx.sh(&sandbox, text).await?;
    holds!(found.starts_with(said), "{found} is as it was");
    let said = "981173106\n981173106\na/file\n../../link\nno/where\nsame\ncontents";
    holds!(found.ends_with(said), "{found} is as it was");
    download(&sandbox, "deep/tree", &back).await?;
    same!(listing(&back)?, listing(&tree)?);
    same!(fs::metadata(back.join("a/file"))?.ino(), fs::metadata(back.join("a/same"))?.ino());
    holds!(fs::read(back.join("a/b/large"))? == fs::read(tree.join("a/b/large"))?, "all of it");
    same!(cx.sh(&sandbox, "ls -A deep").await?, "tree");
    // So that it can be removed by whoever does not own the right to.
    set_mode(&tree.join("a/b"), 0o755)?;
    set_mode(&back.join("a/b"), 0o755)
}

async fn ten_thousand_small_files_go_up_and_come_down(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (many, back) = (cx.scratch().join("many"), cx.scratch().join("back"));
    for n in 0..10_000 {
        let directory = many.join(format!("{}", n % 100));
        if n < 100 {
            fs::create_dir_all(&directory)?;
        }
        fs::write(directory.join(format!("{n}")), format!("this is {n}"))?;
    }
    let up = sandbox.files().upload(&many, "many", UploadOptions::new(), &cx.sink).await?;
    same!(up.files, 10_101);
    same!(cx.sh(&sandbox, "find many -type f | wc -l; cat many/42/4242").await?, {
        "10000\nthis is 4242"
    });
    let down = sandbox.files().download("many", &back, DownloadOptions::new()).await?;
    same!((down.files, down.bytes), (up.files, up.bytes));
    holds!(listing(&back)? == listing(&many)?, "all of it comes back");
    same!(fs::read(back.join("42/4242"))?, b"this is 4242");
    Ok(())
}

async fn a_sparse_file_stays_sparse(cx: &Context) -> Check {
    use std::os::unix::fs::FileExt;
    let sandbox = cx.sandbox().await?;
    let (here, back) = (cx.scratch().join("here"), cx.scratch().join("back"));
    let file = fs::File::create(&here)?;
    file.set_len(1 << 30)?;
    file.write_all_at(b"middle", 500_000_000)?;
    upload(cx, &sandbox, &here, "sparse").await?;
    let text = "stat -c %s sparse; tail -c +500000001 sparse | head -c 6";
    same!(cx.sh(&sandbox, text).await?, format!("{}\nmiddle", 1 << 30));
    download(&sandbox, "sparse", &back).await?;
    let (file, back) = (file.metadata()?, fs::metadata(back)?);
    same!(back.len(), 1 << 30);
    // Where the host's filesystem has holes at all.
    if file.blocks() < 100_000 {
        holds!(back.blocks() < 100_000, "{} blocks are few", back.blocks());
    }
    Ok(())
}

async fn what_is_there_is_merged_replaced_or_kept_above(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let tree = cx.scratch().join("tree");
    fs::create_dir_all(tree.join("dir/new"))?;
    fs::write(tree.join("dir/both"), "new")?;
    fs::write(tree.join("file"), "new")?;
    let before =
        "rm -rf to; mkdir -p to/dir to/old; echo old > to/dir/both; echo old > to/dir/kept";
    let options = |existing| UploadOptions::new().existing(existing);

    cx.sh(&sandbox, before).await?;
    files.upload(&tree, "to", options(Existing::Merge), &cx.sink).await?;
    let all = "cd to; find . | sort | tr '\\n' ' '; cat dir/both";
    same!(cx.sh(&sandbox, all).await?, ". ./dir ./dir/both ./dir/kept ./dir/new ./file ./old new");
    files.upload(&tree, "to", options(Existing::Replace), &cx.sink).await?;
    same!(cx.sh(&sandbox, all).await?, ". ./dir ./dir/both ./dir/new ./file new");

    cx.sh(&sandbox, before).await?;
    let there = cx.sh(&sandbox, all).await?;
    let refused = files.upload(&tree, "to", options(Existing::Refuse), &cx.sink).await;
    let refused = error_of(refused)?;
    same!(refused.kind(), ErrorKind::Conflict);
    holds!(refused.to_string().contains("to"), "{refused} names it");
    for (local, remote) in [("file", "to/dir"), ("dir", "to/dir/both"), ("dir/both", "to")] {
        let refused = files.upload(tree.join(local), remote, options(Existing::Merge), &cx.sink);
        let refused = error_of(refused.await)?;
        same!(refused.kind(), ErrorKind::Conflict);
        holds!(refused.to_string().contains(remote), "{refused} names {remote}");
    }
    same!(cx.sh(&sandbox, all).await?, there);
    // What is in the way deep inside is seen before anything is changed.
    fs::write(tree.join("old"), "a file")?;
    let refused = error_of(files.upload(&tree, "to", options(Existing::Merge), &cx.sink).await)?;
    same!(refused.kind(), ErrorKind::Conflict);
    holds!(refused.to_string().contains("to/old"), "{refused} names it");
    same!(cx.sh(&sandbox, all).await?, there);
    files.upload(&tree, "to/old", options(Existing::Replace), &cx.sink).await?;
    files.upload(tree.join("file"), "to/dir", options(Existing::Replace), &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat to/dir to/old/old; ls -A . to").await?, {
        "newa file.:\nREADME\nlink\nrun.sh\nsrc\nto\n\nto:\ndir\nold"
    });
    Ok(())
}

async fn what_is_there_is_merged_replaced_or_kept_below(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir -p tree/dir/new; echo new > tree/dir/both; echo new > tree/file")
        .await?;
    let to = cx.scratch().join("to");
    let options = |existing| DownloadOptions::new().existing(existing);
    let before = || -> Check {
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(to.join("dir"))?;
        fs::write(to.join("dir/both"), "old\n")?;
        Ok(fs::write(to.join("dir/kept"), "old\n")?)
    };
    before()?;
    files.download("tree", &to, options(Existing::Merge)).await?;
    same!(names(&to)?, ["dir", "file"]);
    same!(names(&to.join("dir"))?, ["both", "kept", "new"]);
    same!(fs::read(to.join("dir/both"))?, b"new\n");
    files.download("tree", &to, options(Existing::Replace)).await?;
    same!(names(&to.join("dir"))?, ["both", "new"]);
    before()?;
    let there = listing(&to)?;
    for (remote, local, existing) in [
        ("tree", to.clone(), Existing::Refuse),
        ("tree/file", to.clone(), Existing::Merge),
        ("tree/dir", to.join("dir/both"), Existing::Merge),
    ] {
        let refused = error_of(files.download(remote, &local, options(existing)).await)?;
        same!(refused.kind(), ErrorKind::Conflict);
        holds!(refused.to_string().contains(&*local.to_string_lossy()), "{refused} names it");
        same!(listing(&to)?, there);
    }
    files.download("tree/file", &to, options(Existing::Replace)).await?;
    same!(fs::read(&to)?, b"new\n");
    Ok(())
}

/// What lies in a backend's lower layers may be harder to move.
async fn the_repository_is_replaced_and_merged_with(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let tree = cx.scratch().join("tree");
    fs::create_dir_all(tree.join("src/deep"))?;
    fs::write(tree.join("src/main.c"), "new\n")?;
    fs::write(tree.join("README"), "new\n")?;
    files.upload(&tree, ".", UploadOptions::new(), &cx.sink).await?;
    let text = "cat README src/main.c; ls -A . src";
    let said = "new\nnew\n.:\nREADME\nlink\nrun.sh\nsrc\n\nsrc:\ndeep\nmain.c";
    same!(cx.sh(&sandbox, text).await?, said);
    fs::remove_file(tree.join("src/main.c"))?;
    let replace = UploadOptions::new().existing(Existing::Replace);
    files.upload(tree.join("src"), "src", replace, &cx.sink).await?;
    same!(cx.sh(&sandbox, "ls -A . src").await?, ".:\nREADME\nlink\nrun.sh\nsrc\n\nsrc:\ndeep");
    let back = cx.scratch().join("back");
    download(&sandbox, ".", &back).await?;
    same!(names(&back)?, ["README", "link", "run.sh", "src"]);
    same!(fs::read_link(back.join("link"))?, Path::new("README"));
    same!(fs::metadata(back.join("run.sh"))?.mode() & 0o777, 0o755);
    Ok(())
}

async fn links_that_lead_outside_are_refused_and_others_kept(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir -p tree/a; ln -s ../b tree/a/good; ln -s a/good tree/too; : > tree/b")
        .await?;
    let to = cx.scratch().join("to");
    for target in ["/etc/passwd", "../../..", "../..", "good/../../..", "x/../../../y"] {
        cx.sh(&sandbox, &format!("ln -sfn '{target}' tree/a/bad")).await?;
        let refused = error_of(files.download("tree", &to, DownloadOptions::new()).await)?;
        same!(refused.kind(), ErrorKind::PermissionDenied);
        holds!(refused.to_string().contains("a/bad"), "{refused} names the link");
        holds!(refused.to_string().contains(target), "{refused} says where it leads");
        holds!(!to.exists(), "nothing was made");
    }
    let skip = DownloadOptions::new().outside_links(OutsideLinks::Skip);
    let down = files.download("tree", &to, skip).await?;
    same!((down.skipped, down.skipped_paths), (1, vec![PathBuf::from("a/bad")]));
    same!(names(&to.join("a"))?, ["good"]);
    same!(fs::read_link(to.join("a/good"))?, Path::new("../b"));
    same!(fs::read(to.join("too"))?, b"");
    let allow = DownloadOptions::new()
        .outside_links(OutsideLinks::AllowPointingAnywhereOnThisHost)
        .existing(Existing::Replace);
    files.download("tree", &to, allow).await?;
    same!(fs::read_link(to.join("a/bad"))?, Path::new("x/../../../y"));
    // Up, they are the sandbox's own affair.
    upload(cx, &sandbox, &to, "again").await?;
    same!(cx.sh(&sandbox, "readlink again/a/bad").await?, "x/../../../y");
    Ok(())
}

async fn what_is_no_file_is_refused_or_left_out(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir tree; mkfifo tree/fifo; echo 1 > tree/file").await?;
    let to = cx.scratch().join("to");
    let refused = files.download("tree", &to, DownloadOptions::new());
    let refused = error_of(soon("a download of a FIFO", refused).await?)?;
    same!(refused.kind(), ErrorKind::Unsupported);
    holds!(refused.to_string().contains("tree/fifo"), "{refused} names it");
    let down = files.download("tree", &to, DownloadOptions::new().skip_special()).await?;
    same!((down.skipped, down.skipped_paths), (1, vec![PathBuf::from("fifo")]));
    same!(names(&to)?, ["file"]);
    for it in ["tree/fifo", "/dev/null"] {
        let refused = files.download(it, cx.scratch().join("it"), DownloadOptions::new());
        let refused = error_of(soon("a download of a FIFO", refused).await?)?;
        same!(refused.kind(), ErrorKind::Conflict);
        holds!(refused.to_string().contains(it), "{refused} names it");
    }
    let _socket = std::os::unix::net::UnixListener::bind(to.join("socket"))?;
    let up = files.upload(&to, "back", UploadOptions::new().skip_special(), &cx.sink).await?;
    same!((up.skipped, up.skipped_paths), (1, vec![PathBuf::from("socket")]));
    same!(cx.sh(&sandbox, "ls back").await?, "file");
    Ok(())
}

async fn limits_of_a_download_are_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir tree; cd tree; seq 1 50 | xargs touch; head -c 1000 /dev/zero > 1")
        .await?;
    cx.sh(&sandbox, "truncate -s 1T sparse").await?;
    let to = cx.scratch().join("downloads");
    fs::create_dir(&to)?;
    let few = DownloadOptions::new().max_files(20);
    let little = DownloadOptions::new().max_bytes(999);
    for (remote, options, limit) in
        [("tree", few, "20"), ("tree", little.clone(), "999"), ("sparse", little, "999")]
    {
        let error = error_of(files.download(remote, to.join("to"), options).await)?;
        same!(error.kind(), ErrorKind::LimitExceeded);
        holds!(error.to_string().contains(limit), "{error} says the limit");
        same!(names(&to)?, Vec::<String>::new());
    }
    let error = error_of(files.download("sparse", to.join("to"), DownloadOptions::new()).await)?;
    same!(error.kind(), ErrorKind::LimitExceeded);
    let enough = DownloadOptions::new().max_files(51).max_bytes(1000);
    same!(files.download("tree", to.join("to"), enough).await?.files, 51);
    Ok(())
}

async fn errors_name_the_path(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let (here, nowhere) = (cx.scratch().join("here"), cx.scratch().join("no/where"));
    fs::write(&here, "x")?;
    let up = |local: &Path, remote: &'static str| {
        let local = local.to_owned();
        let files = files.clone();
        async move { files.upload(local, remote, UploadOptions::new(), &cx.sink).await }
    };
    let error = error_of(up(&nowhere, "new").await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.to_string().contains("no/where"), "{error} names the path");
    holds!(error.sandbox() == Some(sandbox.id()), "{error} names the sandbox");
    let error = error_of(up(&here, "README/below").await)?;
    same!(error.kind(), ErrorKind::Conflict);
    holds!(error.to_string().contains("README/below"), "{error} names the path");
    let error = error_of(files.download("no/thing", &here, DownloadOptions::new()).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.to_string().contains("no/thing"), "{error} names the path");
    holds!(error.sandbox() == Some(sandbox.id()), "{error} names the sandbox");
    let error = error_of(files.download("README", &nowhere, DownloadOptions::new()).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.to_string().contains("no/where"), "{error} names the path");
    if cx.sh(&sandbox, "id -u").await? != "0" {
        cx.sh(&sandbox, "mkdir closed; mkdir tree; : > tree/secret; chmod 0 closed tree/secret")
            .await?;
        let error = error_of(up(&here, "closed/new").await)?;
        same!(error.kind(), ErrorKind::PermissionDenied);
        holds!(error.to_string().contains("closed/new"), "{error} names the path");
        let to = cx.scratch().join("to");
        let error = error_of(files.download("tree", to, DownloadOptions::new()).await)?;
        same!(error.kind(), ErrorKind::PermissionDenied);
        holds!(error.to_string().contains("tree/secret"), "{error} names the path");
    }
    Ok(())
}

async fn progress_is_told(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let tree = cx.scratch().join("tree");
    let size = plant_large(&tree)?;
    let last = Arc::new([const { AtomicU64::new(0) }; 4]);
    let listener = || {
        let last = Arc::clone(&last);
        move |progress: &sandbox_core::Progress| {
            let rises = last[0].swap(progress.bytes, Ordering::Relaxed) <= progress.bytes;
            last[1].store(progress.files, Ordering::Relaxed);
            last[2].store(progress.total.unwrap_or(0), Ordering::Relaxed);
            last[3].fetch_add(if rises { 1 } else { 1_000_000 }, Ordering::Relaxed);
        }
    };
    let told = || {
        let told: Vec<u64> = last.iter().map(|one| one.swap(0, Ordering::Relaxed)).collect();
        (told[0], told[1], told[2], told[3])
    };
    let up = UploadOptions::new().progress(listener());
    sandbox.files().upload(&tree, "tree", up, &cx.sink).await?;
    let (bytes, files, total, times) = told();
    same!((bytes, files, total), (size, 17, 0));
    holds!((5..1_000_000).contains(&times), "it was told {times} times, and rose");
    let down = DownloadOptions::new().progress(listener());
    sandbox.files().download("tree/1", cx.scratch().join("one"), down).await?;
    let (bytes, files, total, times) = told();
    same!((bytes, files, total), (1 << 20, 1, 1 << 20));
    holds!((2..1_000_000).contains(&times), "it was told {times} times, and rose");
    Ok(())
}

async fn uploads_are_in_the_history(cx: &Context) -> Check {
    use sandbox_core::Known;
    let sandbox = cx.sandbox().await?;
    upload(cx, &sandbox, &cx.repository(), "copy").await?;
    sandbox.files().write_from("file", &b"streamed"[..], &cx.sink).await?;
    let history = cx.manager.history(sandbox.id(), 0).await?;
    let recorded: Vec<(String, String)> = history
        .iter()
        .filter_map(|event| match event.known() {
            Some(Known::FileOperation { operation, path }) => {
                Some((operation.clone(), path.clone()))
            }
            _ => None,
        })
        .collect();
    let wanted = [("upload", "copy"), ("write", "file")].map(|(a, b)| (a.into(), b.into()));
    same!(recorded, wanted);
    let told = cx.sink.events();
    let told = told.iter().filter(|event| event.name() == "file_operation").count();
    same!(told, 2);
    // To look at files changes nothing.
    download(&sandbox, "copy", &cx.scratch().join("copy")).await?;
    same!(cx.manager.history(sandbox.id(), 0).await?.len(), history.len());
    Ok(())
}
