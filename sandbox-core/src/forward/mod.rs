//! A port of a sandbox, on this host's loopback.

mod carry;

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use sandbox_guest::{Request, Response, mux::Stream};
use serde::{Deserialize, Serialize};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::{JoinHandle, JoinSet},
};

use crate::{
    Error, ErrorKind, Known, Result, Sandbox, TurnEventSink,
    guest::{Link, answered, response, unexpected},
    manager::{Inner, Repeats, SandboxManager, Shared},
};
use carry::Local;

const OPERATION: &str = "forward";

/// How many connections one forward carries at once; more wait to be accepted. A sandbox's guest takes twice
/// as many over all of its forwards, and refuses more.
const MOST: usize = 256;

/// How long to wait after a connection could not be accepted: for want of descriptors, most likely.
const PAUSE: Duration = Duration::from_millis(100);

/// A port of a sandbox that is open on this host's loopback, for as long as this lives. Dropping it closes
/// the port and all connections. Made by [`Sandbox::forward`].
#[derive(Debug)]
pub struct Forward {
    local: SocketAddr,
    port: u16,
    state: Arc<State>,
    told: watch::Receiver<Told>,
    serving: JoinHandle<()>,
    /// Closes all when it is dropped.
    open: oneshot::Sender<Infallible>,
}

/// What a [`Forward`] has carried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ForwardStats {
    /// Connections that are open.
    pub open: usize,
    /// Connections that were made, open ones too.
    pub carried: u64,
    /// Connections that could not be made: nothing listened in the sandbox, or it could not be reached.
    pub refused: u64,
}

#[derive(Debug, Default)]
struct State {
    open: AtomicUsize,
    carried: AtomicU64,
}

/// What went wrong so far.
#[derive(Debug, Clone, Default)]
struct Told {
    refused: u64,
    why: Option<Error>,
    /// Why there will be no more.
    over: Option<Error>,
}

impl Sandbox {
    /// Opens a TCP port of the sandbox on this host's loopback: whoever connects to `local` is connected to
    /// that port of the sandbox's own loopback (`127.0.0.1`, else `::1`), and to nothing else. With port 0,
    /// `local` becomes one that is free: `([127, 0, 0, 1], 0)`.
    ///
    /// That needs no network in the sandbox. In a sandbox that has its host's network the loopback is that
    /// host's: its services are reached then, on whatever host that is. On this host every user can connect.
    ///
    /// Each side's end of what it says reaches the other, and a side that does not read holds the other
    /// up. A connection that could not be carried to its end is reset, never ended as if that was all; one
    /// to a port on which nothing listens is reset at once. 256 connections are carried at once, more wait.
    /// The forward outlives cut connections, snapshots, rewinds and stops: those that are open may end,
    /// later ones reach what then listens. It ends when the sandbox does.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` for port 0 of the sandbox, or an address that is not of the loopback; `Conflict` if that
    /// is in use, or the sandbox is stopped or paused; `PermissionDenied` if it may not be used; `Lost` if the
    /// sandbox is gone.
    pub async fn forward(
        &self,
        local: impl Into<SocketAddr> + Send,
        port: u16,
        sink: &dyn TurnEventSink,
    ) -> Result<Forward> {
        let local = local.into();
        self.open_forward(local, port, sink).await.map_err(|error| error.with_sandbox(self.id()))
    }

    async fn open_forward(
        &self,
        local: SocketAddr,
        port: u16,
        sink: &dyn TurnEventSink,
    ) -> Result<Forward> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidSpec, OPERATION, message);
        if port == 0 {
            return Err(invalid("nothing listens on port 0; name one from 1 to 65535".into()));
        }
        if !local.ip().is_loopback() {
            let message = format!(
                "{local} is not of this host's loopback; a port for others is for the harness to open"
            );
            return Err(invalid(message));
        }
        // Whether there is somebody to forward to.
        self.link().await?;
        let listener = TcpListener::bind(local).await.map_err(|error| not_bound(local, error))?;
        let local = listener.local_addr().map_err(|error| not_bound(local, error))?;
        let mut call = self.call(sink).await?;
        call.record(Known::PortForwarded { port, local }).await?;
        let (inner, shared) = self.parts();
        let seen = shared.record(&inner).await?.seq;
        let state = Arc::new(State::default());
        let (tell, told) = watch::channel(Told::default());
        let way = Arc::new(Way { inner, shared, port, state: Arc::clone(&state), tell });
        let (open, closed) = oneshot::channel();
        let serving = tokio::spawn(way.serve(listener, seen, closed));
        call.finish(Ok(Forward { local, port, state, told, serving, open }))
    }
}

fn not_bound(local: SocketAddr, error: io::Error) -> Error {
    let (kind, why) = match error.kind() {
        io::ErrorKind::AddrInUse => (ErrorKind::Conflict, "it is in use"),
        io::ErrorKind::PermissionDenied => (ErrorKind::PermissionDenied, "it may not be used"),
        io::ErrorKind::AddrNotAvailable => {
            (ErrorKind::Unavailable, "this host has no such address")
        }
        _ => (ErrorKind::Unavailable, "it cannot be listened on"),
    };
    let message = format!("no listener on {local}: {why}");
    Error::new(kind, OPERATION, message).retryable(false).with_source(error)
}

