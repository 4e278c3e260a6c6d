//! How processes end, and what they said.

use std::{borrow::Cow, collections::VecDeque, time::Duration};

use sandbox_guest::ExitStatus;
use serde::{Deserialize, Serialize};

use crate::ProcessId;

/// How a process ended. An exit code is never invented: where there was none, there is none here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// It exited with this code; 0 is success by convention.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
    /// Its time was over: its whole tree was killed.
    TimedOut,
    /// It was taken back: its whole tree was killed.
    Cancelled,
    /// The kernel killed it for want of memory.
    OutOfMemory,
    /// How it ended cannot be known: the reason says why.
    Lost(String),
}

impl Outcome {
    /// What the guest says of a process's end.
    pub(crate) fn of(status: ExitStatus) -> Self {
        match status {
            ExitStatus::Exited(code) => Self::Exited(code),
            ExitStatus::Signaled(signal) => Self::Signaled(signal),
            ExitStatus::TimedOut => Self::TimedOut,
            ExitStatus::Cancelled => Self::Cancelled,
            ExitStatus::OutOfMemory => Self::OutOfMemory,
            _ => Self::Lost("how it ended cannot be known: its supervisor was killed".into()),
        }
    }

    /// Whether it exited with 0.
    #[must_use]
    pub fn is_success(&self) -> bool {
        *self == Self::Exited(0)
    }

    /// The exit code, if it exited.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Exited(code) => Some(*code),
            _ => None,
        }
    }
}

/// A command that has run: how it ended and what it said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Run {
    /// Its id.
    pub process: ProcessId,
    /// How it ended.
    pub outcome: Outcome,
    /// Standard output; with a terminal, all that came out of it.
    pub stdout: Captured,
    /// Standard error.
    pub stderr: Captured,
    /// Something that it started still holds its output open; what that writes is not here.
    pub output_open: bool,
    /// From its start to its end.
    pub duration: Duration,
    /// CPU time of it and of the children that it waited for.
    pub cpu: Duration,
    /// The largest resident set among them, in bytes.
    pub max_memory: u64,
}

/// Output that was captured: all of it, or its beginning and its end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Captured {
    /// The beginning; all of it where nothing was cut.
    #[serde(with = "serde_bytes")]
    pub head: Vec<u8>,
    /// The end, where something was cut in between.
    #[serde(with = "serde_bytes")]
    pub tail: Vec<u8>,
    /// How many bytes there were.
    pub total: u64,
}

impl Captured {
    /// Whether something is missing between [`head`](Self::head) and [`tail`](Self::tail).
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.total > (self.head.len() + self.tail.len()) as u64
    }

    /// How many bytes are missing.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.total.saturating_sub((self.head.len() + self.tail.len()) as u64)
    }

    /// As text, for people: what is not UTF-8 is replaced, and a gap is told.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        let head = String::from_utf8_lossy(&self.head);
        if !self.is_cut() && self.tail.is_empty() {
            return head;
        }
        let tail = String::from_utf8_lossy(&self.tail);
        if self.is_cut() {
            Cow::Owned(format!("{head}\n[… {} bytes left out …]\n{tail}", self.missing()))
        } else {
            Cow::Owned(format!("{head}{tail}"))
        }
    }
}

/// Captures output within a limit: half of it for the beginning, half for the end.
#[derive(Debug)]
pub(crate) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_limit: usize,
    tail_limit: usize,
    total: u64,
}

impl Capture {
    pub(crate) fn new(limit: usize) -> Self {
        let tail_limit = limit / 2;
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            head_limit: limit - tail_limit,
            tail_limit,
            total: 0,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let room = self.head_limit - self.head.len();
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        // Only the last of it can stay.
        let rest = &rest[rest.len().saturating_sub(self.tail_limit)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.tail_limit);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// Notes that so many bytes are missing here: what comes now does not follow what came before.
    pub(crate) fn skip(&mut self, count: u64) {
        if count > 0 {
            self.total = self.total.saturating_add(count);
            self.head_limit = self.head.len();
            self.tail.clear();
        }
    }

    pub(crate) fn finish(self) -> Captured {
        let mut captured = Captured { head: self.head, tail: self.tail.into(), total: self.total };
        if !captured.is_cut() {
            captured.head.append(&mut captured.tail);
        }
        captured
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn head_and_tail_are_what_they_say(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..20),
            limit in 0_usize..200,
        ) {
            let all: Vec<u8> = chunks.concat();
            let mut capture = Capture::new(limit);
            chunks.iter().for_each(|chunk| capture.push(chunk));
            let captured = capture.finish();
            prop_assert_eq!(captured.total, all.len() as u64);
            prop_assert!(captured.head.len() + captured.tail.len() <= limit);
            prop_assert!(all.starts_with(&captured.head));
            prop_assert!(all.ends_with(&captured.tail));
            prop_assert_eq!(captured.is_cut(), all.len() > limit);
            if !captured.is_cut() {
                prop_assert_eq!(captured.head, all);
            } else {
                prop_assert_eq!(captured.head.len() + captured.tail.len(), limit);
            }
        }
    }
}
