//! A process and the attachment to it, across cut connections: nothing of its output or input is lost or
//! doubled, and every wait but the one for the process itself is bounded.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandbox_guest::{ProcessExit, Start};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    Error, ErrorKind, OutputPiece, OutputStream, ProcessEnd, ProcessId, Result,
    guest::{Attachment, Item, Link, Pipe, RECONNECT, Taken},
    manager::Repeats,
    outcome::Capture,
    way::Way,
};

/// How long a start waits for a snapshot that is being taken.
const THAW: Duration = Duration::from_secs(60);

/// A connection that lasts so long is worth another one when it is cut.
const STEADY: Duration = Duration::from_secs(1);

/// After so much silence the guest is asked whether it is still there.
const SILENCE: Duration = Duration::from_secs(20);

/// How long a pause is waited for to end before the sandbox is looked at again.
const PAUSED: Duration = Duration::from_millis(200);

/// Where output goes as it comes.
pub(crate) trait Outlet: Send {
    fn give(&mut self, piece: OutputPiece) -> impl Future<Output = ()> + Send;
}

/// Output that is kept within limits.
pub(crate) struct Captures {
    stdout: Capture,
    stderr: Capture,
    /// Where the next is expected.
    next: Taken,
}

impl Captures {
    /// Of what follows these offsets.
    pub(crate) fn new(limit: usize, next: Taken) -> Self {
        Self { stdout: Capture::new(limit), stderr: Capture::new(limit), next }
    }

    pub(crate) fn push(&mut self, piece: &OutputPiece) {
        let (capture, next) = match piece.stream {
            OutputStream::Stdout => (&mut self.stdout, &mut self.next.stdout),
            OutputStream::Stderr => (&mut self.stderr, &mut self.next.stderr),
        };
        capture.skip(piece.offset.saturating_sub(*next));
        capture.push(&piece.bytes);
        *next = piece.end();
    }

    pub(crate) fn into_run(self, process: ProcessId, end: ProcessEnd) -> crate::Run {
        crate::Run {
            process,
            outcome: end.outcome,
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
            output_open: end.output_open,
            duration: end.duration,
            cpu: end.cpu,
            max_memory: end.max_memory,
        }
    }
}

impl Outlet for Captures {
    async fn give(&mut self, piece: OutputPiece) {
        self.push(&piece);
    }
}

impl Outlet for mpsc::Sender<OutputPiece> {
    async fn give(&mut self, piece: OutputPiece) {
        // Once nobody wants the output it is let go of.
        let _ = self.send(piece).await;
    }
}

/// What a process is fed with.
#[derive(Debug, Default)]
pub(crate) struct Input {
    /// All of its standard input.
    pub(crate) whole: Option<Vec<u8>>,
    /// What is written, and resized, while it runs.
    pub(crate) pipe: Option<Arc<Pipe>>,
}

/// A process and the attachment to it.
pub(crate) struct Session {
    way: Way,
    process: ProcessId,
    link: Arc<Link>,
    attachment: Attachment,
    input: Input,
    /// Whether its output may give way to newer before it is taken.
    rolling: bool,
    /// When it last made progress, and how far it had got.
    progress: (Instant, Taken),
}

