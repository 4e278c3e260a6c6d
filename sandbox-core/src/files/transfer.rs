//! Files and trees, up and down, as streams with constant memory.
//!
//! The local side is a thread of its own, joined to the stream by a short queue. When a call is dropped
//! its queue ends, and the thread removes what it has made.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sandbox_guest::{
    Failure, FailureKind, FileRequest, Input, Request, Response, TreeRecord,
    frame::{self, Channel, Frame},
    mux::Stream,
    tree::{Links, Piece, Source, SourceOptions, Target, TargetOptions, Totals},
};
use tokio::{
    io::{AsyncRead, AsyncWriteExt, BufReader},
    sync::mpsc,
    task::JoinHandle,
};

use super::{
    DownloadOptions, Existing, Files, OutsideLinks, Progress, Transferred, UploadOptions,
    next_frame, protocol, wire,
};
use crate::{
    Error, ErrorKind, Result, TurnEventSink,
    guest::{self, Link},
};

/// How long a transfer may stand still.
const STALL: Duration = Duration::from_secs(120);

/// How much is gathered before it is written.
const GATHER: usize = 256 * 1024;

/// How many such parts are on their way between the two sides.
const QUEUE: usize = 4;

impl Files {
    /// Uploads a file, or a directory with all that is in it, so that it becomes `remote`; a missing
    /// directory above that is made.
    ///
    /// As with `cp -rT`, `remote` is always the name of the copy itself, never a directory that it is put
    /// into. Contents, modes, modification times (to the nanosecond), symbolic links as they are, hard links
    /// within the tree and holes are kept; the owner becomes the sandbox's user. `local` itself may be a
    /// link, which is followed. All of it appears at the end: if the upload fails or its future is dropped,
    /// `remote` is as it was.
    ///
    /// Takes constant memory, and one stream whatever the number of files.
    ///
    /// # Errors
    ///
    /// What the system says of a file here or there, with the path; `Unsupported` for devices, FIFOs and
    /// sockets; `Conflict` for something at the destination that is in the way; `LimitExceeded` for
    /// directories too deep or a full disk; `Timeout` if nothing moves for two minutes.
    pub async fn upload(
        &self,
        local: impl AsRef<Path>,
        remote: impl AsRef<Path>,
        options: UploadOptions,
        sink: &dyn TurnEventSink,
    ) -> Result<Transferred> {
        let remote = remote.as_ref();
        let local = local.as_ref().to_owned();
        let how = SourceOptions {
            skip_special: options.skip_special,
            channel: Channel::In,
            encode: |record| frame::encode(&Input::Tree(record)),
        };
        let opened = work(move || Source::open(&local, how)).await;
        let source = opened.map_err(|failure| self.about(here("upload", failure)))?;
        let existing = match options.existing {
            Existing::Merge => sandbox_guest::Existing::Merge,
            Existing::Replace => sandbox_guest::Existing::Replace,
            Existing::Refuse => sandbox_guest::Existing::Refuse,
        };
        let request = FileRequest::Upload { path: wire(remote), existing };
        let (call, link) = self.begin("upload", remote, sink).await?;
        call.finish(send(&link, request, source, &options).await)
    }

    /// Downloads a file, or a directory with all that is in it, so that it becomes `local` on this host;
    /// the directory above that must be there.
    ///
    /// As [`upload`](Self::upload), the other way round. What comes from a sandbox is hostile: nothing is
    /// written outside of `local`, whatever the sandbox sends; set-user-id, set-group-id and sticky bits are
    /// not taken; symbolic links that stay inside are kept, others refused unless
    /// [`DownloadOptions::outside_links`] says otherwise. If the download fails or its future is dropped,
    /// `local` is soon as it was. What is on its way is called `.sandbox-transfer-…`, beside `local` or in it.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload); `PermissionDenied` for links that lead outside; `LimitExceeded` for more
    /// than the options allow; `Guest` for what no honest guest sends. What is refused is named.
    pub async fn download(
        &self,
        remote: impl AsRef<Path>,
        local: impl AsRef<Path>,
        options: DownloadOptions,
    ) -> Result<Transferred> {
        let link = self.shared.link(&self.inner).await?;
        let request = FileRequest::Download {
            path: wire(remote.as_ref()),
            skip_special: options.skip_special,
        };
        let how = target_options(&options);
        let local = local.as_ref().to_owned();
        let created = work(move || Target::create(&local, how)).await;
        let target = created.map_err(|failure| self.about(here("download", failure)))?;
        receive(&link, request, target, options).await.map_err(|error| self.about(error))
    }
}

