//! What is written to a process while it runs, across cut connections: what the process has not taken yet is
//! kept, and sent again to a guest that did not get it.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandbox_guest::{DEFAULT_WINDOW, Input, PtySize, frame};
use tokio::sync::Notify;

use super::{attachment::StdinHalf, link::garbage};
use crate::Result;

/// The harness's end of a process's standard input, and of its terminal's size.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    state: Mutex<State>,
    /// Its standard input comes from elsewhere.
    sizes_only: bool,
    /// For whoever sends.
    written: Notify,
    /// For whoever writes.
    taken: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The offset of the first byte that waits.
    base: u64,
    waiting: VecDeque<u8>,
    ended: bool,
    /// Nobody reads any more.
    closed: bool,
    size: Option<PtySize>,
}

/// What to send next.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Data(Vec<u8>),
    Size(PtySize),
    End,
    Nothing,
}

/// How far one attachment has got.
#[derive(Debug)]
struct Sent {
    bytes: u64,
    size: Option<PtySize>,
    end: bool,
}

impl Pipe {
    /// For a process that gets its standard input, if it has any, from elsewhere.
    pub(crate) fn of_sizes() -> Self {
        Self { sizes_only: true, ..Self::default() }
    }

    /// Takes all of it, waiting for room: at most a window waits. What is written to a process that has
    /// ended is dropped. If the future is dropped, the beginning may have been taken.
    pub(crate) async fn write(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let taken = self.taken.notified();
            tokio::pin!(taken);
            taken.as_mut().enable();
            let count = self.state().push(bytes);
            bytes = &bytes[count..];
            if count > 0 {
                self.written.notify_one();
            } else {
                taken.await;
            }
        }
    }

    /// Nothing more comes.
    pub(crate) fn end(&self) {
        self.state().ended = true;
        self.written.notify_one();
    }

    /// The terminal's size is this from now on.
    pub(crate) fn resize(&self, size: PtySize) {
        self.state().size = Some(size);
        self.written.notify_one();
    }

    /// The process has ended: nobody need wait.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.waiting = VecDeque::new();
        drop(state);
        self.taken.notify_waiters();
    }

    /// Sends what there is to an attachment that has had `from` bytes, until the process needs nothing more.
    pub(crate) async fn feed(&self, to: &StdinHalf, from: u64) -> Result<()> {
        let from = if self.sizes_only { 0 } else { from };
        if !self.state().has(from) {
            return Err(garbage(std::io::ErrorKind::InvalidData.into()));
        }
        let mut sent = Sent { bytes: from, size: None, end: false };
        loop {
            let written = self.written.notified();
            tokio::pin!(written);
            written.as_mut().enable();
            let Some(accepted) = to.accepted() else { return Ok(()) };
            let next = {
                let mut state = self.state();
                let before = state.base;
                state.forget(accepted.min(sent.bytes));
                let next = state.next(&sent, accepted);
                let moved = state.base > before;
                drop(state);
                if moved {
                    self.taken.notify_waiters();
                }
                next
            };
            match next {
                Next::Data(chunk) => {
                    to.write(&chunk).await?;
                    sent.bytes += chunk.len() as u64;
                }
                Next::Size(size) => {
                    to.message(&Input::Resize(size)).await?;
                    sent.size = Some(size);
                }
                Next::End => {
                    to.end().await?;
                    sent.end = true;
                }
                Next::Nothing => {
                    tokio::select! {
                        () = written => {}
                        () = to.accepted_more_than(accepted) => {}
                    }
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes what there is room for; how much that is.
    fn push(&mut self, bytes: &[u8]) -> usize {
        if self.closed || self.ended {
            return bytes.len();
        }
        let room = (DEFAULT_WINDOW as usize).saturating_sub(self.waiting.len());
        let count = room.min(bytes.len());
        self.waiting.extend(&bytes[..count]);
        count
    }

    /// Whether what follows these bytes is still here.
    fn has(&self, offset: u64) -> bool {
        self.closed || (self.base..=self.base + self.waiting.len() as u64).contains(&offset)
    }

    /// Lets go of what the process took.
    fn forget(&mut self, taken: u64) {
        let count = taken.saturating_sub(self.base).min(self.waiting.len() as u64);
        self.waiting.drain(..count as usize);
        self.base += count;
        if self.waiting.is_empty() && self.waiting.capacity() > 64 * 1024 {
            self.waiting = VecDeque::new();
        }
    }

    fn next(&self, sent: &Sent, accepted: u64) -> Next {
        if let Some(size) = self.size.filter(|size| sent.size != Some(*size)) {
            return Next::Size(size);
        }
        let skip = usize::try_from(sent.bytes.saturating_sub(self.base)).unwrap_or(usize::MAX);
        let there = self.waiting.len().saturating_sub(skip);
        let room = accepted.saturating_add(DEFAULT_WINDOW).saturating_sub(sent.bytes);
        let count = there.min(frame::MAX_DATA).min(usize::try_from(room).unwrap_or(usize::MAX));
        if count > 0 {
            return Next::Data(self.waiting.range(skip..skip + count).copied().collect());
        }
        if self.ended && there == 0 && !sent.end { Next::End } else { Next::Nothing }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a guest does with what it is sent: takes some, is cut off, and says what it had.
    #[derive(Debug, Clone)]
    enum Step {
        Write(usize),
        Send,
        Take(u64),
        Cut(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..5000_usize).prop_map(Step::Write),
            Just(Step::Send),
            (0..3000_u64).prop_map(Step::Take),
            (0..4000_u64).prop_map(Step::Cut),
        ];
        proptest::collection::vec(step, 1..80)
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_nothing_is_doubled(steps in steps()) {
            let mut state = State::default();
            let mut sent = Sent { bytes: 0, size: None, end: false };
            let (mut written, mut got) = (Vec::<u8>::new(), Vec::<u8>::new());
            let mut taken = 0_u64;
            let send = |state: &mut State, sent: &mut Sent, got: &mut Vec<u8>, taken: u64| {
                state.forget(taken.min(sent.bytes));
                if let Next::Data(chunk) = state.next(sent, taken) {
                    sent.bytes += chunk.len() as u64;
                    got.extend(chunk);
                    return true;
                }
                false
            };
            for step in steps {
                match step {
                    Step::Write(count) => {
                        let bytes: Vec<u8> =
                            (0..count).map(|n| ((written.len() + n) % 251) as u8).collect();
                        let count = state.push(&bytes);
                        written.extend(&bytes[..count]);
                    }
                    Step::Send => {
                        send(&mut state, &mut sent, &mut got, taken);
                    }
                    Step::Take(count) => taken = (taken + count).min(got.len() as u64),
                    Step::Cut(unsent) => {
                        // What was on its way is gone; what was taken had come.
                        let kept = (got.len() as u64).saturating_sub(unsent).max(taken);
                        got.truncate(kept as usize);
                        prop_assert!(state.has(kept));
                        sent = Sent { bytes: kept, size: None, end: false };
                    }
                }
            }
            while send(&mut state, &mut sent, &mut got, taken) {
                taken = got.len() as u64;
            }
            prop_assert!(got == written);
            state.ended = true;
            prop_assert_eq!(state.next(&sent, taken), Next::End);
        }
    }

    #[test]
    fn a_guest_cannot_ask_for_what_is_gone() {
        let mut state = State::default();
        state.push(b"hello");
        state.forget(3);
        assert!(state.has(3) && state.has(5));
        assert!(!state.has(2) && !state.has(6) && !state.has(u64::MAX));
    }
}
