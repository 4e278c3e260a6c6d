//! The messages. Every struct tolerates unknown fields and defaults missing optional ones, so that a
//! core and a guest of neighbouring releases work together.

mod egress;
mod exec;
mod failure;
mod file;
mod setup;
mod shell;

use serde::{Deserialize, Serialize};

pub use egress::{EgressCall, EgressRequest};
pub use exec::{
    ExitStatus, KeptOutput, MAX_KEPT_OUTPUT, Output, ProcessExit, ProcessInfo, ProcessLimits,
    ProcessState, PtySize, Start, Started,
};
pub use failure::errno_text;
pub use file::{
    Done, Entry, Existing, FileEvent, FileInfo, FileKind, FileRequest, TreeMeta, TreeRecord,
};
pub use setup::{MountStep, Setup};
pub use shell::{SHELL_INPUT_WINDOW, ShellDone, ShellEvent, ShellRequest};

/// A byte string: paths, arguments and environment need not be UTF-8.
pub type Bytes = serde_bytes::ByteBuf;

/// The protocol's version, sent in the preamble; a different one is refused.
pub const PROTOCOL_VERSION: u16 = 1;

/// How many bytes of a process's channel may be unacknowledged. A sender stops there.
pub const DEFAULT_WINDOW: u64 = 1024 * 1024;

/// The first message of a stream, from the harness to the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // Made once for each request, and not kept.
pub enum Request {
    /// Who is there? The first request of a connection; answered by [`Response::Welcome`].
    Hello(Hello),
    /// Start a process and attach to it; answered by [`Response::Started`], and then as
    /// [`Request::Attach`] is. The same id a second time attaches to the process that it started.
    Start(Start),
    /// Attach to a process, its output from these offsets on. Answered by [`Response::Started`], data
    /// frames, and [`Response::Exited`] when all that was written before its end has been sent.
    Attach {
        /// The process's id.
        process: String,
        /// Where to begin in its standard output, in bytes.
        #[serde(default)]
        stdout: u64,
        /// Where to begin in its standard error, in bytes.
        #[serde(default)]
        stderr: u64,
    },
    /// Signal a process, or with `tree` all its descendants too; answered by [`Response::Done`].
    Signal {
        /// The process's id.
        process: String,
        /// The signal's number on Linux.
        signal: i32,
        /// Everything it started as well, whatever session it moved to.
        #[serde(default)]
        tree: bool,
    },
    /// Kill a process's whole tree; its outcome becomes [`ExitStatus::Cancelled`]. Answered by
    /// [`Response::Done`] when nothing of it is left.
    Kill {
        /// The process's id.
        process: String,
    },
    /// Wait for a process's end, without its output. Answered by [`Response::Exited`], however long that
    /// takes; a client that lets go of the stream leaves the process as it is.
    Wait {
        /// The process's id.
        process: String,
    },
    /// Let go of what is kept of a process that has ended. Answered by [`Response::Done`], also if nothing
    /// was; one that runs is refused.
    Forget {
        /// The process's id.
        process: String,
    },
    /// Which processes are there? Answered by [`Response::Processes`].
    Processes,
    /// How is the guest? Answered by [`Response::Status`].
    Status,
    /// Stop every process for a snapshot and start none until [`Request::Thaw`]; answered by
    /// [`Response::Frozen`]. A frozen guest refuses a start with [`FailureKind::Frozen`] and thaws by
    /// itself when the connection that froze it ends.
    Freeze,
    /// Let the processes go on; answered by [`Response::Done`].
    Thaw,
    /// A file operation.
    File(FileRequest),
    /// Connect to a TCP port of the loopback that the guest sees, and of nothing else. Answered by
    /// [`Response::Connected`], data frames, and [`Response::Done`] when the service has said all; what the
    /// client says are data frames and [`Input::End`]. A stream that ends before that was broken off.
    Connect {
        /// Which.
        port: u16,
    },
    /// When the guest must end by itself; what is not given stays as it is. Answered by
    /// [`Response::Done`].
    Deadline {
        /// The sandbox's end, in milliseconds since the Unix epoch.
        #[serde(default)]
        expires_at: Option<u64>,
        /// The end of the harness's lease, likewise.
        #[serde(default)]
        lease_until: Option<u64>,
    },
    /// About connections to the outside.
    Egress(EgressRequest),
    /// End everything: kill all processes and exit; answered by [`Response::Done`] beforehand.
    Shutdown,
}

