//! Parts of files, files as streams, and directories as streams.

use std::{
    pin::Pin,
    task::{Context as Poller, Poll},
};

use sandbox_core::{Error, ErrorKind, READ_LIMIT};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, pause, soon},
    holds, same,
};

cases!("streams";
    [] a_part_of_a_file_is_read,
    [] text_is_read_as_text,
    [] a_file_is_streamed_up_and_down,
    [] a_stream_up_that_fails_or_is_dropped_leaves_the_file,
    [] a_stream_down_that_is_dropped_holds_nothing_up,
    [] errors_of_streams_name_the_path,
    [] a_directory_is_read_one_by_one,
    [] a_path_is_followed_to_where_it_leads,
);

async fn a_part_of_a_file_is_read(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let all: Vec<u8> = (0..=255).cycle().take(1_000_003).collect();
    files.write("file", &all, &cx.sink).await?;
    for (offset, length) in
        [(0, 0), (0, 10), (5, 1), (300, 700_000), (1_000_000, 3), (0, 1_000_003)]
    {
        let part = files.read_range("file", offset as u64, length as u64).await?;
        holds!(part == all[offset..offset + length], "{length} from {offset} on");
    }
    same!(files.read_range("file", 1_000_000, 100).await?, all[1_000_000..]);
    same!(files.read_range("file", 2_000_000, 100).await?, b"");
    let error = error_of(files.read_range("file", 0, READ_LIMIT + 1).await)?;
    same!(error.kind(), ErrorKind::LimitExceeded);
    let (said, limit) = (error.to_string(), READ_LIMIT.to_string());
    holds!(said.contains("file") && said.contains(&limit), "{said} names the file and the limit");
    cx.sh(&sandbox, "truncate -s 100G huge; printf end >> huge").await?;
    same!(files.read_range("huge", 100 << 30, 10).await?, b"end");
    same!(error_of(files.read_range("src", 0, 1).await)?.kind(), ErrorKind::Conflict);
    same!(error_of(files.read_range("nothing", 0, 1).await)?.kind(), ErrorKind::NotFound);
    Ok(())
}

async fn text_is_read_as_text(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    files.write("text", "ein schöner Text\n", &cx.sink).await?;
    same!(files.read_to_string("text").await?, "ein schöner Text\n");
    files.write("bytes", b"abc\xff", &cx.sink).await?;
    let error = error_of(files.read_to_string("bytes").await)?;
    same!(error.kind(), ErrorKind::Conflict);
    let said = error.to_string();
    holds!(
        said.contains("bytes") && said.contains("byte 3"),
        "{said} names the file and the place"
    );
    Ok(())
}

async fn a_file_is_streamed_up_and_down(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    // Not where pieces end, and across many of them.
    let all: Vec<u8> = (0..=250).cycle().take(9_000_001).collect();
    for contents in [&all[..], b"", b"x"] {
        let sent = files.write_from("new/file", contents, &cx.sink).await?;
        same!(sent, contents.len() as u64);
        let mut reader = files.reader("new/file", 0).await?;
        same!(reader.metadata().size, contents.len() as u64);
        let mut back = Vec::new();
        reader.read_to_end(&mut back).await?;
        holds!(back == contents, "{} bytes come back", contents.len());
        same!(reader.read(&mut [0; 10]).await?, 0);
    }
    files.write_from("file", &all[..], &cx.sink).await?;
    let mut rest = Vec::new();
    files.reader("file", 8_000_000).await?.read_to_end(&mut rest).await?;
    holds!(rest == all[8_000_000..], "the rest comes back");
    // From one sandbox into another, or into the same.
    let copied = files.write_from("copy", files.reader("file", 0).await?, &cx.sink).await?;
    same!(copied, all.len() as u64);
    same!(cx.sh(&sandbox, "cmp file copy && echo same").await?, "same");
    Ok(())
}

/// Gives some bytes and then fails, or waits for ever.
struct Faulty {
    left: usize,
    fails: bool,
}

impl AsyncRead for Faulty {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Poller<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.left == 0 {
            let error = || std::io::Error::other("the disk is on fire");
            return if self.fails { Poll::Ready(Err(error())) } else { Poll::Pending };
        }
        let count = self.left.min(buf.remaining());
        buf.put_slice(&vec![7; count]);
        self.left -= count;
        Poll::Ready(Ok(()))
    }
}

