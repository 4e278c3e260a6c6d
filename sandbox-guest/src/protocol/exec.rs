//! Processes.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// How much of a channel's output can be kept, in bytes.
pub const MAX_KEPT_OUTPUT: u64 = 1024 * 1024 * 1024;

/// A process to start.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// Chosen by the harness and unique; the same id again starts nothing.
    pub id: String,
    /// The program: a path, or a name to look up in the `PATH` of its environment.
    pub program: Bytes,
    /// `argv[0]`, where it is not the program as given.
    pub arg0: Option<Bytes>,
    /// The arguments after `argv[0]`.
    pub args: Vec<Bytes>,
    /// Added to the sandbox's base environment; a later value wins.
    pub env: Vec<(Bytes, Bytes)>,
    /// Start from an empty environment instead of the base one.
    pub env_clear: bool,
    /// The working directory; relative ones begin at the workspace, which is also the default.
    pub cwd: Option<Bytes>,
    /// A user's name or number, and after a colon a group's; the sandbox's user if it is not given.
    pub user: Option<String>,
    /// Whether there is standard input; without it, `/dev/null`.
    pub stdin: bool,
    /// All of its standard input, a window of it at most, so that nothing has to follow; it is then
    /// ended.
    pub input: Option<Bytes>,
    /// A terminal of this size instead of pipes; its output is standard output.
    pub pty: Option<PtySize>,
    /// What becomes of the output.
    pub output: Output,
    /// Whether it goes on when nobody is attached. Without this, the end of the stream that started it
    /// kills its tree, and so does a cut connection that is not resumed in time.
    pub detached: bool,
    /// Kill its tree after so many milliseconds; the status is then [`ExitStatus::TimedOut`].
    pub timeout_ms: Option<u64>,
    /// Limits of its own, on top of the sandbox's.
    pub limits: ProcessLimits,
    /// The program is a shell to be kept for a session: its input is [`super::ShellRequest`]s and its
    /// output [`super::ShellEvent`]s. What it leaves running ends with it.
    pub shell: bool,
}

/// What becomes of a process's output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Output {
    /// Kept until it is acknowledged, at most a window of it: a process whose reader is slow waits.
    #[default]
    Stream,
    /// Kept in the sandbox for whoever asks later, the newest so many bytes of each channel; the
    /// process never waits.
    Keep {
        /// In bytes, for each channel; at most [`MAX_KEPT_OUTPUT`].
        limit: u64,
    },
}

/// A terminal's size, in characters. Neither may be 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// Limits of one process and, one by one, of each of its descendants (`setrlimit`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessLimits {
    /// Address space, in bytes.
    pub address_space: Option<u64>,
    /// CPU time, in seconds.
    pub cpu_seconds: Option<u64>,
    /// Open files.
    pub open_files: Option<u64>,
    /// The size of a file it writes, in bytes.
    pub file_size: Option<u64>,
    /// The size of a core dump, in bytes; 0 unless given.
    pub core_size: Option<u64>,
}

/// See [`super::Response::Started`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Started {
    /// The id that the harness chose.
    pub process: String,
    /// The process id inside the sandbox.
    pub pid: u32,
    /// Where the output that follows begins: later than was asked for, if the rest is not kept.
    #[serde(default)]
    pub stdout: u64,
    /// Likewise for standard error.
    #[serde(default)]
    pub stderr: u64,
    /// How many bytes of standard input have come in already: what the client sends begins there.
    #[serde(default)]
    pub stdin: u64,
    /// How many of them the process has taken: the sender may go as far as this plus the window.
    #[serde(default)]
    pub taken: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ExitStatus {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// Its time was over, and its tree was killed.
    TimedOut,
    /// It was killed on request.
    Cancelled,
    /// The kernel killed it for want of memory.
    OutOfMemory,
    /// Its supervisor was killed: how it ended cannot be known.
    Unknown,
}

/// See [`super::Response::Exited`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessExit {
    /// How.
    pub status: ExitStatus,
    /// All it ever wrote to standard output, in bytes.
    pub stdout: u64,
    /// All it ever wrote to standard error, in bytes.
    pub stderr: u64,
    /// Something else still holds its output open: what that writes later is not in the count.
    #[serde(default)]
    pub output_open: bool,
    /// From start to end, in microseconds.
    #[serde(default)]
    pub duration_us: u64,
    /// CPU time of the process and of the children it waited for, in microseconds.
    #[serde(default)]
    pub cpu_us: u64,
    /// The largest resident set among them, in bytes.
    #[serde(default)]
    pub max_memory: u64,
}

/// A process that the guest knows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// The harness's id for it.
    pub process: String,
    /// The process id inside the sandbox.
    pub pid: u32,
    /// What it runs: program and arguments.
    pub argv: Vec<Bytes>,
    /// When it started, in milliseconds since the Unix epoch.
    pub started_at: u64,
    /// Whether it goes on without anybody attached.
    pub detached: bool,
    /// How it is.
    pub state: ProcessState,
    /// What of its standard output is kept.
    #[serde(default)]
    pub stdout: KeptOutput,
    /// What of its standard error is kept.
    #[serde(default)]
    pub stderr: KeptOutput,
}

/// What is kept of a channel: the bytes from one offset to another, counted from the process's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeptOutput {
    /// Where the oldest byte that is kept is.
    pub begin: u64,
    /// How many bytes there ever were.
    pub end: u64,
    /// At most so many are kept.
    pub limit: u64,
}

/// Whether a process runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ProcessState {
    /// It runs.
    Running,
    /// It has ended.
    Exited(ProcessExit),
}
