//! What a process has yet to read from its standard input: at most two windows, always accepted.

use std::{collections::VecDeque, io};

use sandbox_guest::DEFAULT_WINDOW;

/// A client may send a window beyond what was taken; this leaves room for a mistake.
const LIMIT: u64 = 2 * DEFAULT_WINDOW;

/// A process's standard input, from the client's side of the pipe.
#[derive(Debug, Default)]
pub(crate) struct Stdin {
    waiting: VecDeque<u8>,
    received: u64,
    ended: bool,
    end_typed: bool,
    closed: bool,
}

impl Stdin {
    /// How many bytes came in.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// How many bytes the process took, or never will.
    pub(crate) fn taken(&self) -> u64 {
        self.received - self.waiting.len() as u64
    }

    /// Takes what the client sent.
    pub(crate) fn push(&mut self, data: &[u8]) -> io::Result<()> {
        if self.waiting.len() as u64 + data.len() as u64 > LIMIT {
            let message = "more standard input than the window allows";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        if self.ended {
            return Ok(());
        }
        self.received += data.len() as u64;
        if !self.closed {
            self.waiting.extend(data);
        }
        Ok(())
    }

    /// Nothing more comes.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// Nobody reads any more: what waits and what comes is dropped.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.waiting = VecDeque::new();
    }

    /// What to write next; empty if nothing waits.
    pub(crate) fn next(&self) -> &[u8] {
        self.waiting.as_slices().0
    }

    /// So much of [`Self::next`] was written.
    pub(crate) fn written(&mut self, count: usize) {
        self.waiting.drain(..count);
        if self.waiting.is_empty() && self.waiting.capacity() > 64 * 1024 {
            self.waiting = VecDeque::new();
        }
    }

    /// Whether all has been written and nothing more comes.
    pub(crate) fn is_done(&self) -> bool {
        self.ended && self.waiting.is_empty()
    }

    /// Whether a terminal has yet to be told of the end; true once.
    pub(crate) fn needs_end_character(&mut self) -> bool {
        !std::mem::replace(&mut self.end_typed, true)
    }
}
