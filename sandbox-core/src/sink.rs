//! Where a turn's events go.

use std::{
    error::Error as StdError,
    fmt,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::{SandboxEvent, TurnId};

/// The sink of one turn: whatever a call does to a sandbox, it tells the sink that was passed to it.
///
/// A record is durable before a sink sees it. Sinks see a sandbox's events in order, each at least
/// once. If a sink refuses, the call returns [`EventDelivery`](crate::ErrorKind::EventDelivery) with its
/// outcome inside, and the event is offered to the next call on that sandbox, before its own.
///
/// A slow sink holds up the calls on its sandbox and no others.
#[async_trait]
pub trait TurnEventSink: Send + Sync {
    /// The turn these events belong to; stored with each of them.
    fn turn(&self) -> Option<TurnId>;

    /// Takes an event.
    ///
    /// # Errors
    ///
    /// If it could not be taken: it will be offered again.
    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError>;
}

/// Why a sink did not take an event.
#[derive(Debug)]
pub struct SinkError {
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl SinkError {
    /// For this reason.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }

    /// Because of this.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }
}

impl fmt::Display for SinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for SinkError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// No sink, on purpose: the history has everything all the same.
#[derive(Debug, Clone, Copy, Default)]
pub struct Suppressed;

#[async_trait]
impl TurnEventSink for Suppressed {
    fn turn(&self) -> Option<TurnId> {
        None
    }

    async fn emit(&self, _event: &SandboxEvent) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Sends events into a channel.
#[derive(Debug)]
pub struct ChannelSink {
    turn: Option<TurnId>,
    sender: mpsc::Sender<SandboxEvent>,
}

impl ChannelSink {
    /// A sink for this turn, and where its events arrive. The channel holds `capacity` of them (at
    /// least 1); calls wait while it is full, and fail with `EventDelivery` once the receiver is gone.
    #[must_use]
    pub fn new(turn: TurnId, capacity: usize) -> (Self, mpsc::Receiver<SandboxEvent>) {
        let (sender, receiver) = mpsc::channel(capacity.max(1));
        (Self { turn: Some(turn), sender }, receiver)
    }
}

#[async_trait]
impl TurnEventSink for ChannelSink {
    fn turn(&self) -> Option<TurnId> {
        self.turn.clone()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        let gone = |_| SinkError::new("the receiver of this turn's events is gone");
        self.sender.send(event.clone()).await.map_err(gone)
    }
}

/// Keeps events, for tests and small programs. It grows without bound.
#[derive(Debug, Default)]
pub struct CollectSink {
    turn: Option<TurnId>,
    events: Mutex<Vec<SandboxEvent>>,
}

impl CollectSink {
    /// A sink for this turn.
    #[must_use]
    pub fn new(turn: TurnId) -> Self {
        Self { turn: Some(turn), events: Mutex::default() }
    }

    /// What has arrived.
    #[must_use]
    pub fn events(&self) -> Vec<SandboxEvent> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The kinds of what has arrived.
    #[must_use]
    pub fn kinds(&self) -> Vec<String> {
        self.events().iter().map(SandboxEvent::name).collect()
    }
}

#[async_trait]
impl TurnEventSink for CollectSink {
    fn turn(&self) -> Option<TurnId> {
        self.turn.clone()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
        Ok(())
    }
}

/// Hands events to whoever subscribes to `tracing`, at level INFO.
#[derive(Debug, Default)]
pub struct TracingSink {
    turn: Option<TurnId>,
}

impl TracingSink {
    /// A sink for this turn.
    #[must_use]
    pub fn new(turn: TurnId) -> Self {
        Self { turn: Some(turn) }
    }
}

#[async_trait]
impl TurnEventSink for TracingSink {
    fn turn(&self) -> Option<TurnId> {
        self.turn.clone()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        tracing::info!(
            target: "sandbox",
            sandbox = %event.sandbox_id,
            seq = event.seq,
            turn = event.turn.as_ref().map(TurnId::as_str),
            kind = event.name(),
        );
        Ok(())
    }
}

/// Hands events to two sinks, the first one's turn being the turn. An event that either refuses is
/// refused, and offered to both again.
#[derive(Debug)]
pub struct Tee<A, B> {
    first: A,
    second: B,
}

impl<A: TurnEventSink, B: TurnEventSink> Tee<A, B> {
    /// Both of these.
    pub fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

#[async_trait]
impl<A: TurnEventSink, B: TurnEventSink> TurnEventSink for Tee<A, B> {
    fn turn(&self) -> Option<TurnId> {
        self.first.turn()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        self.first.emit(event).await?;
        self.second.emit(event).await
    }
}

#[async_trait]
impl<S: TurnEventSink + ?Sized> TurnEventSink for std::sync::Arc<S> {
    fn turn(&self) -> Option<TurnId> {
        (**self).turn()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        (**self).emit(event).await
    }
}

#[async_trait]
impl<S: TurnEventSink + ?Sized> TurnEventSink for &S {
    fn turn(&self) -> Option<TurnId> {
        (**self).turn()
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        (**self).emit(event).await
    }
}
