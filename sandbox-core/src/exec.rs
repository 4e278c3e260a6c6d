//! Running commands.

use std::time::Duration;

use sandbox_guest::{Input, ProcessExit, PtySize, Request, Start};
use tokio::sync::{mpsc, watch};

use crate::{
    Command, Error, ErrorKind, Known, Outcome, ProcessId, Result, Run, TerminalSize, TurnEventSink,
    command::Stdin,
    guest::{Attachment, Item, Link, StdinHalf},
    manager::{Call, Recorder},
    outcome::Capture,
};

/// How long a start waits for a snapshot that is being taken.
const THAW: Duration = Duration::from_secs(60);

/// How long a cut connection is tried to be made anew.
const RECONNECT: Duration = Duration::from_secs(30);

/// How much output waits for a slow reader, in pieces of up to 64 KiB.
const QUEUE: usize = 16;

/// See [`crate::Sandbox::exec`].
pub(crate) async fn exec(mut call: Call<'_>, mut command: Command) -> Result<Run> {
    let process = ProcessId::new();
    command.look_up(&*call.recorder().inner.secrets).await?;
    let start = command.to_start(&process)?;
    let limit = command.capture_limit();
    let input = match command.take_stdin() {
        Stdin::Bytes(bytes) => Some(bytes),
        Stdin::Null | Stdin::Piped => None,
    };
    let recorder = call.recorder();
    recorder.record(started(&process, &command)).await?;
    // From here on what was begun gets its end, also if nobody waits for the sink.
    let mut guard = Guard::new(recorder, process.clone());
    call.deliver().await;
    let mut captured = Captures::new(limit);
    let ended = async {
        let mut session = Session::start(call.recorder(), process.clone(), start, input).await?;
        session.run(&mut captured).await
    };
    let ended = ended.await;
    guard.ended(exited(&process, &ended));
    call.record(exited(&process, &ended)).await?;
    guard.disarm();
    let result = ended.map(|ended| ended.into_run(process, captured));
    call.finish(result)
}

/// See [`crate::Sandbox::spawn`].
pub(crate) async fn spawn(mut call: Call<'_>, mut command: Command) -> Result<Process> {
    let process = ProcessId::new();
    command.look_up(&*call.recorder().inner.secrets).await?;
    let start = command.to_start(&process)?;
    let limit = command.capture_limit();
    let (input, piped) = match command.take_stdin() {
        Stdin::Bytes(bytes) => (Some(bytes), false),
        Stdin::Null => (None, false),
        Stdin::Piped => (None, true),
    };
    let recorder = call.recorder();
    recorder.record(started(&process, &command)).await?;
    let mut guard = Guard::new(recorder.clone(), process.clone());
    call.deliver().await;
    let session = Session::start(recorder.clone(), process.clone(), start, input).await;
    let mut session = match session {
        Ok(session) => session,
        Err(error) => {
            guard.disarm();
            call.record(exited(&process, &Err(error.clone()))).await?;
            return call.finish(Err(error));
        }
    };
    let pid = session.attachment.started().pid;
    let stdin = piped.then(|| (session.attachment.stdin(), 0));
    let control = session.attachment.stdin();
    let (mut output, chunks) = mpsc::channel(QUEUE);
    let (done, ended) = watch::channel(None);
    let id = process.clone();
    tokio::spawn(async move {
        // Whoever lets go of the handle lets go of the process.
        let result = tokio::select! {
            result = session.run(&mut output) => Some(result),
            () = done.closed() => None,
        };
        if let Some(result) = result {
            guard.disarm();
            if let Err(error) = recorder.record(exited(&id, &result)).await {
                tracing::warn!(%error, "a process's end could not be recorded");
            }
            let _ = done.send(Some(result));
        }
    });
    let handle = Process { id: process, pid, stdin, control, chunks, ended, limit };
    call.deliver().await;
    call.finish(Ok(handle))
}

fn started(process: &ProcessId, command: &Command) -> Known {
    Known::ProcessStarted { process: process.clone(), argv: command.argv(), detached: false }
}