async fn a_stream_up_that_fails_or_is_dropped_leaves_the_file(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let before = cx.sh(&sandbox, "ls -A; cat README").await?;
    for path in ["README", "new"] {
        let faulty = Faulty { left: 3_000_000, fails: true };
        let error = error_of(files.write_from(path, faulty, &cx.sink).await)?;
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        holds!(cause.is_some_and(|cause| cause.contains("fire")), "{error:?} has the cause");
        let endless = Faulty { left: 3_000_000, fails: false };
        let write = files.write_from(path, endless, &cx.sink);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(300), write).await;
        holds!(waited.is_err(), "it waits for more");
    }
    let cleaned = async {
        while cx.sh(&sandbox, "ls -A; cat README").await? != before {
            pause().await;
        }
        Check::Ok(())
    };
    soon("an end of the half-written files", cleaned).await?
}

async fn a_stream_down_that_is_dropped_holds_nothing_up(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "truncate -s 10G large").await?;
    let mut readers = Vec::new();
    for _ in 0..20 {
        let mut reader = files.reader("large", 0).await?;
        reader.read_exact(&mut [0; 1000]).await?;
        readers.push(reader);
        // Those that nobody reads hold up no others.
        same!(soon("another read", files.read("README")).await??, b"v1\n");
    }
    drop(readers);
    same!(soon("another read", files.read("README")).await??, b"v1\n");
    Ok(())
}

async fn errors_of_streams_name_the_path(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    let about = |error: &Error, kind: ErrorKind, path: &str| -> Check {
        same!(error.kind(), kind);
        holds!(error.to_string().contains(path), "{error} names {path}");
        Ok(())
    };
    about(&error_of(files.reader("no/thing", 0).await)?, ErrorKind::NotFound, "no/thing")?;
    about(&error_of(files.reader("src", 0).await)?, ErrorKind::Conflict, "src")?;
    let write = files.write_from("src", &b"x"[..], &cx.sink);
    about(&error_of(write.await)?, ErrorKind::Conflict, "src")?;
    // What is refused is told even if not all of it has been sent.
    let endless = Faulty { left: 1 << 40, fails: false };
    let write = files.write_from("README/below", endless, &cx.sink);
    let error = error_of(soon("a refusal", write).await?)?;
    about(&error, ErrorKind::Conflict, "README/below")?;
    about(&error_of(files.read_dir("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    about(&error_of(files.canonicalize("no/thing").await)?, ErrorKind::NotFound, "no/thing")?;
    Ok(())
}

async fn a_directory_is_read_one_by_one(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir large; cd large; seq 1 3000 | xargs touch").await?;
    let mut entries = files.read_dir("large").await?;
    let mut names = std::collections::BTreeSet::new();
    while let Some(entry) = entries.next().await? {
        same!(entry.metadata.size, 0);
        holds!(names.insert(entry.name.clone()), "{:?} comes once", entry.name);
    }
    same!(names.len(), 3000);
    same!(entries.next().await?, None);
    cx.sh(&sandbox, "mkdir empty").await?;
    same!(files.read_dir("empty").await?.next().await?, None);
    same!(error_of(files.read_dir("README").await)?.kind(), ErrorKind::Conflict);
    Ok(())
}

async fn a_path_is_followed_to_where_it_leads(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let files = sandbox.files();
    cx.sh(&sandbox, "mkdir -p a/b; ln -s ../../README a/b/up; ln -s a/b to; ln -s no/where bad")
        .await?;
    let home = cx.sh(&sandbox, "pwd -P").await?;
    same!(files.canonicalize("to/up").await?.to_string_lossy(), format!("{home}/README"));
    same!(files.canonicalize("./a/../a/b").await?.to_string_lossy(), format!("{home}/a/b"));
    same!(error_of(files.canonicalize("bad").await)?.kind(), ErrorKind::NotFound);
    same!(files.exists("to/up").await?, true);
    same!(files.exists("bad").await?, false);
    same!(files.exists("no/thing").await?, false);
    Ok(())
}
