//! The processes of a sandbox: which there are, and how to reach one from any manager.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use sandbox_guest::{Request, Response};
use tokio::sync::{mpsc, watch};

use crate::{
    Error, ErrorKind, Outcome, OutputPiece, OutputStream, ProcessEnd, ProcessId, ProcessInfo,
    ProcessState, Result, TurnEventSink,
    guest::{self, Taken},
    manager::{Inner, Recorder, Shared, ends},
    process_info::gone,
    session::{Session, notice_silence},
    signal,
};

/// How much output waits for a slow reader, in pieces of up to 64 KiB.
const QUEUE: usize = 4;

/// Between two tries to wait for a process over a connection that is cut.
const BETWEEN: Duration = Duration::from_millis(10);

/// A process of a sandbox, found by its id. Holds no connection, and letting go of it changes nothing.
#[derive(Debug, Clone)]
pub struct ProcessRef {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    id: ProcessId,
}

impl ProcessRef {
    /// Its id in the history.
    #[must_use]
    pub fn id(&self) -> &ProcessId {
        &self.id
    }

    /// How it is now.
    ///
    /// # Errors
    ///
    /// `Lost` if it went with an instance of the sandbox, `NotFound` if it is not known any more.
    pub async fn info(&self) -> Result<ProcessInfo> {
        find(&self.inner, &self.shared, &self.id).await
    }

    /// Reads up to `most` bytes of a detached process's output from an offset on: what is kept now, without
    /// waiting for more. The piece begins later than asked for where older output gave way to newer, and is
    /// empty at the end.
    ///
    /// # Errors
    ///
    /// `Conflict` if the process is not detached; as [`info`](Self::info).
    pub async fn read(
        &self,
        stream: OutputStream,
        offset: u64,
        most: usize,
    ) -> Result<OutputPiece> {
        let info = self.detached().await?;
        let kept = match stream {
            OutputStream::Stdout => info.stdout,
            OutputStream::Stderr => info.stderr,
        };
        let offset = offset.max(kept.begin);
        let wanted = kept.end.saturating_sub(offset).min(most as u64);
        let mut read = OutputPiece { stream, offset, bytes: Vec::new() };
        if wanted == 0 {
            return Ok(read);
        }
        // The other stream's end is the guest's to say: it may have grown since.
        let from = match stream {
            OutputStream::Stdout => (offset, info.stderr.end),
            OutputStream::Stderr => (info.stdout.end, offset),
        };
        let mut follow = self.follow(from.0, from.1).await?;
        while (read.bytes.len() as u64) < wanted {
            let Some(piece) = follow.next().await? else { break };
            if piece.stream != stream {
                continue;
            }
            if read.bytes.is_empty() {
                read.offset = piece.offset;
            } else if piece.offset != read.end() {
                // The rest gave way meanwhile.
                break;
            }
            read.bytes.extend(piece.bytes);
        }
        read.bytes.truncate(most);
        Ok(read)
    }

