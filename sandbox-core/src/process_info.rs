//! What is told about processes.

use std::time::Duration;

use jiff::Timestamp;
use sandbox_guest::ProcessExit;
use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Outcome, ProcessId, Result};

/// A process that the harness started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessInfo {
    /// Its id in the history.
    pub id: ProcessId,
    /// Its process id inside the sandbox.
    pub pid: u32,
    /// Program and arguments; what is not UTF-8 is replaced.
    pub argv: Vec<String>,
    /// When it was started, by the sandbox's clock.
    pub started_at: Timestamp,
    /// Whether it goes on without its harness.
    pub detached: bool,
    /// Whether it runs.
    pub state: ProcessState,
    /// What of its standard output is kept.
    pub stdout: KeptOutput,
    /// What of its standard error is kept.
    pub stderr: KeptOutput,
}

/// Whether a process runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessState {
    /// It runs.
    Running,
    /// It has ended.
    Ended(ProcessEnd),
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessEnd {
    /// How.
    pub outcome: Outcome,
    /// All it ever wrote to standard output, in bytes.
    pub stdout: u64,
    /// All it ever wrote to standard error, in bytes.
    pub stderr: u64,
    /// Something that it started still holds its output open; what that writes is not in the count.
    pub output_open: bool,
    /// From its start to its end.
    pub duration: Duration,
    /// CPU time of it and of the children that it waited for.
    pub cpu: Duration,
    /// The largest resident set among them, in bytes.
    pub max_memory: u64,
}

/// What is kept of an output stream: the bytes between two offsets, which count from the process's start.
/// Of a process that is not detached it is what its reader has not taken yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeptOutput {
    /// The offset of the oldest byte that is kept.
    pub begin: u64,
    /// The offset after the newest: how many bytes there ever were.
    pub end: u64,
    /// At most so many are kept.
    pub limit: u64,
}

/// One of a process's output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output; with a terminal, all that comes out of it.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Some of a process's output, and where it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputPiece {
    /// Of this stream.
    pub stream: OutputStream,
    /// How many bytes of the stream came before it. What lies between two pieces was not kept.
    pub offset: u64,
    /// What was said.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

impl OutputPiece {
    /// The offset of what comes next.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes.len() as u64)
    }
}

impl ProcessEnd {
    pub(crate) fn exited(exit: &ProcessExit) -> Self {
        Self {
            outcome: Outcome::of(exit.status),
            stdout: exit.stdout,
            stderr: exit.stderr,
            output_open: exit.output_open,
            duration: Duration::from_micros(exit.duration_us),
            cpu: Duration::from_micros(exit.cpu_us),
            max_memory: exit.max_memory,
        }
    }

    pub(crate) fn lost(reason: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Lost(reason.into()),
            stdout: 0,
            stderr: 0,
            output_open: false,
            duration: Duration::ZERO,
            cpu: Duration::ZERO,
            max_memory: 0,
        }
    }
}

impl ProcessInfo {
    /// What a guest says about a process.
    pub(crate) fn of(info: &sandbox_guest::ProcessInfo) -> Result<Self> {
        let kept = |kept: sandbox_guest::KeptOutput| KeptOutput {
            begin: kept.begin,
            end: kept.end,
            limit: kept.limit,
        };
        let state = match &info.state {
            sandbox_guest::ProcessState::Exited(exit) => {
                ProcessState::Ended(ProcessEnd::exited(exit))
            }
            _ => ProcessState::Running,
        };
        let id = info.process.parse().map_err(|error: Error| {
            Error::new(ErrorKind::Guest, "processes", "the guest named a process that has no id")
                .with_source(error)
        })?;
        Ok(ProcessInfo {
            id,
            pid: info.pid,
            argv: info.argv.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect(),
            started_at: i64::try_from(info.started_at)
                .ok()
                .and_then(|ms| Timestamp::from_millisecond(ms).ok())
                .unwrap_or(Timestamp::UNIX_EPOCH),
            detached: info.detached,
            state,
            stdout: kept(info.stdout),
            stderr: kept(info.stderr),
        })
    }
}

/// The error for whoever asks for a process of which only the history knows.
pub(crate) fn gone(id: &ProcessId, outcome: &Outcome) -> Error {
    let message = match outcome {
        Outcome::Lost(reason) => format!("the process {id} is lost: {reason}"),
        other => format!("the process {id} ended ({other:?}), and its output is not kept any more"),
    };
    Error::new(ErrorKind::Lost, "process", message)
}