impl Forward {
    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The sandbox's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it has carried so far.
    #[must_use]
    pub fn stats(&self) -> ForwardStats {
        ForwardStats {
            open: self.state.open.load(Relaxed),
            carried: self.state.carried.load(Relaxed),
            refused: self.told.borrow().refused,
        }
    }

    /// The next time that a connection could not be made: why. Of several since the last call, the last.
    /// `None` when the forward has ended. Safe to cancel.
    pub async fn refused(&mut self) -> Option<Error> {
        self.told.changed().await.ok()?;
        let told = self.told.borrow_and_update();
        told.why.clone().filter(|_| told.over.is_none())
    }

    /// Closes the port and all connections, as dropping it does, and returns when they are closed.
    pub async fn close(self) {
        let Self { serving, open, .. } = self;
        drop(open);
        let _ = serving.await;
    }

    /// Waits until the forward has ended because the sandbox has: why. Safe to cancel.
    pub async fn ended(&self) -> Error {
        let mut told = self.told.clone();
        let over = told.wait_for(|told| told.over.is_some()).await;
        let over = over.ok().and_then(|told| told.over.clone());
        over.unwrap_or_else(|| {
            Error::new(ErrorKind::Cancelled, OPERATION, "nobody serves it any more")
        })
    }
}

/// From a listener to a sandbox's port.
#[derive(Debug)]
struct Way {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    port: u16,
    state: Arc<State>,
    tell: watch::Sender<Told>,
}

impl Way {
    /// Accepts connections until the sandbox has come to its end. What is open ends with this.
    async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        seen: u64,
        mut closed: oneshot::Receiver<Infallible>,
    ) {
        let mut open = JoinSet::new();
        let over = self.over(seen);
        tokio::pin!(over);
        let over = loop {
            tokio::select! {
                accepted = listener.accept(), if open.len() < MOST => match accepted {
                    Ok((socket, _)) => {
                        open.spawn(Arc::clone(&self).connection(socket));
                    }
                    Err(_) => tokio::time::sleep(PAUSE).await,
                },
                Some(_) = open.join_next() => {}
                why = &mut over => break Some(why),
                _ = &mut closed => break None,
            }
        };
        drop(listener);
        open.shutdown().await;
        if over.is_some() {
            self.tell.send_modify(|told| told.over = over);
        }
    }

    /// Waits for the end of the sandbox.
    async fn over(&self, seen: u64) -> Error {
        let manager = SandboxManager::of(Arc::clone(&self.inner));
        let mut history = manager.watch(&self.shared.id, seen);
        let error = loop {
            let why = match history.next().await {
                Ok(event) => match event.known() {
                    Some(Known::Destroyed) => "the sandbox was destroyed",
                    Some(Known::Detached) => "the sandbox's place was left",
                    Some(Known::Expired { .. }) => "the sandbox's time was over",
                    _ => continue,
                },
                Err(error) => break error,
            };
            break Error::new(ErrorKind::Lost, OPERATION, why);
        };
        error.with_sandbox(&self.shared.id)
    }

    async fn connection(self: Arc<Self>, socket: TcpStream) {
        let local = Local::new(socket);
        match self.open().await {
            Ok((link, stream)) => {
                self.state.carried.fetch_add(1, Relaxed);
                let _open = Open::new(&self.state);
                if let Err(error) = carry::carry(local, stream).await {
                    tracing::debug!(%error, sandbox = %self.shared.id, "a connection was broken off");
                }
                drop(link);
            }
            Err(error) => self.tell.send_modify(|told| {
                told.refused += 1;
                told.why = Some(error);
            }),
        }
    }

    fn about(&self, error: &Error) -> Error {
        Error::new(error.kind(), OPERATION, error.message())
            .retryable(error.is_retryable())
            .with_sandbox(&self.shared.id)
    }

    /// A stream that is connected to the sandbox's port, and the connection that it must not outlive.
    async fn open(&self) -> Result<(Arc<Link>, Stream)> {
        let mut repeats = Repeats::new();
        loop {
            let opened = async {
                let link = self.shared.link(&self.inner).await?;
                let stream = begin(&link, self.port).await?;
                Ok((link, stream))
            };
            let opened: Result<(Arc<Link>, Stream)> = opened.await;
            match opened {
                Err(error) if repeats.again(&error).await => {}
                opened => return opened.map_err(|error| self.about(&error)),
            }
        }
    }
}

async fn begin(link: &Link, port: u16) -> Result<Stream> {
    let mut stream = link.open(Request::Connect { port }).await?;
    match answered(response(&mut stream)).await? {
        Response::Connected => Ok(stream),
        other => Err(unexpected(&other)),
    }
}

/// Counts an open connection.
struct Open<'a>(&'a State);

impl<'a> Open<'a> {
    fn new(state: &'a State) -> Self {
        state.open.fetch_add(1, Relaxed);
        Self(state)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}
