//! One call of the harness: what it does is recorded first, and told to the sink of its turn.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, Ordering},
};

use super::{Inner, shared::Shared};
use crate::{
    Consumer, Draft, Error, ErrorKind, Known, Result, SandboxEvent, SinkError, TurnEventSink,
    TurnId,
};

/// A call on one sandbox, with its turn's sink.
pub(crate) struct Call<'a> {
    sink: &'a dyn TurnEventSink,
    recorder: Recorder,
    alive: Arc<()>,
    refused: Option<SinkError>,
}

/// Records in the name of a call; it may outlive the call.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pub(crate) inner: Arc<Inner>,
    pub(crate) shared: Arc<Shared>,
    turn: Option<TurnId>,
    consumer: Consumer,
    sink: usize,
    call: Weak<()>,
    abandoned: Arc<AtomicBool>,
}

impl Recorder {
    /// Records what no call has caused.
    pub(crate) fn of_nobody(inner: &Arc<Inner>, shared: &Arc<Shared>, consumer: Consumer) -> Self {
        Self {
            inner: Arc::clone(inner),
            shared: Arc::clone(shared),
            turn: None,
            consumer,
            sink: 0,
            call: Weak::new(),
            abandoned: Arc::default(),
        }
    }

    /// Records.
    pub(crate) async fn record(&self, kind: Known) -> Result<Arc<SandboxEvent>> {
        let draft = Draft {
            sandbox: self.shared.id.clone(),
            turn: self.turn.clone(),
            consumer: self.consumer.clone(),
            kind: kind.into(),
        };
        self.shared.append(&self.inner, draft, self.sink, &self.call).await
    }

    /// Records that something that was asked for could not be done.
    pub(crate) async fn failed(&self, operation: &str, why: &impl ToString) -> Result<()> {
        let (operation, error) = (operation.to_owned(), why.to_string());
        self.record(Known::Failed { operation, error }).await.map(drop)
    }

    /// Whether nobody waits for the result any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
    }
}

impl<'a> Call<'a> {
    pub(crate) fn new(
        inner: &Arc<Inner>,
        shared: &Arc<Shared>,
        consumer: Consumer,
        sink: &'a dyn TurnEventSink,
    ) -> Self {
        let alive = Arc::new(());
        let recorder = Recorder {
            inner: Arc::clone(inner),
            shared: Arc::clone(shared),
            turn: sink.turn(),
            consumer,
            sink: std::ptr::from_ref(sink).cast::<()>() as usize,
            call: Arc::downgrade(&alive),
            abandoned: Arc::default(),
        };
        Self { sink, recorder, alive, refused: None }
    }

    pub(crate) fn recorder(&self) -> Recorder {
        self.recorder.clone()
    }

    /// Records, and tells the sink.
    pub(crate) async fn record(&mut self, kind: Known) -> Result<()> {
        self.recorder.record(kind).await?;
        self.deliver().await;
        Ok(())
    }

    /// Tells the sink what it has not taken yet, until it refuses.
    pub(crate) async fn deliver(&mut self) {
        if self.refused.is_some() {
            return;
        }
        let shared = Arc::clone(&self.recorder.shared);
        let _order = shared.delivering.lock().await;
        while let Some(pending) = shared.next_for(self.recorder.sink) {
            match self.sink.emit(&pending.event).await {
                Ok(()) => shared.delivered(pending.event.seq),
                Err(error) => {
                    self.refused = Some(error);
                    break;
                }
            }
        }
    }

    /// Carries a change of the sandbox's life out in a task of its own, so that it is finished or
    /// undone even if the caller goes away, and tells the sink what happens while it happens.
    pub(crate) async fn drive<T, F>(mut self, work: impl FnOnce(Recorder) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.deliver().await;
        let shared = Arc::clone(&self.recorder.shared);
        let _abandon = AbandonOnDrop(Arc::clone(&self.recorder.abandoned));
        let mut task = tokio::spawn(work(self.recorder.clone()));
        let result = loop {
            let arrived = shared.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            self.deliver().await;
            tokio::select! {
                result = &mut task => break result,
                () = arrived => {}
            }
        };
        self.deliver().await;
        let result = result.unwrap_or_else(|error| {
            let message = "the work on it was broken off; reconcile will settle it";
            Err(Error::new(ErrorKind::Cancelled, "drive", message).with_source(error))
        });
        self.finish(result)
    }

    /// The call's result: with the outcome inside an error, if the sink refused.
    pub(crate) fn finish<T>(self, result: Result<T>) -> Result<T>
    where
        T: Send + 'static,
    {
        drop(self.alive);
        let shared = &self.recorder.shared;
        let outcome = result.map_err(|error| error.with_sandbox(&shared.id))?;
        match self.refused {
            None => Ok(outcome),
            Some(error) => {
                let message = "the call was carried out, but its turn's sink refused an event, which \
                               will be offered to the next call on this sandbox";
                Err(Error::new(ErrorKind::EventDelivery, "emit", message)
                    .with_sandbox(&shared.id)
                    .with_source(error)
                    .with_outcome(outcome))
            }
        }
    }
}

struct AbandonOnDrop(Arc<AtomicBool>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