impl Session {
    /// Starts a process, waiting for a snapshot that is being taken. `since` names the guest that it must
    /// be, where that matters: see [`Record::since`](crate::record::Record).
    pub(crate) async fn start(
        way: impl Into<Way>,
        process: ProcessId,
        start: Start,
        input: Input,
        since: Option<u64>,
    ) -> Result<Self> {
        let way = way.into();
        let rolling = start.detached;
        let deadline = Instant::now() + THAW;
        let mut pause = Duration::from_millis(1);
        loop {
            let attached = async {
                let link = way.link().await?;
                way.check_since(since).await?;
                Ok::<_, Error>((Attachment::start(&link, start.clone()).await?, link))
            };
            match attached.await {
                Ok((attachment, link)) => {
                    return Ok(Self::new(way, process, link, attachment, input, rolling));
                }
                // Frozen, or replaced while we asked: the same id starts nothing twice.
                Err(error) if error.is_retryable() && Instant::now() < deadline => {
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Attaches to a detached process, its output from there on.
    pub(crate) async fn attach(
        way: impl Into<Way>,
        process: ProcessId,
        from: Taken,
    ) -> Result<Self> {
        let way = way.into();
        let mut repeats = Repeats::new();
        let (attachment, link) = loop {
            let attached = async {
                let link = way.link().await?;
                Ok::<_, Error>((Attachment::attach(&link, &process, from, true).await?, link))
            };
            match attached.await {
                Err(error) if repeats.again(&error).await => {}
                attached => break attached?,
            }
        };
        Ok(Self::new(way, process, link, attachment, Input::default(), true))
    }

    fn new(
        way: Way,
        process: ProcessId,
        link: Arc<Link>,
        attachment: Attachment,
        input: Input,
        rolling: bool,
    ) -> Self {
        let progress = (Instant::now(), attachment.taken());
        Self { way, process, link, attachment, input, rolling, progress }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.attachment.started().pid
    }

    /// Runs it to its end, its output given away as it comes.
    pub(crate) async fn run(&mut self, outlet: &mut impl Outlet) -> Result<ProcessEnd> {
        let mut pause = Duration::ZERO;
        loop {
            let begin = Instant::now();
            let cut = match self.run_attached(outlet).await {
                Ok(exit) => return Ok(ProcessEnd::exited(&exit)),
                Err(error) if error.kind() == ErrorKind::Unavailable => error,
                Err(error) => return Err(error),
            };
            // Cut again and again before anything comes, it would never end.
            let taken = self.attachment.taken();
            if begin.elapsed() >= STEADY || taken != self.progress.1 {
                self.progress = (Instant::now(), taken);
                pause = Duration::ZERO;
            } else if self.progress.0.elapsed() > RECONNECT {
                return Ok(ProcessEnd::lost(cut.to_string()));
            }
            // A guest that ends each stream at once is not asked as fast as it can do that.
            sleep(pause).await;
            pause = (pause * 2).clamp(Duration::from_millis(1), Duration::from_millis(500));
            if let Some(lost) = self.attach_again(cut).await? {
                return Ok(lost);
            }
        }
    }

    async fn run_attached(&mut self, outlet: &mut impl Outlet) -> Result<ProcessExit> {
        let stdin = self.attachment.stdin();
        let from = self.attachment.started().stdin;
        let Input { whole, pipe } = &self.input;
        let feed = async {
            match (whole, pipe) {
                (Some(bytes), Some(pipe)) => {
                    let (sent, sized) =
                        tokio::join!(stdin.send_all(bytes, from), pipe.feed(&stdin, from));
                    sent.and(sized)
                }
                (Some(bytes), None) => stdin.send_all(bytes, from).await,
                (None, Some(pipe)) => pipe.feed(&stdin, from).await,
                (None, None) => Ok(()),
            }
        };
        let mut feeding = whole.is_some() || pipe.is_some();
        let (way, link, attachment) = (&self.way, &self.link, &mut self.attachment);
        let heard = AtomicU64::new(0);
        let read = async {
            let piece = |stream, offset, bytes| OutputPiece { stream, offset, bytes };
            loop {
                let item = attachment.next().await?;
                heard.fetch_add(1, Ordering::Relaxed);
                let piece = match item {
                    Item::Exited(exit) => return Ok(exit),
                    Item::Stdout(at, bytes) => piece(OutputStream::Stdout, at, bytes),
                    Item::Stderr(at, bytes) => piece(OutputStream::Stderr, at, bytes),
                };
                outlet.give(piece).await;
            }
        };
        let silence = notice_silence(way, link, &heard);
        tokio::pin!(feed, read, silence);
        loop {
            tokio::select! {
                biased;
                result = &mut read => return result,
                // A cut shows on the reading side too.
                fed = &mut feed, if feeding => {
                    feeding = false;
                    if let Err(error) = fed
                        && error.kind() != ErrorKind::Unavailable
                    {
                        return Err(error);
                    }
                }
                error = &mut silence => return Err(error),
            }
        }
    }

    /// Attaches anew where the cut attachment ended; or says why that cannot be.
    async fn attach_again(&mut self, cut: Error) -> Result<Option<ProcessEnd>> {
        let mut deadline = Instant::now() + RECONNECT;
        let mut pause = Duration::from_millis(1);
        loop {
            let attached = async {
                let link = self.way.link().await?;
                let taken = self.attachment.taken();
                let again = Attachment::attach(&link, &self.process, taken, self.rolling).await?;
                Ok::<_, Error>((again, link))
            };
            match attached.await {
                Ok((attachment, link)) => {
                    (self.attachment, self.link) = (attachment, link);
                    return Ok(None);
                }
                // A new instance does not know the old one's processes.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let reason = "the sandbox got a new instance (rewound, restarted or replaced)";
                    return Ok(Some(ProcessEnd::lost(reason)));
                }
                Err(_) if self.way.is_paused().await => {
                    // It goes on when the sandbox does.
                    deadline = Instant::now() + RECONNECT;
                    sleep(PAUSED).await;
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::Lost | ErrorKind::Conflict)
                        && !error.is_retryable() =>
                {
                    return Ok(Some(ProcessEnd::lost(error.message())));
                }
                Err(error) if Instant::now() < deadline => {
                    tracing::debug!(process = %self.process, %error, "not attached yet");
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
                Err(_) => return Ok(Some(ProcessEnd::lost(cut.to_string()))),
            }
        }
    }
}

/// Returns when a guest that says nothing does not answer either, or its connection is cut.
pub(crate) async fn notice_silence(way: &Way, link: &Arc<Link>, heard: &AtomicU64) -> Error {
    let mut before = 0;
    loop {
        sleep(SILENCE).await;
        let now = heard.load(Ordering::Relaxed);
        if std::mem::replace(&mut before, now) != now {
            continue;
        }
        match link.greet().await {
            Err(error) if error.is_retryable() && !way.is_paused().await => {
                way.unlink_from(link).await;
                let message = "the guest does not answer any more";
                return Error::new(ErrorKind::Unavailable, "wait", message).with_source(error);
            }
            _ => {}
        }
    }
}