fn exited(process: &ProcessId, ended: &Result<Ended>) -> Known {
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

/// How a process ended, and the figures of its end where the guest told them.
#[derive(Debug, Clone)]
struct Ended {
    outcome: Outcome,
    exit: Option<ProcessExit>,
}

impl Ended {
    fn exited(exit: ProcessExit) -> Self {
        Self { outcome: Outcome::of(exit.status), exit: Some(exit) }
    }

    fn lost(reason: String) -> Self {
        Self { outcome: Outcome::Lost(reason), exit: None }
    }

    fn into_run(self, process: ProcessId, captured: Captures) -> Run {
        let exit = self.exit;
        let figure = |of: fn(&ProcessExit) -> u64| exit.as_ref().map_or(0, of);
        Run {
            process,
            outcome: self.outcome,
            stdout: captured.stdout.finish(),
            stderr: captured.stderr.finish(),
            output_open: exit.as_ref().is_some_and(|exit| exit.output_open),
            duration: Duration::from_micros(figure(|exit| exit.duration_us)),
            cpu: Duration::from_micros(figure(|exit| exit.cpu_us)),
            max_memory: figure(|exit| exit.max_memory),
        }
    }
}

/// Where output goes as it comes.
trait Outlet: Send {
    fn give(&mut self, chunk: Chunk) -> impl Future<Output = ()> + Send;
}

/// Output that is kept within limits.
struct Captures {
    stdout: Capture,
    stderr: Capture,
}

impl Captures {
    fn new(limit: usize) -> Self {
        Self { stdout: Capture::new(limit), stderr: Capture::new(limit) }
    }

    fn push(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Stdout(bytes) => self.stdout.push(bytes),
            Chunk::Stderr(bytes) => self.stderr.push(bytes),
        }
    }
}

impl Outlet for Captures {
    async fn give(&mut self, chunk: Chunk) {
        self.push(&chunk);
    }
}

impl Outlet for mpsc::Sender<Chunk> {
    async fn give(&mut self, chunk: Chunk) {
        // Once nobody wants the output it is let go of.
        let _ = self.send(chunk).await;
    }
}

/// A process and the attachment to it, across cut connections.
struct Session {
    recorder: Recorder,
    process: ProcessId,
    attachment: Attachment,
    input: Option<Vec<u8>>,
}