fn target_options(options: &DownloadOptions) -> TargetOptions {
    TargetOptions {
        existing: match options.existing {
            Existing::Merge => sandbox_guest::Existing::Merge,
            Existing::Replace => sandbox_guest::Existing::Replace,
            Existing::Refuse => sandbox_guest::Existing::Refuse,
        },
        parents: false,
        modes: 0o777,
        links: match options.links {
            OutsideLinks::Refuse => Links::Inside,
            OutsideLinks::Skip => Links::InsideOrSkip,
            OutsideLinks::AllowPointingAnywhereOnThisHost => Links::All,
        },
        max_entries: options.max_files,
        max_bytes: options.max_bytes,
    }
}

/// Sends a tree that is read here.
async fn send(
    link: &Link,
    request: FileRequest,
    source: Source,
    options: &UploadOptions,
) -> Result<Transferred> {
    let (mut reader, mut writer) = tokio::io::split(link.open(Request::File(request)).await?);
    let total = source.size();
    let (give, mut take) = mpsc::channel(QUEUE);
    let reading = tokio::task::spawn_blocking(move || read(source, &give));
    let all_sent = AtomicBool::new(false);
    let feed = async {
        while let Some(Part { frames, bytes, files, last }) = take.recv().await {
            all_sent.store(last, Ordering::Release);
            moving("upload", writer.write_all(&frames)).await?.map_err(guest::broken)?;
            options.listener.tell(&Progress { bytes, files, total });
            // Whoever takes it back now finds the rest unsent.
            tokio::task::yield_now().await;
        }
        let totals = joined(reading).await.map_err(|failure| here("upload", failure))?;
        moving("upload", writer.flush()).await?.map_err(guest::broken)?;
        Ok(totals)
    };
    answer(feed, &all_sent, &mut reader).await.map(transferred)
}

/// Some of a tree, as it is sent.
struct Part {
    frames: Vec<u8>,
    /// With what was sent before.
    bytes: u64,
    files: u64,
    last: bool,
}

/// Reads a tree to its end, or until nobody wants it any more.
fn read(mut source: Source, give: &mpsc::Sender<Part>) -> std::result::Result<Totals, Failure> {
    loop {
        let mut frames = Vec::with_capacity(GATHER + frame::MAX_DATA);
        let more = source.fill(&mut frames)?;
        let totals = source.totals();
        let (bytes, files) = (totals.bytes, totals.entries);
        let given = give.blocking_send(Part { frames, bytes, files, last: !more });
        if !more || given.is_err() {
            return Ok(totals.clone());
        }
    }
}

/// Feeds a guest and waits for its answer, which may come before it has been fed: then it refuses.
pub(crate) async fn answer<T, R: AsyncRead + Unpin>(
    feed: impl Future<Output = Result<T>>,
    all_sent: &AtomicBool,
    reader: &mut R,
) -> Result<T> {
    let answer = guest::response(reader);
    tokio::pin!(feed, answer);
    let fed = tokio::select! {
        biased;
        answered = &mut answer => match answered? {
            // The end had been sent, and only the feeding did not know of its own end yet.
            Response::Done(_) if all_sent.load(Ordering::Acquire) => {
                return moving("finish a transfer", feed).await?;
            }
            early => return Err(guest::unexpected(&early)),
        },
        fed = &mut feed => fed,
    };
    match fed {
        Ok(fed) => match moving("finish a transfer", answer).await?? {
            Response::Done(_) => Ok(fed),
            other => Err(guest::unexpected(&other)),
        },
        // It may have said why it takes no more.
        Err(cut) if cut.kind() == ErrorKind::Unavailable => match moving("upload", answer).await? {
            Err(why) if why.kind() != ErrorKind::Unavailable => Err(why),
            _ => Err(cut),
        },
        Err(error) => Err(error),
    }
}

