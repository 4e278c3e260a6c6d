//! Running commands.

use std::sync::Arc;

use sandbox_guest::{PtySize, Start};
use tokio::sync::{mpsc, watch};

use crate::{
    Command, Error, ErrorKind, Known, Outcome, OutputPiece, OutputStream, ProcessEnd, ProcessId,
    Result, Run, TerminalSize, TurnEventSink,
    command::Stdin,
    guest::{Pipe, Taken},
    manager::{Call, Recorder, ends},
    process_info::gone,
    session::{Captures, Input, Session},
    signal,
};

/// How much output waits for a slow reader, in pieces of up to 64 KiB.
const QUEUE: usize = 16;

/// See [`crate::Sandbox::exec`].
pub(crate) async fn exec(mut call: Call<'_>, mut command: Command) -> Result<Run> {
    if command.is_detached() {
        let message = "exec waits for its command's end: start a detached one with spawn";
        return Err(Error::new(ErrorKind::InvalidSpec, "exec", message));
    }
    let process = ProcessId::new();
    command.look_up(&*call.recorder().inner.secrets).await?;
    let start = command.to_start(&process)?;
    let limit = command.capture_limit();
    let whole = match command.take_stdin() {
        Stdin::Bytes(bytes) => Some(bytes),
        Stdin::Null | Stdin::Piped => None,
    };
    let input = Input { whole, pipe: None };
    let recorder = call.recorder();
    if let Err(lost) = notice_loss(&recorder).await {
        call.deliver().await;
        return call.finish(Err(lost));
    }
    recorder.record(started(&process, &command)).await?;
    // From here on what was begun gets its end, also if nobody waits for the sink.
    let mut guard = Guard::new(recorder, process.clone());
    call.deliver().await;
    let mut captured = Captures::new(limit, Taken::default());
    let ended = async {
        let mut session =
            Session::start(call.recorder(), process.clone(), start, input, None).await?;
        session.run(&mut captured).await
    };
    let ended = ended.await;
    guard.ended(exited(&process, &ended));
    call.record(exited(&process, &ended)).await?;
    guard.disarm();
    let result = ended.map(|ended| captured.into_run(process, ended));
    call.finish(result)
}

/// See [`crate::Sandbox::spawn`].
pub(crate) async fn spawn(mut call: Call<'_>, mut command: Command) -> Result<Process> {
    if command.is_detached() {
        return spawn_detached(call, command).await;
    }
    let process = ProcessId::new();
    command.look_up(&*call.recorder().inner.secrets).await?;
    let start = command.to_start(&process)?;
    let limit = command.capture_limit();
    let (whole, piped) = match command.take_stdin() {
        Stdin::Bytes(bytes) => (Some(bytes), false),
        Stdin::Null => (None, false),
        Stdin::Piped => (None, true),
    };
    let pipe = Arc::new(if piped { Pipe::default() } else { Pipe::of_sizes() });
    let input = Input { whole, pipe: Some(Arc::clone(&pipe)) };
    let recorder = call.recorder();
    if let Err(lost) = notice_loss(&recorder).await {
        call.deliver().await;
        return call.finish(Err(lost));
    }
    recorder.record(started(&process, &command)).await?;
    let mut guard = Guard::new(recorder.clone(), process.clone());
    call.deliver().await;
    let session = Session::start(recorder.clone(), process.clone(), start, input, None).await;
    let mut session = match session {
        Ok(session) => session,
        Err(error) => {
            guard.disarm();
            call.record(exited(&process, &Err(error.clone()))).await?;
            return call.finish(Err(error));
        }
    };
    let (mut output, pieces) = mpsc::channel(QUEUE);
    let (done, ended) = watch::channel(None);
    let handle = Process {
        recorder: recorder.clone(),
        id: process.clone(),
        pid: session.pid(),
        pipe: Arc::clone(&pipe),
        piped,
        pieces,
        next: Taken::default(),
        missed: 0,
        ended,
        limit,
    };
    tokio::spawn(async move {
        // Whoever lets go of the handle lets go of the process.
        let result = tokio::select! {
            result = session.run(&mut output) => Some(result),
            () = done.closed() => None,
        };
        pipe.close();
        if let Some(result) = result {
            guard.disarm();
            if let Err(error) = recorder.record(exited(&process, &result)).await {
                tracing::warn!(%error, "a process's end could not be recorded");
            }
            let _ = done.send(Some(result));
        }
    });
    call.deliver().await;
    call.finish(Ok(handle))
}

