//! Files, from outside.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use sandbox_core::{Command, Error, ErrorKind, FileKind, READ_LIMIT};

use super::cases;
use crate::{Check, Context, context::error_of, holds, same};

cases!("files";
    [] what_is_written_is_read_and_seen_inside,
    [] parents_are_made,
    [] a_write_is_all_or_nothing,
    [] a_write_keeps_the_mode_and_follows_links,
    [] appending_adds_to_the_end,
    [] names_may_be_anything,
    [] metadata_is_what_stat_says,
    [] a_list_has_everything_and_is_sorted,
    [] a_large_directory_is_listed_completely,
    [] rename_replaces,
    [] rename_moves_directories_of_the_repository_too,
    [] remove_takes_one_and_remove_all_a_tree,
    [] directories_and_links_are_made,
    [] modes_are_set,
    [] what_is_missing_is_not_found,
    [] what_is_of_the_wrong_kind_is_a_conflict,
    [ProcessIsolation] what_is_forbidden_is_a_denied_permission,
    [] what_is_too_large_names_the_limit,
    [] a_fifo_holds_nobody_up,
    [] many_files_at_once,
);

fn odd(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// The error is of this kind and names the path.
fn about(error: &Error, kind: ErrorKind, path: &str) -> Check {
    holds!(error.kind() == kind, "{error:?} is {kind:?}");
    holds!(error.to_string().contains(path), "{error} names {path}");
    Ok(())
}

async fn what_is_written_is_read_and_seen_inside(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    same!(files.read("README").await?, b"v1\n");
    same!(files.read("link").await?, b"v1\n");
    let all: Vec<u8> = (0..=255).cycle().take(3_000_001).collect();
    for contents in [&b""[..], b"text\n", b"\0\xff", &all] {
        files.write("file", contents, &cx.sink).await?;
        holds!(files.read("file").await? == contents, "{} bytes come back", contents.len());
        let size = cx.sh(&sandbox, "wc -c < file").await?;
        same!(size.trim().parse::<usize>()?, contents.len());
    }
    cx.sh(&sandbox, "echo inside > README").await?;
    same!(files.read("README").await?, b"inside\n");
    let absolute = PathBuf::from(cx.sh(&sandbox, "pwd").await?).join("README");
    same!(files.read(absolute).await?, b"inside\n");
    Ok(())
}

async fn parents_are_made(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    sandbox.files().write("a/b/c/file", "x", &cx.sink).await?;
    sandbox.files().append("d/e/file", "y", &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat a/b/c/file d/e/file").await?, "xy");
    same!(cx.sh(&sandbox, "stat -c %a a/b a/b/c/file").await?, "755\n644");
    Ok(())
}

async fn a_write_is_all_or_nothing(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let (ones, twos) = (vec![b'1'; 1 << 20], vec![b'2'; 1 << 20]);
    sandbox.files().write("file", &ones, &cx.sink).await?;
    // Whoever reads sees one or the other as a whole.
    let text = "while [ ! -e stop ]; do
        sum=$(tr -d '\\n' < file | tr -s 12 | head -c 3); echo \"$sum $(wc -c < file)\"; done";
    let reader = sandbox.spawn(Command::shell(text), &cx.sink).await?;
    for n in 0..40 {
        let contents = if n % 2 == 0 { &twos } else { &ones };
        sandbox.files().write("file", contents, &cx.sink).await?;
    }
    sandbox.files().write("stop", "", &cx.sink).await?;
    let run = reader.wait(&sandbox, &cx.sink).await?;
    let said = run.stdout.text().into_owned();
    holds!(said.lines().count() > 0, "it has read");
    for line in said.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        holds!(fields == ["1", "1048576"] || fields == ["2", "1048576"], "{line:?} is whole");
    }
    // A write that is dropped half way leaves what there was, and nothing beside it.
    let (before, large) = (cx.sh(&sandbox, "ls -a").await?, vec![b'3'; 60 << 20]);
    for n in 0..10 {
        let (sandbox, large) = (sandbox.clone(), large.clone());
        let write = tokio::spawn(async move {
            sandbox.files().write("file", large, &sandbox_core::Suppressed).await
        });
        tokio::time::sleep(std::time::Duration::from_millis(n)).await;
        write.abort();
        let _ = write.await;
    }
    let cleaned = async {
        while cx.sh(&sandbox, "ls -a").await? != before {
            crate::context::pause().await;
        }
        Check::Ok(())
    };
    crate::context::soon("an end of the half-written files", cleaned).await??;
    let first = cx.sh(&sandbox, "head -c 1 file; wc -c < file").await?;
    holds!(["11048576", "21048576", "362914560"].contains(&first.as_str()), "{first:?} is whole");
    Ok(())
}

async fn a_write_keeps_the_mode_and_follows_links(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    files.write("run.sh", "#!/bin/sh\necho written\n", &cx.sink).await?;
    same!(cx.sh(&sandbox, "./run.sh").await?, "written");
    files.write("link", "through\n", &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README; readlink link").await?, "through\nREADME");
    cx.sh(&sandbox, "ln -s later dangling; mkdir sub; ln -s ../README sub/up").await?;
    files.write("dangling", "now\n", &cx.sink).await?;
    files.append("sub/up", "more\n", &cx.sink).await?;
    same!(
        cx.sh(&sandbox, "cat later README; readlink dangling").await?,
        "now\nthrough\nmore\nlater"
    );
    Ok(())
}

async fn appending_adds_to_the_end(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for n in 0..10 {
        sandbox.files().append("log", format!("{n}\n"), &cx.sink).await?;
    }
    cx.sh(&sandbox, "echo inside >> log").await?;
    sandbox.files().append("log", "", &cx.sink).await?;
    sandbox.files().append("log", "end\n", &cx.sink).await?;
    same!(cx.sh(&sandbox, "tr '\\n' ' ' < log").await?, "0 1 2 3 4 5 6 7 8 9 inside end ");
    Ok(())
}

async fn names_may_be_anything(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let names = [
        odd(b"with  spaces "),
        odd(b"new\nline"),
        odd(b"\xff\xfe"),
        odd(b"-rf"),
        odd(b"*?[a]$HOME`id`"),
        odd("\u{1f600}".as_bytes()),
        odd(&[b'n'; 255]),
    ];
    for name in &names {
        let path = Path::new("names").join(name);
        files.write(&path, name.as_encoded_bytes(), &cx.sink).await?;
        same!(files.read(&path).await?, name.as_encoded_bytes());
        same!(files.metadata(&path).await?.size, name.len() as u64);
    }
    let mut expected = names.to_vec();
    expected.sort();
    let found: Vec<OsString> = files.list("names").await?.into_iter().map(|e| e.name).collect();
    same!(found, expected);
    same!(cx.sh(&sandbox, "ls names/ | wc -c").await?.trim().parse::<usize>()?, {
        names.iter().map(|name| name.len() + 1).sum::<usize>()
    });
    for name in &names {
        let path = Path::new("names").join(name);
        files.rename(&path, "names/other", &cx.sink).await?;
        files.remove("names/other", &cx.sink).await?;
    }
    same!(files.list("names").await?, []);
    let long = error_of(files.write("n".repeat(256), "", &cx.sink).await)?;
    holds!(long.to_string().contains("nnn"), "{long} names the path");
    Ok(())
}

async fn metadata_is_what_stat_says(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let text = "printf 12345 > file; chmod 4751 file; touch -d '2001-02-03 04:05:06 UTC' file
        mkdir dir; chmod 1700 dir; ln -s file to; ln -s missing nowhere; mkfifo fifo; stat -c '%u %g' file";
    let said = cx.sh(&sandbox, text).await?;
    let files = sandbox.files();
    let file = files.metadata("file").await?;
    same!((file.kind, file.size, file.mode), (FileKind::File, 5, 0o4751));
    same!(file.modified.as_second(), 981_173_106);
    same!(format!("{} {}", file.uid, file.gid), said);
    same!(file.target, None);
    same!(files.metadata("to").await?, file);
    let link = files.symlink_metadata("to").await?;
    same!((link.kind, link.target), (FileKind::Symlink, Some(PathBuf::from("file"))));
    let nowhere = files.symlink_metadata("nowhere").await?;
    same!(nowhere.target, Some(PathBuf::from("missing")));
    about(&error_of(files.metadata("nowhere").await)?, ErrorKind::NotFound, "nowhere")?;
    let dir = files.metadata("dir").await?;
    same!((dir.kind, dir.mode), (FileKind::Directory, 0o1700));
    same!(files.metadata("fifo").await?.kind, FileKind::Other);
    same!(files.metadata(".").await?.kind, FileKind::Directory);
    Ok(())
}

async fn a_list_has_everything_and_is_sorted(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(
        &sandbox,
        "mkdir dir; : > dir/.hidden; echo 1 > dir/b; : > dir/B; ln -s / dir/a; mkdir dir/c",
    )
    .await?;
    let list = sandbox.files().list("dir").await?;
    let names: Vec<&OsStr> = list.iter().map(|entry| entry.name.as_os_str()).collect();
    same!(names, [".hidden", "B", "a", "b", "c"]);
    let kinds: Vec<FileKind> = list.iter().map(|entry| entry.metadata.kind).collect();
    use FileKind::{Directory, File, Symlink};
    same!(kinds, [File, File, Symlink, File, Directory]);
    same!(list[3].metadata.size, 2);
    same!(sandbox.files().list("dir/c").await?, []);
    Ok(())
}

async fn a_large_directory_is_listed_completely(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "mkdir large; cd large; seq 1 10000 | sed 's/$/ a longer name/' | tr '\\n' '\\0' | xargs -0 touch").await?;
    let list = sandbox.files().list("large").await?;
    same!(list.len(), 10_000);
    holds!(list.is_sorted_by(|a, b| a.name < b.name), "they are sorted, and each is there once");
    Ok(())
}

async fn rename_replaces(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    files.rename("README", "src/main.c", &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat src/main.c; ls README 2>/dev/null || echo gone").await?, "v1\ngone");
    let error = error_of(files.rename("nothing", "else", &cx.sink).await)?;
    about(&error, ErrorKind::NotFound, "nothing")?;
    files.create_dir_all("full/of", &cx.sink).await?;
    files.create_dir_all("moved", &cx.sink).await?;
    let error = error_of(files.rename("moved", "full", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "full")
}

async fn rename_moves_directories_of_the_repository_too(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir made; echo made > made/file; echo added > src/added").await?;
    for (from, to) in [("made", "moved"), ("src", "source"), ("source", "moved/again")] {
        files.rename(from, to, &cx.sink).await?;
    }
    same!(cx.sh(&sandbox, "cat moved/file moved/again/added; ls; ls moved/again").await?, {
        "made\nadded\nREADME\nlink\nmoved\nrun.sh\nadded\nmain.c"
    });
    Ok(())
}

async fn remove_takes_one_and_remove_all_a_tree(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir -p empty tree/a/b kept; : > kept/file; ln -s ../kept tree/a/link; : > tree/f; chmod 500 tree/a/b").await?;
    files.remove("empty", &cx.sink).await?;
    files.remove("link", &cx.sink).await?;
    let error = error_of(files.remove("tree", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "tree")?;
    files.remove_all("tree", &cx.sink).await?;
    files.remove_all("README", &cx.sink).await?;
    same!(cx.sh(&sandbox, "ls; ls kept").await?, "kept\nrun.sh\nsrc\nfile");
    for error in [
        error_of(files.remove("nothing", &cx.sink).await)?,
        error_of(files.remove_all("nothing", &cx.sink).await)?,
    ] {
        about(&error, ErrorKind::NotFound, "nothing")?;
    }
    Ok(())
}

async fn directories_and_links_are_made(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    files.create_dir_all("a/b/c", &cx.sink).await?;
    files.create_dir_all("a/b/c", &cx.sink).await?;
    let error = error_of(files.create_dir_all("README", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "README")?;
    let error = error_of(files.create_dir_all("README/below", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "README")?;
    files.symlink("../README", "a/link", &cx.sink).await?;
    files.symlink(odd(b"\xff missing"), "a/odd", &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat a/link; ls a").await?, "v1\nb\nlink\nodd");
    same!(files.symlink_metadata("a/odd").await?.target, Some(odd(b"\xff missing").into()));
    let error = error_of(files.symlink("x", "a/link", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "a/link")
}

async fn modes_are_set(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    for mode in [0o600, 0o755, 0o444, 0o2711] {
        files.set_mode("README", mode, &cx.sink).await?;
        same!(cx.sh(&sandbox, "stat -c %a README").await?, format!("{mode:o}"));
    }
    let error = error_of(files.set_mode("nothing", 0o600, &cx.sink).await)?;
    about(&error, ErrorKind::NotFound, "nothing")
}

async fn what_is_missing_is_not_found(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    about(&error_of(files.read("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    about(&error_of(files.list("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    about(&error_of(files.metadata("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    about(&error_of(files.symlink_metadata("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    let error = error_of(files.read("no/thing").await)?;
    holds!(error.sandbox() == Some(sandbox.id()), "{error} names the sandbox");
    let error = error_of(files.remove("no/thing", &cx.sink).await)?;
    holds!(error.sandbox() == Some(sandbox.id()), "{error} names the sandbox");
    Ok(())
}

async fn what_is_of_the_wrong_kind_is_a_conflict(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    about(&error_of(files.read("src").await)?, ErrorKind::Conflict, "src")?;
    about(&error_of(files.list("README").await)?, ErrorKind::Conflict, "README")?;
    about(&error_of(files.write("src", "x", &cx.sink).await)?, ErrorKind::Conflict, "src")?;
    about(&error_of(files.append("src", "x", &cx.sink).await)?, ErrorKind::Conflict, "src")?;
    let error = error_of(files.write("README/below", "x", &cx.sink).await)?;
    about(&error, ErrorKind::Conflict, "README")?;
    same!(cx.sh(&sandbox, "cat README; ls src").await?, "v1\nmain.c");
    Ok(())
}

async fn what_is_forbidden_is_a_denied_permission(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(
        &sandbox,
        "echo 1 > secret; chmod 000 secret; mkdir closed; : > closed/file; chmod 000 closed",
    )
    .await?;
    if cx.sh(&sandbox, "id -u").await? != "0" {
        about(&error_of(files.read("secret").await)?, ErrorKind::PermissionDenied, "secret")?;
        about(&error_of(files.list("closed").await)?, ErrorKind::PermissionDenied, "closed")?;
        let error = error_of(files.metadata("closed/file").await)?;
        about(&error, ErrorKind::PermissionDenied, "closed/file")?;
        let error = error_of(files.write("closed/new", "x", &cx.sink).await)?;
        about(&error, ErrorKind::PermissionDenied, "closed/new")?;
    }
    let error = error_of(files.write("/proc/version", "x", &cx.sink).await)?;
    holds!(
        matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::NotFound),
        "{error} says that it may not"
    );
    Ok(())
}

async fn what_is_too_large_names_the_limit(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(
        &sandbox,
        &format!("truncate -s {READ_LIMIT} fits; truncate -s {} larger", READ_LIMIT + 1),
    )
    .await?;
    same!(sandbox.files().read("fits").await?.len() as u64, READ_LIMIT);
    let error = error_of(sandbox.files().read("larger").await)?;
    about(&error, ErrorKind::LimitExceeded, "larger")?;
    holds!(error.to_string().contains(&READ_LIMIT.to_string()), "{error} says the limit");
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_fifo_holds_nobody_up(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkfifo fifo").await?;
    let read = crate::context::soon("reading a FIFO", files.read("fifo")).await?;
    about(&error_of(read)?, ErrorKind::Conflict, "fifo")?;
    let write = crate::context::soon("writing a FIFO", files.append("fifo", "x", &cx.sink)).await?;
    about(&error_of(write)?, ErrorKind::Conflict, "fifo")?;
    same!(files.read("README").await?, b"v1\n");
    Ok(())
}

async fn many_files_at_once(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..64_u32 {
        let files = sandbox.files();
        tasks.spawn(async move {
            let (path, contents) = (format!("many/{}/{n}", n % 8), vec![n as u8; 100_000]);
            files.write(&path, &contents, &sandbox_core::Suppressed).await?;
            files.append(&path, "x", &sandbox_core::Suppressed).await?;
            let read = files.read(&path).await?;
            Ok::<bool, Error>(read[..100_000] == contents && read[100_000..] == *b"x")
        });
    }
    while let Some(done) = crate::context::soon("a file", tasks.join_next()).await? {
        holds!(done??, "it is what was written");
    }
    same!(cx.sh(&sandbox, "find many -type f | wc -l").await?.trim(), "64");
    Ok(())
}
