//! Connections that are cut: in the middle of whatever goes over them.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use async_trait::async_trait;
use sandbox_core::{Error, ErrorKind, GuestStream, Instance, Result, SandboxBackend};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::decorate::Decoration;

/// How much is read at once.
const PIECE: usize = 64 * 1024;

/// Cuts connections to guests: each after so many bytes, or all of them at once.
#[derive(Debug, Default)]
pub struct Cutting {
    plan: Mutex<Plan>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct Plan {
    /// How much the next connections carry, one after the other, both directions together.
    next: VecDeque<u64>,
    /// How much those after them carry.
    each: Option<u64>,
    /// No connection is made at all.
    severed: bool,
}

#[derive(Debug, Default)]
struct State {
    now: Mutex<Now>,
    cuts: AtomicUsize,
}

#[derive(Debug, Default)]
struct Now {
    /// Connections that are older than this are cut.
    generation: u64,
    /// What waits for such a connection.
    wakers: Vec<Waker>,
}

impl Cutting {
    /// The next connections carry so much each, in bytes; those after them are whole.
    pub fn next(&self, bytes: impl IntoIterator<Item = u64>) {
        let mut plan = self.plan();
        plan.next = bytes.into_iter().collect();
        plan.each = None;
    }

    /// Each connection from now on carries so much.
    pub fn each(&self, bytes: u64) {
        let mut plan = self.plan();
        plan.next.clear();
        plan.each = Some(bytes);
    }

    /// Cuts all connections that there are.
    pub fn cut(&self) {
        let mut now = self.state.now();
        now.generation += 1;
        for waker in now.wakers.drain(..) {
            waker.wake();
        }
    }

    /// Cuts all connections, and lets none be made any more.
    pub fn sever(&self) {
        self.plan().severed = true;
        self.cut();
    }

    /// Cuts no more.
    pub fn heal(&self) {
        *self.plan() = Plan::default();
    }

    /// How many connections have been cut.
    pub fn cuts(&self) -> usize {
        self.state.cuts.load(Ordering::Acquire)
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Decoration for Cutting {
    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<GuestStream> {
        let left = {
            let mut plan = self.plan();
            if plan.severed {
                let message = "the connection is severed";
                return Err(Error::new(ErrorKind::Unavailable, "connect", message));
            }
            plan.next.pop_front().or(plan.each).unwrap_or(u64::MAX)
        };
        let stream = inner.connect(instance).await?;
        let generation = self.state.now().generation;
        Ok(Box::new(Cut { stream: Some(stream), left, generation, state: Arc::clone(&self.state) }))
    }
}

impl State {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection until it is cut; then the guest sees its end as well.
struct Cut {
    stream: Option<GuestStream>,
    left: u64,
    generation: u64,
    state: Arc<State>,
}

impl Cut {
    /// The connection, if it stands.
    fn stream(&mut self, cx: &Context<'_>) -> io::Result<&mut GuestStream> {
        let stands = {
            let mut now = self.state.now();
            let stands = self.left > 0 && now.generation == self.generation;
            if stands && !now.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                now.wakers.push(cx.waker().clone());
            }
            stands
        };
        if !stands && self.stream.take().is_some() {
            self.state.cuts.fetch_add(1, Ordering::AcqRel);
        }
        self.stream.as_mut().ok_or_else(|| io::ErrorKind::ConnectionReset.into())
    }
}

impl AsyncRead for Cut {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.remaining());
        let mut bytes = vec![0; most.min(PIECE)];
        let mut part = ReadBuf::new(&mut bytes);
        let stream = self.stream(cx)?;
        std::task::ready!(Pin::new(stream).poll_read(cx, &mut part))?;
        buffer.put_slice(part.filled());
        self.left -= part.filled().len() as u64;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Cut {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let stream = self.stream(cx)?;
        let count = std::task::ready!(Pin::new(stream).poll_write(cx, &bytes[..most]))?;
        self.left -= count as u64;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream(cx)?).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.stream(cx) {
            Ok(stream) => Pin::new(stream).poll_shutdown(cx),
            Err(_) => Poll::Ready(Ok(())),
        }
    }
}
