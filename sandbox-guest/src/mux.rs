//! Many streams over one: a task that drives yamux, and handles to open and accept streams.
//!
//! The connection lives as long as a [`Mux`] (or the [`Incoming`] of the guest's side) does; when the
//! last is dropped the task closes it. A stream that is dropped before both sides have finished is reset,
//! which the other side sees as an error.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use futures::future::poll_fn;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{mpsc, oneshot},
};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// How many streams one connection may have at once.
pub const MAX_STREAMS: usize = 1024;

/// One stream of a connection.
#[derive(Debug)]
pub struct Stream(Compat<yamux::Stream>);

/// Opens streams; cheap to clone.
#[derive(Debug, Clone)]
pub struct Mux {
    open: mpsc::Sender<oneshot::Sender<io::Result<Stream>>>,
}

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
}

impl Mux {
    /// Opens a stream.
    ///
    /// # Errors
    ///
    /// `NotConnected` if the connection has ended.
    pub async fn open(&self) -> io::Result<Stream> {
        let (reply, answer) = oneshot::channel();
        self.open.send(reply).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.open.is_closed()
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
    let (open, requests) = mpsc::channel(64);
    let connection = yamux::Connection::new(socket.compat(), config(), yamux::Mode::Client);
    tokio::spawn(drive(connection, Some(requests), None, Arc::default()));
    Mux { open }
}

/// The guest's side, likewise.
pub fn server<S>(socket: S) -> Incoming
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // Not bounded here because yamux bounds how many streams there are.
    let (sender, streams) = mpsc::unbounded_channel();
    let alive = Arc::new(AtomicBool::new(true));
    let connection = yamux::Connection::new(socket.compat(), config(), yamux::Mode::Server);
    tokio::spawn(drive(connection, None, Some(sender), Arc::clone(&alive)));
    Incoming { streams, alive: Alive(alive) }
}

fn config() -> yamux::Config {
    let mut config = yamux::Config::default();
    config.set_max_num_streams(MAX_STREAMS);
    // Every stream may always have its 256 KiB; this bounds what fast links may grow to beyond that.
    config.set_max_connection_receive_window(Some(MAX_STREAMS * 256 * 1024 + 64 * 1024 * 1024));
    config.set_split_send_size(64 * 1024);
    config
}

type Connection<S> = yamux::Connection<Compat<S>>;

async fn drive<S>(
    mut connection: Connection<S>,
    mut requests: Option<mpsc::Receiver<oneshot::Sender<io::Result<Stream>>>>,
    incoming: Option<mpsc::UnboundedSender<Stream>>,
    alive: Arc<AtomicBool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut waiting: Option<oneshot::Sender<io::Result<Stream>>> = None;
    poll_fn(|cx| {
        loop {
            if let Some(reply) = waiting.take() {
                match connection.poll_new_outbound(cx) {
                    Poll::Ready(Ok(stream)) => {
                        let _ = reply.send(Ok(Stream(stream.compat())));
                        continue;
                    }
                    Poll::Ready(Err(error)) => {
                        let _ = reply.send(Err(io::Error::other(error)));
                        return Poll::Ready(());
                    }
                    Poll::Pending => waiting = Some(reply),
                }
            } else if let Some(requests) = &mut requests {
                match requests.poll_recv(cx) {
                    Poll::Ready(Some(reply)) => {
                        waiting = Some(reply);
                        continue;
                    }
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => {}
                }
            }
            match connection.poll_next_inbound(cx) {
                Poll::Ready(Some(Ok(stream))) => {
                    // A client takes no streams: a guest that opens one gets it reset.
                    if let Some(incoming) = &incoming
                        && incoming.send(Stream(stream.compat())).is_err()
                    {
                        return Poll::Ready(());
                    }
                }
                Poll::Ready(Some(Err(_)) | None) => {
                    alive.store(false, Ordering::Release);
                    return Poll::Ready(());
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
    let close = poll_fn(|cx| connection.poll_close(cx));
    let _ = tokio::time::timeout(std::time::Duration::from_secs(1), close).await;
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