/// A message from the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Response {
    /// To [`Request::Hello`].
    Welcome(Welcome),
    /// A process runs. It comes again where output that was to be kept gave way to newer before it
    /// could be sent: what follows then begins at the offsets it names.
    Started(Started),
    /// A process has ended, and all it wrote before has been sent. The last message of its stream.
    Exited(ProcessExit),
    /// So many bytes of standard input have been taken in all: the sender may go as far as this plus
    /// the window.
    Accepted {
        /// Counted from the start of the process.
        stdin: u64,
    },
    /// To [`Request::Processes`].
    Processes(Vec<ProcessInfo>),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Freeze`].
    Frozen {
        /// Whether there was no process to stop, and none that has ended and whose output is kept: a new
        /// guest would know of nothing less.
        idle: bool,
    },
    /// A file's metadata; with [`FileRequest::Read`] the first message, followed by data frames and
    /// [`Response::Done`].
    File(FileInfo),
    /// Some of a directory's entries; more may follow until [`Response::Done`].
    Entries(Vec<Entry>),
    /// To [`FileRequest::Canonicalize`].
    Path(Bytes),
    /// To [`FileRequest::Download`].
    Tree(TreeRecord),
    /// To [`FileRequest::Watch`].
    Events(Vec<FileEvent>),
    /// To [`Request::Connect`].
    Connected,
    /// To [`EgressRequest::Serve`].
    Egress(EgressCall),
    /// The request is done.
    Done(Done),
    /// The request failed. The last message of its stream.
    Failed(Failure),
}

/// A message on a process's stream from the harness, after the first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Input {
    /// Standard input has ended, or all that the client of a connection says.
    End,
    /// So many bytes of output have been taken, counted from the start of the process: the guest may
    /// forget them and send as far as these plus the window.
    Taken {
        /// Of standard output.
        stdout: u64,
        /// Of standard error.
        stderr: u64,
    },
    /// The terminal's size changed.
    Resize(PtySize),
    /// The harness lets go and does not mind what becomes of the stream: the process goes on.
    Detach,
    /// With [`FileRequest::Upload`].
    Tree(TreeRecord),
}

/// See [`Request::Hello`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// The client's name and version, for messages.
    pub client: String,
    /// The instance that the client means; another one refuses.
    pub instance: String,
}

/// See [`Response::Welcome`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Welcome {
    /// The guest's release.
    pub version: String,
    /// The instance it serves.
    pub instance: String,
    /// The architecture, as `uname -m` says it.
    pub arch: String,
    /// Where relative paths begin.
    pub workspace: Bytes,
}

/// See [`Request::Status`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Processes that the harness started and that have not ended.
    pub running: u32,
    /// All processes in the sandbox but the guest's own.
    pub processes: u32,
    /// Milliseconds since the last process ended or request came; 0 while something runs.
    pub idle_ms: u64,
    /// The guest's resident memory, in bytes.
    pub guest_memory: u64,
    /// CPU time of all those processes, and of all that have ended, in microseconds.
    pub cpu_us: Option<u64>,
    /// The memory of those processes, in bytes; what several share counts once.
    pub memory: Option<u64>,
    /// Bytes that came in through the network interfaces that the guest sees, but for the loopback.
    pub network_received: Option<u64>,
    /// Bytes that went out, likewise.
    pub network_sent: Option<u64>,
}

/// Why a request failed.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// For people: what was tried, on what, and why it failed.
    pub message: String,
    /// The system's error number on Linux, where it was the system that refused.
    #[serde(default)]
    pub errno: Option<i32>,
}

/// What kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FailureKind {
    /// A file, program, working directory, user or process that does not exist.
    NotFound,
    /// Not allowed, or a program that is not executable.
    PermissionDenied,
    /// Something exists that must not.
    AlreadyExists,
    /// A directory where a file is needed, or the reverse.
    WrongType,
    /// A limit was met; the message names it.
    LimitExceeded,
    /// The request makes no sense.
    Invalid,
    /// The guest is frozen for a snapshot, or sealed by one: try again, on the new instance.
    Frozen,
    /// The guest does not know this request, or cannot do it here.
    Unsupported,
    /// Another instance answered than the one that was meant.
    WrongInstance,
    /// The system refused for a reason that has no kind of its own.
    System,
    /// A kind that this release does not know.
    #[serde(other)]
    Unknown,
}