/// Starts a command that goes on without its handle, or finds the one that its key stands for.
async fn spawn_detached(call: Call<'_>, mut command: Command) -> Result<Process> {
    command.look_up(&*call.recorder().inner.secrets).await?;
    // What cannot be started is in no history.
    command.to_start(&ProcessId::new())?;
    let recorder = call.recorder();
    // A loss is noticed before anything is begun.
    recorder.shared.link(&recorder.inner).await?;
    // What was begun is started, also if nobody waits for that.
    call.drive(|recorder| async move {
        let begun = recorder.begin_detached(command.get_key(), command.argv()).await?;
        let id = begun.id.clone();
        let mut start = command.to_start(&id)?;
        // It comes with the start: its harness may go at once.
        if let Stdin::Bytes(bytes) = command.take_stdin() {
            start.input = Some(bytes.into());
        }
        let pipe = Arc::new(Pipe::of_sizes());
        let input = Input { whole: None, pipe: Some(Arc::clone(&pipe)) };
        let session = launch(recorder.clone(), begun, start, input).await?;
        Ok(follow(recorder, id, pipe, session, command.capture_limit()))
    })
    .await
}

/// Says that a sandbox is gone before anything is begun in it: what is begun counts as use, and one that ended
/// because nobody used it would not be seen to have ended for that.
async fn notice_loss(recorder: &Recorder) -> Result<()> {
    match recorder.shared.link(&recorder.inner).await {
        Err(error) if error.kind() == ErrorKind::Lost => Err(error),
        // Whatever else there is, the start waits for or says.
        _ => Ok(()),
    }
}

async fn launch(
    recorder: Recorder,
    begun: ends::Begun,
    start: Start,
    input: Input,
) -> Result<Session> {
    let (id, since) = (begun.id, begun.since);
    if begun.known {
        let attached = Session::attach(recorder.clone(), id.clone(), Taken::default()).await;
        match (attached, begun.outcome) {
            (Err(error), outcome) if error.kind() == ErrorKind::NotFound => {
                if let Some(outcome) = outcome {
                    return Err(gone(&id, &outcome));
                }
                // Somebody else is about to start it, or was: whoever is first does.
            }
            (attached, _) => return attached,
        }
    }
    let started = Session::start(recorder.clone(), id.clone(), start, input, Some(since)).await;
    match started {
        Ok(session) => {
            ends::watch(&recorder.inner, &recorder.shared, &id);
            Ok(session)
        }
        Err(error) => {
            if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
                // Whether it runs, the guest knows.
                ends::watch(&recorder.inner, &recorder.shared, &id);
            } else {
                ends::record(&recorder, &id, Err(error.to_string())).await?;
            }
            Err(error)
        }
    }
}

/// A handle to a detached process, which it goes on without.
fn follow(
    recorder: Recorder,
    id: ProcessId,
    pipe: Arc<Pipe>,
    mut session: Session,
    limit: usize,
) -> Process {
    let (mut output, pieces) = mpsc::channel(QUEUE);
    let (done, ended) = watch::channel(None);
    let handle = Process {
        recorder: recorder.clone(),
        id: id.clone(),
        pid: session.pid(),
        pipe: Arc::clone(&pipe),
        piped: false,
        pieces,
        next: Taken::default(),
        missed: 0,
        ended,
        limit,
    };
    tokio::spawn(async move {
        let result = tokio::select! {
            result = session.run(&mut output) => result,
            () = done.closed() => return,
        };
        pipe.close();
        if let Ok(end) = &result
            && let Err(error) = ends::record(&recorder, &id, Ok(end.outcome.clone())).await
        {
            tracing::warn!(%error, "a process's end could not be recorded");
        }
        let _ = done.send(Some(result));
    });
    handle
}

