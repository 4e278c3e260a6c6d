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

    /// Takes what a client sent, whose first byte is at this offset of the input. What came before already,
    /// by another connection of it, is not taken again.
    pub(crate) fn push(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        let here = usize::try_from(self.received.saturating_sub(at)).unwrap_or(usize::MAX);
        let Some(data) = data.get(here..) else { return Ok(()) };
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A client that was cut off sends again from where it was told; what was on its way arrives in between.
        #[test]
        fn what_comes_by_several_connections_is_there_once(
            connections in 1..5_usize,
            pieces in proptest::collection::vec((0..5_usize, 1..90_usize), 0..60),
        ) {
            let input: Vec<u8> = (0..2000_u32).map(|n| (n % 251) as u8).collect();
            let mut stdin = Stdin::default();
            // Each connection begins where it was told that the input went to, when it was made.
            let mut at = vec![None; connections];
            for (connection, count) in pieces {
                let connection = connection % connections;
                let at = at[connection].get_or_insert(stdin.received());
                let begin = *at as usize;
                let end = (begin + count).min(input.len());
                stdin.push(*at, &input[begin..end]).unwrap();
                *at = end as u64;
                prop_assert_eq!(stdin.received() as usize, stdin.waiting.len());
                prop_assert!(stdin.waiting.iter().eq(&input[..stdin.waiting.len()]));
            }
        }
    }

    #[test]
    fn more_than_the_windows_is_refused() {
        let mut stdin = Stdin::default();
        let piece = vec![0; DEFAULT_WINDOW as usize];
        stdin.push(0, &piece).unwrap();
        stdin.push(DEFAULT_WINDOW, &piece).unwrap();
        assert!(stdin.push(LIMIT, b"x").is_err());
        // The same again is no more.
        stdin.push(0, &piece).unwrap();
        assert_eq!(stdin.received(), LIMIT);
    }
}