/// Takes a tree that is written here.
async fn receive(
    link: &Link,
    request: FileRequest,
    target: Target,
    options: DownloadOptions,
) -> Result<Transferred> {
    let mut stream = BufReader::new(link.open(Request::File(request)).await?);
    let (give, take) = mpsc::channel(QUEUE);
    let writing = tokio::task::spawn_blocking(move || write(target, take, &options));
    let came = async {
        loop {
            let (pieces, ended) = gather(&mut stream).await?;
            // Whoever writes says why nothing more is taken.
            if give.send(pieces).await.is_err() || ended {
                return Ok(());
            }
        }
    };
    let came = came.await;
    drop(give);
    // What was written of something that did not come as a whole is gone when this has ended.
    let written = joined(writing).await;
    match (came, written) {
        (Err(error), Err(failure)) if failure.kind == FailureKind::Unknown => Err(error),
        (_, written) => written.map(transferred).map_err(|failure| here("download", failure)),
    }
}

/// Writes a tree to its end; or removes it, if that does not come.
fn write(
    mut target: Target,
    mut take: mpsc::Receiver<Vec<Piece>>,
    options: &DownloadOptions,
) -> std::result::Result<Totals, Failure> {
    let mut total = None;
    while let Some(pieces) = take.blocking_recv() {
        for piece in &pieces {
            if let Piece::Record(TreeRecord::File { name, size, .. }) = piece
                && name.is_empty()
            {
                total = Some(*size);
            }
            target.take(piece)?;
        }
        let Totals { bytes, entries, .. } = *target.totals();
        options.listener.tell(&Progress { bytes, files: entries, total });
        if pieces.last().is_some_and(Piece::is_end) {
            return target.commit();
        }
    }
    Err(Failure::new(FailureKind::Unknown, "the rest did not come"))
}

/// Pieces up to an amount that is worth the work, and whether those are all.
async fn gather(stream: &mut BufReader<Stream>) -> Result<(Vec<Piece>, bool)> {
    let (mut pieces, mut size) = (Vec::new(), 0);
    while size < GATHER {
        let piece = match moving("download", next_frame(stream)).await?? {
            Frame::Data(Channel::Out, data) => {
                size += data.len();
                Piece::Data(data)
            }
            Frame::Data(..) => return Err(protocol("data of another channel")),
            Frame::Message(payload) => {
                size += payload.len();
                match super::decode(&payload)? {
                    Response::Tree(record) => Piece::Record(record),
                    Response::Failed(failure) => return Err(guest::failed(failure)),
                    other => return Err(guest::unexpected(&other)),
                }
            }
        };
        size += Piece::OVERHEAD;
        let ended = piece.is_end();
        pieces.push(piece);
        if ended {
            return Ok((pieces, true));
        }
    }
    Ok((pieces, false))
}

/// A step of a transfer, in bounded time.
pub(super) async fn moving<T>(operation: &'static str, step: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(STALL, step).await.map_err(|_| {
        let message = format!("nothing moved for {} s", STALL.as_secs());
        Error::new(ErrorKind::Timeout, operation, message)
    })
}

/// Work that may block.
async fn work<T: Send + 'static>(
    work: impl FnOnce() -> std::result::Result<T, Failure> + Send + 'static,
) -> std::result::Result<T, Failure> {
    joined(tokio::task::spawn_blocking(work)).await
}

async fn joined<T>(
    task: JoinHandle<std::result::Result<T, Failure>>,
) -> std::result::Result<T, Failure> {
    task.await.unwrap_or_else(|_| {
        Err(Failure::new(FailureKind::Unknown, "the work on this host was broken off"))
    })
}

/// What a failure on this host is to a caller.
fn here(operation: &'static str, failure: Failure) -> Error {
    let kind = match failure.kind {
        FailureKind::NotFound => ErrorKind::NotFound,
        FailureKind::PermissionDenied => ErrorKind::PermissionDenied,
        FailureKind::AlreadyExists | FailureKind::WrongType => ErrorKind::Conflict,
        FailureKind::LimitExceeded => ErrorKind::LimitExceeded,
        FailureKind::Invalid => ErrorKind::InvalidSpec,
        FailureKind::Unsupported => ErrorKind::Unsupported,
        // Not the system's: the guest sent something that makes no sense.
        FailureKind::System if failure.errno.is_none() => ErrorKind::Guest,
        _ => ErrorKind::Backend,
    };
    Error::new(kind, operation, failure.message.clone()).with_source(failure)
}

fn transferred(totals: Totals) -> Transferred {
    let Totals { bytes, entries, skipped, skipped_paths } = totals;
    Transferred { bytes, files: entries, skipped, skipped_paths }
}