    /// Follows a detached process's output from these offsets of its two streams on, as it comes, until
    /// it has ended and all is said.
    ///
    /// # Errors
    ///
    /// `Conflict` if the process is not detached; `InvalidSpec` if there is not so much output yet; as
    /// [`info`](Self::info).
    pub async fn follow(&self, stdout: u64, stderr: u64) -> Result<Follow> {
        let info = self.detached().await?;
        for (name, offset, kept) in
            [("standard output", stdout, info.stdout), ("standard error", stderr, info.stderr)]
        {
            if offset > kept.end {
                let message = format!("byte {offset} of the {name}, which has {} so far", kept.end);
                return Err(self.error(ErrorKind::InvalidSpec, message));
            }
        }
        let recorder = self.recorder().await?;
        let from = Taken { stdout, stderr };
        let session = Session::attach(recorder.clone(), self.id.clone(), from).await;
        let mut session = match session {
            Ok(session) => session,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(self.missing().await?);
            }
            Err(error) => return Err(error),
        };
        let (mut output, pieces) = mpsc::channel(QUEUE);
        let (done, ended) = watch::channel(None);
        let id = self.id.clone();
        tokio::spawn(async move {
            let result = tokio::select! {
                result = session.run(&mut output) => result,
                () = done.closed() => return,
            };
            if let Ok(end) = &result
                && let Err(error) = ends::record(&recorder, &id, Ok(end.outcome.clone())).await
            {
                tracing::warn!(%error, "a process's end could not be recorded");
            }
            let _ = done.send(Some(result));
        });
        Ok(Follow { pieces, ended })
    }

    /// Waits for its end, which is then in the history. Dropping the future changes nothing.
    ///
    /// # Errors
    ///
    /// As [`info`](Self::info).
    pub async fn wait(&self, sink: &dyn TurnEventSink) -> Result<ProcessEnd> {
        let recorder = self.recorder().await?;
        let waited = self.wait_for_end(&recorder).await;
        let mut call = crate::Sandbox::new(Arc::clone(&self.inner), Arc::clone(&self.shared))
            .call(sink)
            .await?;
        call.deliver().await;
        call.finish(waited)
    }

    async fn wait_for_end(&self, recorder: &Recorder) -> Result<ProcessEnd> {
        loop {
            let info = self.info().await?;
            if let ProcessState::Ended(end) = info.state {
                return Ok(end);
            }
            let asked = async {
                let link = self.shared.link(&self.inner).await?;
                let wait = Request::Wait { process: self.id.to_string() };
                let mut stream = link.open(wait).await?;
                let nothing = AtomicU64::new(0);
                let way = recorder.clone().into();
                tokio::select! {
                    answer = guest::response(&mut stream) => answer,
                    error = notice_silence(&way, &link, &nothing) => Err(error),
                }
            };
            match asked.await {
                Ok(Response::Exited(exit)) => {
                    let end = ProcessEnd::exited(&exit);
                    ends::record(recorder, &self.id, Ok(end.outcome.clone())).await?;
                    return Ok(end);
                }
                Ok(other) => return Err(guest::unexpected(&other)),
                // How it is now, the next look says.
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unavailable) =>
                {
                    tokio::time::sleep(BETWEEN).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends it a signal, by its number on Linux.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has ended; `InvalidSpec` if there is no such signal. `Unavailable` if the connection
    /// was cut: whether it was sent is then not known.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        signal::send(&self.recorder().await?, &self.id, signal, false).await
    }

    /// Sends a signal to it and to everything that it started, whatever session that moved to.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal).
    pub async fn signal_tree(&self, signal: i32) -> Result<()> {
        signal::send(&self.recorder().await?, &self.id, signal, true).await
    }

    /// Kills it and everything that it started; its outcome is then `Cancelled`, and in the history. Killing
    /// one that has ended is no error.
    ///
    /// # Errors
    ///
    /// `Unavailable` or `Lost` if the sandbox cannot be reached.
    pub async fn kill(&self, sink: &dyn TurnEventSink) -> Result<()> {
        let recorder = self.recorder().await?;
        let killed = async {
            signal::kill(&recorder, &self.id).await?;
            // One that is not detached is recorded by whoever runs it.
            match self.info().await {
                Ok(info) if info.detached => self.wait_for_end(&recorder).await.map(drop),
                _ => Ok(()),
            }
        };
        let killed = killed.await;
        let mut call = crate::Sandbox::new(Arc::clone(&self.inner), Arc::clone(&self.shared))
            .call(sink)
            .await?;
        call.deliver().await;
        call.finish(killed)
    }

    /// Lets go of what the sandbox keeps of a process that has ended: its output and how it ended. A
    /// snapshot of a sandbox that keeps some takes the longer way, as if a process ran.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if it runs.
    pub async fn forget(&self) -> Result<()> {
        // Its end is in the history first.
        match self.info().await {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Lost) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        let request = Request::Forget { process: self.id.to_string() };
        self.shared.ask(&self.inner, request).await.map(drop)
    }

    async fn detached(&self) -> Result<ProcessInfo> {
        let info = self.info().await?;
        if info.detached {
            return Ok(info);
        }
        let message = "its output is its caller's alone: it is not detached";
        Err(self.error(ErrorKind::Conflict, message.into()))
    }

    async fn missing(&self) -> Result<Error> {
        Ok(missing(&*self.shared.record(&self.inner).await?, &self.id))
    }

    async fn recorder(&self) -> Result<Recorder> {
        recorder(&self.inner, &self.shared).await
    }

    fn error(&self, kind: ErrorKind, message: String) -> Error {
        Error::new(kind, "process", message).with_sandbox(&self.shared.id)
    }
}

/// The output of a detached process, as it comes.
#[derive(Debug)]
pub struct Follow {
    pieces: mpsc::Receiver<OutputPiece>,
    ended: watch::Receiver<Option<Result<ProcessEnd>>>,
}

impl Follow {
    /// The next piece, of whichever stream; `None` when the process has ended and all is said. Safe to
    /// cancel.
    ///
    /// # Errors
    ///
    /// `Lost` if the process went with its instance; if the guest broke the protocol.
    pub async fn next(&mut self) -> Result<Option<OutputPiece>> {
        if let Some(piece) = self.pieces.recv().await {
            return Ok(Some(piece));
        }
        let lost = |reason: String| Error::new(ErrorKind::Lost, "follow", reason);
        let ended = match self.ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone(),
            Err(_) => None,
        };
        match ended {
            Some(Ok(ProcessEnd { outcome: Outcome::Lost(reason), .. })) => Err(lost(reason)),
            Some(Ok(_)) => Ok(None),
            Some(Err(error)) => Err(error),
            None => Err(lost("the runtime was shut down".into())),
        }
    }
}