fn started(process: &ProcessId, command: &Command) -> Known {
    Known::ProcessStarted { process: process.clone(), argv: command.argv(), detached: false }
}

fn exited(process: &ProcessId, ended: &Result<ProcessEnd>) -> Known {
    let process = process.clone();
    match ended {
        Ok(ended) => {
            Known::ProcessExited { process, outcome: Some(ended.outcome.clone()), error: None }
        }
        Err(error) => {
            Known::ProcessExited { process, outcome: None, error: Some(error.to_string()) }
        }
    }
}

/// Records a process's end if the future that ran it is dropped, and kills it first if it has not ended.
struct Guard(Option<Unended>);

struct Unended {
    recorder: Recorder,
    process: ProcessId,
    /// It has ended, but that is not recorded.
    ended: Option<Known>,
}

impl Guard {
    fn new(recorder: Recorder, process: ProcessId) -> Self {
        Self(Some(Unended { recorder, process, ended: None }))
    }

    fn ended(&mut self, exited: Known) {
        if let Some(unended) = &mut self.0 {
            unended.ended = Some(exited);
        }
    }

    fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(unended) = self.0.take() else { return };
        // Outside a runtime the connection ends too, and with it the process.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let Unended { recorder, process, ended } = unended;
            let exited = match ended {
                Some(exited) => exited,
                None => cancel(&recorder, process).await,
            };
            if let Err(error) = recorder.record(exited).await {
                tracing::warn!(%error, "a process's end could not be recorded");
            }
        });
    }
}

/// Kills a process that nobody waits for any more; its end, for the history.
async fn cancel(recorder: &Recorder, process: ProcessId) -> Known {
    let killed = async {
        let link = recorder.shared.link(&recorder.inner).await?;
        signal::kill_over(&link, &process).await
    };
    let (outcome, error) = match killed.await {
        Ok(()) => (Some(Outcome::Cancelled), None),
        Err(error) if error.kind() == ErrorKind::Lost => {
            (Some(Outcome::Lost(error.message().into())), None)
        }
        Err(error) => (None, Some(format!("it could not be killed: {error}"))),
    };
    Known::ProcessExited { process, outcome, error }
}

/// Some of a process's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Of its standard output, or its terminal's.
    Stdout(Vec<u8>),
    /// Of its standard error.
    Stderr(Vec<u8>),
}

/// A running command. Dropping it kills the command and all that it started; a detached one goes on.
#[derive(Debug)]
pub struct Process {
    recorder: Recorder,
    id: ProcessId,
    pid: u32,
    pipe: Arc<Pipe>,
    /// Whether its standard input is written to, and has not ended.
    piped: bool,
    pieces: mpsc::Receiver<OutputPiece>,
    next: Taken,
    missed: u64,
    ended: watch::Receiver<Option<Result<ProcessEnd>>>,
    limit: usize,
}

impl Process {
    /// Its id in the history.
    #[must_use]
    pub fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Its process id inside the sandbox.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The next piece of its output; `None` when there is no more. Safe to cancel.
    ///
    /// A process whose output nobody takes waits, once some two MiB have piled up. A detached one does not
    /// wait: what gave way to newer output is skipped, and counted by [`missed_output`](Self::missed_output).
    pub async fn next_output(&mut self) -> Option<Chunk> {
        let piece = self.pieces.recv().await?;
        let next = match piece.stream {
            OutputStream::Stdout => &mut self.next.stdout,
            OutputStream::Stderr => &mut self.next.stderr,
        };
        self.missed = self.missed.saturating_add(piece.offset.saturating_sub(*next));
        *next = piece.end();
        Some(match piece.stream {
            OutputStream::Stdout => Chunk::Stdout(piece.bytes),
            OutputStream::Stderr => Chunk::Stderr(piece.bytes),
        })
    }

    /// How many bytes of its output were not kept until they could be read here. Always 0 but for a
    /// detached process.
    #[must_use]
    pub fn missed_output(&self) -> u64 {
        self.missed
    }

