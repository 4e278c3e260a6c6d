//! Many streams over one: a task that drives yamux, and handles to open and accept streams.
//!
//! The connection lives as long as a [`Mux`] (or the [`Incoming`] of the guest's side) does; when the
//! last is dropped the task closes it. A stream that is dropped before both sides have finished is reset,
//! which the other side sees as an error.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use futures::future::poll_fn;
use tokio::{
    io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf},
    sync::{mpsc, oneshot},
};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// How many streams one connection may have at once.
pub const MAX_STREAMS: usize = 1024;

/// One stream of a connection.
#[derive(Debug)]
pub struct Stream(Compat<yamux::Stream>);

/// Opens streams; cheap to clone.
#[derive(Clone)]
pub struct Mux {
    connection: Shared<Box<dyn Io>>,
    alive: Alive,
    driver: Arc<Driver>,
    /// Ends the connection when the last clone is dropped.
    _open: Arc<oneshot::Sender<Infallible>>,
}

impl std::fmt::Debug for Mux {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mux").field("alive", &self.alive).finish_non_exhaustive()
    }
}

/// What wakes the task that drives a connection.
#[derive(Debug, Default)]
struct Driver(Mutex<Option<Waker>>);

impl Driver {
    fn get(&self) -> Option<Waker> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, waker: &Waker) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(waker.clone());
    }
}

/// A byte stream, whichever it is.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The streams that the other side opens.
#[derive(Debug)]
pub struct Incoming {
    streams: mpsc::UnboundedReceiver<Stream>,
    alive: Alive,
}

/// Whether a connection still stands. Where a stream ends while its connection stands, it was the other
/// side that let go of it; on a current-thread runtime the two cannot be mistaken.
#[derive(Debug, Clone)]
pub struct Alive(Arc<AtomicBool>);

impl Alive {
    /// Whether it stands.
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Mux {
    /// Opens a stream.
    ///
    /// # Errors
    ///
    /// `NotConnected` if the connection has ended.
    pub async fn open(&self) -> io::Result<Stream> {
        // Without asking the task that drives the connection: that would cost two switches of threads.
        let open = poll_fn(|cx| locked(&self.connection).poll_new_outbound(cx));
        match open.await {
            Ok(stream) if self.alive.get() => {
                // The connection listens to its streams only once it has looked at them.
                self.kick();
                Ok(Stream(stream.compat()))
            }
            _ => Err(ended()),
        }
    }

    /// Sends what streams have been given to send, from this thread: to leave it to the task that drives
    /// the connection costs a switch of threads.
    pub fn kick(&self) {
        // In that task's name, so that it is still the one that is told of what comes.
        let Some(waker) = self.driver.get() else { return };
        let mut cx = Context::from_waker(&waker);
        if let Poll::Ready(next) = locked(&self.connection).poll_next_inbound(&mut cx) {
            if !matches!(next, Some(Ok(_))) {
                self.alive.end();
            }
            waker.wake();
        }
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        // Streams end while the connection is looked at, and their readers hear of it before that is over.
        let _looked_at = locked(&self.connection);
        !self.alive.get()
    }
}

impl Incoming {
    /// The next stream; `None` when the connection has ended.
    pub async fn accept(&mut self) -> Option<Stream> {
        self.streams.recv().await
    }

    /// Tells later whether this connection still stands.
    #[must_use]
    pub fn alive(&self) -> Alive {
        self.alive.clone()
    }
}

/// The harness's side of a connection, whose preambles have been exchanged. Spawns a task on the current
/// runtime.
pub fn client<S>(socket: S) -> Mux
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let socket: Box<dyn Io> = Box::new(socket);
    let connection = yamux::Connection::new(buffered(socket), config(), yamux::Mode::Client);
    let connection = Arc::new(Mutex::new(connection));
    let alive = Alive(Arc::new(AtomicBool::new(true)));
    let (open, all_dropped) = oneshot::channel();
    let driver = Arc::new(Driver::default());
    let side = Side::Client { driver: Arc::clone(&driver), all_dropped };
    tokio::spawn(drive(Arc::clone(&connection), side, alive.clone()));
    Mux { connection, alive, driver, _open: Arc::new(open) }
}

