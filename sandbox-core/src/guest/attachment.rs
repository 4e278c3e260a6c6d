//! A stream that is attached to a process.
//!
//! Both directions have windows and count from the start of the process, so that a new attachment can
//! go on where an old one was cut.

use std::{sync::Arc, time::Duration};

use sandbox_guest::{
    DEFAULT_WINDOW, Input, Output, ProcessExit, Request, Response, Start, Started,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::{
    io::{AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{Mutex, Notify},
};

use super::link::{Link, answered_within, broken, failed, garbage, response, unexpected};
use crate::{Error, ErrorKind, ProcessId, Result};

/// How long a guest may take to attach us to a process that it has to start first. Long, as a start that is
/// given up kills what was started.
const ATTACHING: Duration = Duration::from_secs(60);

/// Acknowledge when this much has come since the last time.
const ACKNOWLEDGE: u64 = DEFAULT_WINDOW / 4;

/// A process's output, as it comes.
#[derive(Debug)]
pub(crate) struct Attachment {
    reader: ReadHalf<Stream>,
    writer: Arc<Mutex<WriteHalf<Stream>>>,
    credit: Arc<Credit>,
    taken: Taken,
    acknowledged: Taken,
    started: Started,
    /// Whether output may give way to newer before it was taken.
    rolling: bool,
}

/// How much output has been taken, counted from the start of the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) stdout: u64,
    pub(crate) stderr: u64,
}

impl Taken {
    /// Goes on where a guest says that output begins: later only where it may give way to newer.
    fn skip_to(self, started: &Started, rolling: bool) -> Result<Self> {
        if !rolling && (started.stdout > self.stdout || started.stderr > self.stderr) {
            let message = "output that was not taken yet is not kept any more";
            return Err(Error::new(ErrorKind::Lost, "attach", message));
        }
        Ok(Self {
            stdout: self.stdout.max(started.stdout),
            stderr: self.stderr.max(started.stderr),
        })
    }
}

/// Counts so many bytes more; where they begin. Where counting began is the guest's word.
fn advance(taken: &mut u64, count: usize) -> Result<u64> {
    let offset = *taken;
    let next = offset.checked_add(count as u64);
    *taken = next.ok_or_else(|| garbage(std::io::ErrorKind::InvalidData.into()))?;
    Ok(offset)
}

/// The next thing that a process did; output with the offset at which it begins.
#[derive(Debug)]
pub(crate) enum Item {
    Stdout(u64, Vec<u8>),
    Stderr(u64, Vec<u8>),
    Exited(ProcessExit),
}

/// What may be written to a process; it can be used beside its [`Attachment`].
#[derive(Debug, Clone)]
pub(crate) struct StdinHalf {
    writer: Arc<Mutex<WriteHalf<Stream>>>,
    credit: Arc<Credit>,
}

/// How far standard input may be written.
#[derive(Debug, Default)]
struct Credit {
    /// Accepted by the guest; `u64::MAX` when nothing more is needed.
    accepted: std::sync::atomic::AtomicU64,
    changed: Notify,
}

impl Attachment {
    /// Starts a process, or attaches to the one that the same request has started before.
    pub(crate) async fn start(link: &Link, start: Start) -> Result<Self> {
        let rolling = matches!(start.output, Output::Keep { .. });
        Self::open(link, Request::Start(start), Taken::default(), rolling).await
    }

    /// Attaches to a process; its output follows from there on. `rolling` says that what gave way to newer
    /// output may be missing.
    pub(crate) async fn attach(
        link: &Link,
        process: &ProcessId,
        from: Taken,
        rolling: bool,
    ) -> Result<Self> {
        let request = Request::Attach {
            process: process.to_string(),
            stdout: from.stdout,
            stderr: from.stderr,
        };
        Self::open(link, request, from, rolling).await
    }

    async fn open(link: &Link, request: Request, from: Taken, rolling: bool) -> Result<Self> {
        let (stream, response) = answered_within(ATTACHING, async {
            let mut stream = link.open(request).await?;
            let response = response(&mut stream).await?;
            Ok((stream, response))
        })
        .await?;
        let started = match response {
            Response::Started(started) => started,
            other => return Err(unexpected(&other)),
        };
        let taken = from.skip_to(&started, rolling)?;
        let (reader, writer) = tokio::io::split(stream);
        let credit = Arc::new(Credit::default());
        credit.accept(started.taken.min(started.stdin));
        Ok(Self {
            reader,
            writer: Arc::new(Mutex::new(writer)),
            credit,
            taken,
            acknowledged: taken,
            started,
            rolling,
        })
    }

    pub(crate) fn started(&self) -> &Started {
        &self.started
    }

    pub(crate) fn taken(&self) -> Taken {
        self.taken
    }

    pub(crate) fn stdin(&self) -> StdinHalf {
        StdinHalf { writer: Arc::clone(&self.writer), credit: Arc::clone(&self.credit) }
    }

    /// The next thing. Asking for it says that what came before has been taken.
    ///
    /// Cancelling it in the middle spoils the attachment.
    pub(crate) async fn next(&mut self) -> Result<Item> {
        loop {
            self.acknowledge().await?;
            let frame = frame::read(&mut self.reader).await.map_err(broken)?;
            match frame {
                Some(Frame::Data(Channel::Out, bytes)) => {
                    let offset = advance(&mut self.taken.stdout, bytes.len())?;
                    return Ok(Item::Stdout(offset, bytes));
                }
                Some(Frame::Data(Channel::Err, bytes)) => {
                    let offset = advance(&mut self.taken.stderr, bytes.len())?;
                    return Ok(Item::Stderr(offset, bytes));
                }
                Some(Frame::Data(Channel::In, _)) => {
                    return Err(Error::new(ErrorKind::Guest, "exec", "the guest sent input"));
                }
                Some(Frame::Message(payload)) => match frame::decode(&payload).map_err(garbage)? {
                    Response::Accepted { stdin } => self.credit.accept(stdin),
                    Response::Started(again) => {
                        self.taken = self.taken.skip_to(&again, self.rolling)?;
                    }
                    Response::Exited(exit) => {
                        self.credit.accept(u64::MAX);
                        return Ok(Item::Exited(exit));
                    }
                    Response::Failed(failure) => return Err(failed(failure)),
                    other => return Err(unexpected(&other)),
                },
                None => return Err(broken(std::io::ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    async fn acknowledge(&mut self) -> Result<()> {
        let new = |taken: u64, before: u64| taken - before >= ACKNOWLEDGE;
        if new(self.taken.stdout, self.acknowledged.stdout)
            || new(self.taken.stderr, self.acknowledged.stderr)
        {
            let Taken { stdout, stderr } = self.taken;
            let mut writer = self.writer.lock().await;
            let message = Input::Taken { stdout, stderr };
            frame::write_message(&mut *writer, &message).await.map_err(broken)?;
            self.acknowledged = self.taken;
        }
        Ok(())
    }
}

impl StdinHalf {
    /// Writes what the guest has not accepted yet of a whole input, and ends it. Returns early when the
    /// process has ended.
    pub(crate) async fn send_all(&self, input: &[u8], from: u64) -> Result<()> {
        let mut sent = from;
        while (sent as usize) < input.len() {
            let Some(room) = self.credit.room(sent).await else {
                return Ok(());
            };
            let rest = &input[sent as usize..];
            let chunk = &rest[..rest.len().min(room).min(frame::MAX_DATA)];
            self.write(chunk).await?;
            sent += chunk.len() as u64;
        }
        self.end().await
    }

    /// How many bytes the process took; `None` once nothing more is needed.
    pub(crate) fn accepted(&self) -> Option<u64> {
        self.credit.accepted()
    }

    /// Waits until [`accepted`](Self::accepted) says something else than this.
    pub(crate) async fn accepted_more_than(&self, before: u64) {
        loop {
            let changed = self.credit.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.accepted() != Some(before) {
                return;
            }
            changed.await;
        }
    }

    /// Ends standard input.
    pub(crate) async fn end(&self) -> Result<()> {
        self.message(&Input::End).await
    }

    /// Says something about the process.
    pub(crate) async fn message(&self, input: &Input) -> Result<()> {
        let mut writer = self.writer.lock().await;
        frame::write_message(&mut *writer, input).await.map_err(broken)
    }

    /// Writes one piece, for which there is room.
    pub(crate) async fn write(&self, chunk: &[u8]) -> Result<()> {
        let mut writer = self.writer.lock().await;
        frame::write_data(&mut *writer, Channel::In, chunk).await.map_err(broken)?;
        writer.flush().await.map_err(broken)
    }
}

impl Credit {
    fn accept(&self, bytes: u64) {
        self.accepted.fetch_max(bytes, std::sync::atomic::Ordering::AcqRel);
        self.changed.notify_waiters();
    }

    fn accepted(&self) -> Option<u64> {
        let accepted = self.accepted.load(std::sync::atomic::Ordering::Acquire);
        (accepted != u64::MAX).then_some(accepted)
    }

    /// How much may be written from this offset on, at least one byte; `None` when nothing more is
    /// needed.
    async fn room(&self, offset: u64) -> Option<usize> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let accepted = self.accepted()?;
            let limit = accepted.saturating_add(DEFAULT_WINDOW);
            if offset < limit {
                return usize::try_from(limit - offset).ok();
            }
            changed.await;
        }
    }
}