impl Session {
    /// Starts it, waiting for a snapshot that is being taken.
    async fn start(
        recorder: Recorder,
        process: ProcessId,
        start: Start,
        input: Option<Vec<u8>>,
    ) -> Result<Self> {
        let deadline = tokio::time::Instant::now() + THAW;
        let mut pause = Duration::from_millis(1);
        loop {
            let link = recorder.shared.link(&recorder.inner).await?;
            match Attachment::start(&link, start.clone()).await {
                Ok(attachment) => {
                    return Ok(Self { recorder, process, attachment, input });
                }
                // Frozen, or replaced while we asked: the same id starts nothing twice.
                Err(error) if error.is_retryable() && tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs it to its end, its output given away as it comes.
    async fn run(&mut self, outlet: &mut impl Outlet) -> Result<Ended> {
        loop {
            let cut = match self.run_attached(outlet).await {
                Ok(exit) => return Ok(Ended::exited(exit)),
                Err(error) if error.kind() == ErrorKind::Unavailable => error,
                Err(error) => return Err(error),
            };
            match self.attach_again(cut).await? {
                Some(lost) => return Ok(lost),
                None => continue,
            }
        }
    }

    async fn run_attached(&mut self, outlet: &mut impl Outlet) -> Result<ProcessExit> {
        let stdin = self.attachment.stdin();
        let from = self.attachment.started().stdin;
        let input = self.input.as_deref();
        let feed = async {
            match input {
                Some(bytes) => stdin.send_all(bytes, from).await,
                None => Ok(()),
            }
        };
        let attachment = &mut self.attachment;
        let read = async {
            loop {
                match attachment.next().await? {
                    Item::Exited(exit) => return Ok(exit),
                    Item::Stdout(bytes) => outlet.give(Chunk::Stdout(bytes)).await,
                    Item::Stderr(bytes) => outlet.give(Chunk::Stderr(bytes)).await,
                }
            }
        };
        tokio::pin!(feed, read);
        let mut feeding = input.is_some();
        loop {
            tokio::select! {
                biased;
                result = &mut read => return result,
                // A cut shows on the reading side too.
                _ = &mut feed, if feeding => feeding = false,
            }
        }
    }

    /// Attaches anew where the cut attachment ended; or says why that cannot be.
    async fn attach_again(&mut self, cut: Error) -> Result<Option<Ended>> {
        let deadline = tokio::time::Instant::now() + RECONNECT;
        let mut pause = Duration::from_millis(1);
        let old = self.recorder.shared.id.clone();
        loop {
            let attached = async {
                let link = self.recorder.shared.link(&self.recorder.inner).await?;
                Attachment::attach(&link, &self.process, self.attachment.taken()).await
            };
            match attached.await {
                Ok(attachment) => {
                    self.attachment = attachment;
                    return Ok(None);
                }
                // A new instance does not know the old one's processes.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let reason = "the sandbox got a new instance (rewound, restarted or replaced)";
                    return Ok(Some(Ended::lost(reason.into())));
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::Lost | ErrorKind::Conflict)
                        && !error.is_retryable() =>
                {
                    return Ok(Some(Ended::lost(error.message().to_owned())));
                }
                Err(error) if tokio::time::Instant::now() < deadline => {
                    tracing::debug!(sandbox = %old, %error, "not attached yet");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
                Err(_) => return Ok(Some(Ended::lost(cut.to_string()))),
            }
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
        kill(&link, &process).await
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

async fn kill(link: &Link, process: &ProcessId) -> Result<()> {
    match link.call(Request::Kill { process: process.to_string() }).await {
        // It never started, or has been forgotten since it ended.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        answered => answered.map(drop),
    }
}

/// Some of a process's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Of its standard output, or its terminal's.
    Stdout(Vec<u8>),
    /// Of its standard error.
    Stderr(Vec<u8>),
}

/// A running command. Dropping it kills the command and all that it started.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    pid: u32,
    stdin: Option<(StdinHalf, u64)>,
    control: StdinHalf,
    chunks: mpsc::Receiver<Chunk>,
    ended: watch::Receiver<Option<Result<Ended>>>,
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
    /// A process whose output nobody takes waits, once some two MiB have piled up.
    pub async fn next_output(&mut self) -> Option<Chunk> {
        self.chunks.recv().await
    }

    /// Writes to its standard input, waiting for room. A process that has ended or does not read any
    /// more takes it silently.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if it was not started with [`Command::stdin_piped`], or its input was ended;
    /// `Unavailable` if the connection is cut.
    pub async fn write_stdin(&mut self, bytes: &[u8]) -> Result<()> {
        let Some((stdin, offset)) = &mut self.stdin else {
            let message = "the process has no piped standard input, or it was ended";
            return Err(Error::new(ErrorKind::InvalidSpec, "write stdin", message));
        };
        stdin.send(bytes, *offset).await?;
        *offset += bytes.len() as u64;
        Ok(())
    }

    /// Ends its standard input.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the connection is cut.
    pub async fn end_stdin(&mut self) -> Result<()> {
        match self.stdin.take() {
            Some((stdin, _)) => stdin.end().await,
            None => Ok(()),
        }
    }

    /// Tells its terminal that the size has changed.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` for no rows or columns; `Unavailable` if the connection is cut.
    pub async fn resize(&self, size: TerminalSize) -> Result<()> {
        if size.rows == 0 || size.cols == 0 {
            let message = "a terminal has at least one row and one column";
            return Err(Error::new(ErrorKind::InvalidSpec, "resize", message));
        }
        let size = PtySize { rows: size.rows, cols: size.cols };
        self.control.message(&Input::Resize(size)).await
    }

    /// Waits for its end, ends its standard input, and returns what it said that was not taken before.
    /// Dropping the future kills it.
    ///
    /// # Errors
    ///
    /// If the guest broke the protocol.
    pub async fn wait(mut self, sandbox: &crate::Sandbox, sink: &dyn TurnEventSink) -> Result<Run> {
        self.end_stdin().await.or_else(|error| match error.kind() {
            ErrorKind::Unavailable => Ok(()),
            _ => Err(error),
        })?;
        let mut captured = Captures::new(self.limit);
        while let Some(chunk) = self.next_output().await {
            captured.push(&chunk);
        }
        let mut ended = self.ended.clone();
        let ended = match ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone(),
            Err(_) => None,
        };
        let ended = ended.unwrap_or_else(|| Ok(Ended::lost("the runtime was shut down".into())));
        let result = ended.map(|ended| ended.into_run(self.id.clone(), captured));
        let mut call = sandbox.call(sink).await?;
        call.deliver().await;
        call.finish(result)
    }
}