/// The guest's side, likewise.
pub fn server<S>(socket: S) -> Incoming
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // Not bounded here because yamux bounds how many streams there are.
    let (sender, streams) = mpsc::unbounded_channel();
    let alive = Alive(Arc::new(AtomicBool::new(true)));
    let connection = yamux::Connection::new(buffered(socket), config(), yamux::Mode::Server);
    let connection = Arc::new(Mutex::new(connection));
    tokio::spawn(drive(connection, Side::Server { incoming: sender }, alive.clone()));
    Incoming { streams, alive }
}

fn config() -> yamux::Config {
    let mut config = yamux::Config::default();
    config.set_max_num_streams(MAX_STREAMS);
    // Every stream may always have its 256 KiB; this bounds what fast links may grow to beyond that.
    config.set_max_connection_receive_window(Some(MAX_STREAMS * 256 * 1024 + 64 * 1024 * 1024));
    config.set_split_send_size(64 * 1024);
    config
}

type Connection<S> = yamux::Connection<Compat<BufWriter<S>>>;

/// A frame's header and its small body leave in one write; a large body goes past the buffer.
fn buffered<S: AsyncRead + AsyncWrite>(socket: S) -> Compat<BufWriter<S>> {
    BufWriter::with_capacity(4096, socket).compat()
}

type Shared<S> = Arc<Mutex<Connection<S>>>;

enum Side {
    Client { driver: Arc<Driver>, all_dropped: oneshot::Receiver<Infallible> },
    Server { incoming: mpsc::UnboundedSender<Stream> },
}

async fn drive<S>(connection: Shared<S>, mut side: Side, alive: Alive)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    poll_fn(|cx| {
        if let Side::Client { driver, all_dropped } = &mut side {
            driver.set(cx.waker());
            if Pin::new(all_dropped).poll(cx).is_ready() {
                return Poll::Ready(());
            }
        }
        loop {
            match locked(&connection).poll_next_inbound(cx) {
                Poll::Ready(Some(Ok(stream))) => {
                    // A client takes no streams: a guest that opens one gets it reset.
                    if let Side::Server { incoming } = &side
                        && incoming.send(Stream(stream.compat())).is_err()
                    {
                        return Poll::Ready(());
                    }
                }
                Poll::Ready(Some(Err(_)) | None) => {
                    // As long as the connection is held: nobody who asks sees its streams' end without it.
                    alive.end();
                    return Poll::Ready(());
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
    // In the same step in which the connection's streams end, so that nobody sees one without the other.
    alive.end();
    // Dropped, and not closed: only that tells the streams' readers. What streams were given to send was
    // sent by the last look at the connection, as far as the other side takes it.
    poll_fn(|cx| {
        let _ = locked(&connection).poll_next_inbound(cx);
        Poll::Ready(())
    })
    .await;
}

fn locked<S>(connection: &Mutex<Connection<S>>) -> MutexGuard<'_, Connection<S>> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the connection to the guest has ended")
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn streams_are_independent() {
        let (a, b) = tokio::io::duplex(1024);
        let mux = client(a);
        let mut incoming = server(b);
        tokio::spawn(async move {
            while let Some(mut stream) = incoming.accept().await {
                tokio::spawn(async move {
                    let (mut reader, mut writer) = tokio::io::split(&mut stream);
                    let _ = tokio::io::copy(&mut reader, &mut writer).await;
                    let _ = writer.shutdown().await;
                });
            }
        });
        // One stream that nobody reads does not hold up another.
        let mut stuck = mux.open().await.unwrap();
        stuck.write_all(b"never read back").await.unwrap();
        stuck.flush().await.unwrap();
        let mut stream = mux.open().await.unwrap();
        stream.write_all(b"there and back").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut back = String::new();
        stream.read_to_string(&mut back).await.unwrap();
        assert_eq!(back, "there and back");
    }

    #[tokio::test]
    async fn a_dropped_stream_is_told_from_a_cut_connection() {
        let (a, b) = tokio::io::duplex(1024);
        let mux = client(a);
        let mut incoming = server(b);
        let mut first = mux.open().await.unwrap();
        first.write_all(b"x").await.unwrap();
        first.flush().await.unwrap();
        let mut here = incoming.accept().await.unwrap();
        let alive = incoming.alive();
        drop(first);
        let mut rest = Vec::new();
        let _ = here.read_to_end(&mut rest).await;
        assert!(alive.get());

        let mut second = mux.open().await.unwrap();
        second.write_all(b"x").await.unwrap();
        second.flush().await.unwrap();
        let mut here = incoming.accept().await.unwrap();
        drop(mux);
        let _ = here.read_to_end(&mut rest).await;
        assert!(!alive.get());
    }
}
