//! Shell sessions. The guest's own program keeps the shell: these messages, and data frames, are what it
//! reads from its standard input and writes to its standard output.

use serde::{Deserialize, Serialize};

use super::{Bytes, ExitStatus, Failure};

/// How many bytes of a command's standard input may be sent ahead of [`ShellEvent::Took`].
pub const SHELL_INPUT_WINDOW: u64 = 256 * 1024;

/// To the keeper of a shell.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShellRequest {
    /// Run this text in the shell; there must be no other command that has not ended. Its output comes as
    /// data frames, and then [`ShellEvent::Done`] or [`ShellEvent::Ended`].
    Run {
        /// Counted by the sender.
        number: u64,
        /// The text; no byte of it may be 0.
        text: Bytes,
        /// Whether its standard input follows, as data frames up to [`ShellRequest::End`]; without it,
        /// `/dev/null`.
        #[serde(default)]
        stdin: bool,
    },
    /// The command's standard input has ended.
    End,
    /// Kill the shell. Answered by [`ShellEvent::Ended`].
    Stop,
}

/// From the keeper of a shell.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShellEvent {
    /// The shell could not be started.
    Failed(Failure),
    /// So many bytes of the command's standard input have been taken, or never will be.
    Took {
        /// Counted from the start of the command.
        stdin: u64,
    },
    /// The command has ended, and all that it wrote before has been sent.
    Done(ShellDone),
    /// The shell has ended; all that the command wrote before has been sent. The last message.
    Ended {
        /// The command that the shell ended in, if there was one.
        #[serde(default)]
        command: Option<ShellDone>,
        /// How.
        status: ExitStatus,
        /// The last that it said outside of any command.
        #[serde(default)]
        words: Bytes,
    },
}

/// How a command in a shell ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShellDone {
    /// Which.
    pub number: u64,
    /// What the shell had as `$?` afterwards. A child that a signal ended gives 128 and the signal.
    #[serde(default)]
    pub status: i32,
    /// Something that it left running still holds its output open; what that writes later is dropped.
    #[serde(default)]
    pub output_open: bool,
    /// From start to end, in microseconds.
    #[serde(default)]
    pub duration_us: u64,
    /// CPU time of the shell and of the children that it waited for, in microseconds.
    #[serde(default)]
    pub cpu_us: u64,
}