/// See [`crate::Sandbox::processes`].
pub(crate) async fn list(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Result<Vec<ProcessInfo>> {
    let mut found = Vec::new();
    for info in ask(inner, shared).await? {
        found.push(ProcessInfo::of(&info)?);
    }
    found.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
    Ok(found)
}

/// See [`crate::Sandbox::process`].
pub(crate) async fn open(
    inner: &Arc<Inner>,
    shared: &Arc<Shared>,
    id: &ProcessId,
) -> Result<ProcessRef> {
    find(inner, shared, id).await?;
    Ok(ProcessRef { inner: Arc::clone(inner), shared: Arc::clone(shared), id: id.clone() })
}

async fn find(inner: &Arc<Inner>, shared: &Arc<Shared>, id: &ProcessId) -> Result<ProcessInfo> {
    let all = ask(inner, shared).await?;
    match all.into_iter().find(|info| info.process == id.as_str()) {
        Some(info) => ProcessInfo::of(&info),
        None => Err(missing(&*shared.record(inner).await?, id).with_sandbox(&shared.id)),
    }
}

/// What the guest knows; what has ended is then in the history.
async fn ask(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Result<Vec<sandbox_guest::ProcessInfo>> {
    let all = ends::list(shared.ask(inner, Request::Processes).await?)?;
    ends::settle(&recorder(inner, shared).await?, &all).await?;
    Ok(all)
}

/// What becomes of those who ask for a process that the guest does not know.
fn missing(record: &crate::record::Record, id: &ProcessId) -> Error {
    match record.detached.get(id) {
        Some(known) => match &known.outcome {
            Some(outcome) => gone(id, outcome),
            None => {
                let message =
                    format!("the process {id} is being started, or its harness ended first");
                Error::new(ErrorKind::NotFound, "process", message)
            }
        },
        None => {
            let message = format!("the sandbox knows no process {id}, or not any more");
            Error::new(ErrorKind::NotFound, "process", message)
        }
    }
}

async fn recorder(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Result<Recorder> {
    let consumer = shared.record(inner).await?.consumer.clone();
    Ok(Recorder::of_nobody(inner, shared, consumer))
}
