//! A stream that is attached to a process.
//!
//! Both directions have windows and count from the start of the process, so that a new attachment can
//! go on where an old one was cut.

use std::sync::Arc;

use sandbox_guest::{
    DEFAULT_WINDOW, Input, ProcessExit, Request, Response, Start, Started,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::{
    io::{AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{Mutex, Notify},
};

use super::link::{Link, broken, failed, garbage, response, unexpected};
use crate::{Error, ErrorKind, ProcessId, Result};

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
}

/// How much output has been taken, counted from the start of the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) stdout: u64,
    pub(crate) stderr: u64,
}

/// The next thing that a process did.
#[derive(Debug)]
pub(crate) enum Item {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
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
        Self::open(link, Request::Start(start), Taken::default()).await
    }

    /// Attaches to a process; its output follows from there on.
    pub(crate) async fn attach(link: &Link, process: &ProcessId, from: Taken) -> Result<Self> {
        let request = Request::Attach {
            process: process.to_string(),
            stdout: from.stdout,
            stderr: from.stderr,
        };
        Self::open(link, request, from).await
    }

    async fn open(link: &Link, request: Request, from: Taken) -> Result<Self> {
        let mut stream = link.open(request).await?;
        let started = match response(&mut stream).await? {
            Response::Started(started) => started,
            other => return Err(unexpected(&other)),
        };
        if started.stdout > from.stdout || started.stderr > from.stderr {
            let message = "output that was not taken yet is not kept any more";
            return Err(Error::new(ErrorKind::Lost, "attach", message));
        }
        let (reader, writer) = tokio::io::split(stream);
        let credit = Arc::new(Credit::default());
        credit.accept(started.stdin);
        Ok(Self {
            reader,
            writer: Arc::new(Mutex::new(writer)),
            credit,
            taken: from,
            acknowledged: from,
            started,
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
                    self.taken.stdout += bytes.len() as u64;
                    return Ok(Item::Stdout(bytes));
                }
                Some(Frame::Data(Channel::Err, bytes)) => {
                    self.taken.stderr += bytes.len() as u64;
                    return Ok(Item::Stderr(bytes));
                }
                Some(Frame::Data(Channel::In, _)) => {
                    return Err(Error::new(ErrorKind::Guest, "exec", "the guest sent input"));
                }
                Some(Frame::Message(payload)) => match frame::decode(&payload).map_err(garbage)? {
                    Response::Accepted { stdin } => self.credit.accept(stdin),
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

    /// Writes one piece at this offset, waiting for room. `false` when the process has ended.
    pub(crate) async fn send(&self, mut bytes: &[u8], mut offset: u64) -> Result<bool> {
        while !bytes.is_empty() {
            let Some(room) = self.credit.room(offset).await else {
                return Ok(false);
            };
            let (now, later) = bytes.split_at(bytes.len().min(room).min(frame::MAX_DATA));
            self.write(now).await?;
            offset += now.len() as u64;
            bytes = later;
        }
        Ok(true)
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

    async fn write(&self, chunk: &[u8]) -> Result<()> {
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

    /// How much may be written from this offset on, at least one byte; `None` when nothing more is
    /// needed.
    async fn room(&self, offset: u64) -> Option<usize> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let accepted = self.accepted.load(std::sync::atomic::Ordering::Acquire);
            if accepted == u64::MAX {
                return None;
            }
            let limit = accepted.saturating_add(DEFAULT_WINDOW);
            if offset < limit {
                return usize::try_from(limit - offset).ok();
            }
            changed.await;
        }
    }
}