    /// Writes to its standard input, waiting for room. A process that has ended or does not read any
    /// more takes it silently. A cut connection loses and doubles nothing.
    ///
    /// If the future is dropped, the beginning may have been written.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if it was not started with [`Command::stdin_piped`], or its input was ended.
    pub async fn write_stdin(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.piped {
            let message = "the process has no piped standard input, or it was ended";
            return Err(Error::new(ErrorKind::InvalidSpec, "write stdin", message));
        }
        self.pipe.write(bytes).await;
        Ok(())
    }

    /// Ends its standard input, after what was written.
    ///
    /// # Errors
    ///
    /// None at present.
    pub async fn end_stdin(&mut self) -> Result<()> {
        if std::mem::take(&mut self.piped) {
            self.pipe.end();
        }
        Ok(())
    }

    /// Its standard input as a thing of its own, so that it can be written to while output is read: who
    /// does one after the other may wait for ever, as the process may wait for the other. `None` if it was
    /// not started with [`Command::stdin_piped`], was ended or was taken.
    pub fn take_stdin(&mut self) -> Option<ProcessStdin> {
        std::mem::take(&mut self.piped).then(|| ProcessStdin { pipe: Arc::clone(&self.pipe) })
    }

    /// Tells its terminal that the size has changed.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` for no rows or columns.
    pub async fn resize(&self, size: TerminalSize) -> Result<()> {
        if size.rows == 0 || size.cols == 0 {
            let message = "a terminal has at least one row and one column";
            return Err(Error::new(ErrorKind::InvalidSpec, "resize", message));
        }
        self.pipe.resize(PtySize { rows: size.rows, cols: size.cols });
        Ok(())
    }

    /// Sends it a signal, by its number on Linux.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has ended; `InvalidSpec` if there is no such signal. `Unavailable` if the connection
    /// was cut: whether it was sent is then not known.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        signal::send(&self.recorder, &self.id, signal, false).await
    }

    /// Sends a signal to it and to everything that it started, whatever session that moved to.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal).
    pub async fn signal_tree(&self, signal: i32) -> Result<()> {
        signal::send(&self.recorder, &self.id, signal, true).await
    }

    /// Kills it and everything that it started; its outcome is then `Cancelled`. Returns when nothing of it
    /// is left. Killing one that has ended is no error.
    ///
    /// # Errors
    ///
    /// `Unavailable` or `Lost` if the sandbox cannot be reached.
    pub async fn kill(&self) -> Result<()> {
        signal::kill(&self.recorder, &self.id).await
    }

    /// Waits for its end, ends its standard input, and returns what it said that was not taken before.
    /// Dropping the future kills it, unless it is detached.
    ///
    /// # Errors
    ///
    /// If the guest broke the protocol.
    pub async fn wait(mut self, sandbox: &crate::Sandbox, sink: &dyn TurnEventSink) -> Result<Run> {
        self.end_stdin().await?;
        let mut captured = Captures::new(self.limit, self.next);
        while let Some(piece) = self.pieces.recv().await {
            captured.push(&piece);
        }
        let mut ended = self.ended.clone();
        let ended = match ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone(),
            Err(_) => None,
        };
        let ended = ended.unwrap_or_else(|| Ok(ProcessEnd::lost("the runtime was shut down")));
        let result = ended.map(|ended| captured.into_run(self.id.clone(), ended));
        let mut call = sandbox.call(sink).await?;
        call.deliver().await;
        call.finish(result)
    }
}

/// A process's standard input, to be written to. Dropping it ends the input after what was written.
#[derive(Debug)]
pub struct ProcessStdin {
    pipe: Arc<Pipe>,
}

impl ProcessStdin {
    /// Writes, waiting for room. A process that has ended or does not read any more takes it silently.
    ///
    /// If the future is dropped, the beginning may have been written.
    pub async fn write(&mut self, bytes: &[u8]) {
        self.pipe.write(bytes).await;
    }
}

impl Drop for ProcessStdin {
    fn drop(&mut self) {
        self.pipe.end();
    }
}
