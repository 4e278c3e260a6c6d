//! What one process knows of one sandbox: its record so far, its connection, its undelivered events.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use sandbox_guest::{Request, Response};
use tokio::{sync::Notify, time::Instant};

use super::{Inner, Recorder, egress, ends, life, lifetime};
use crate::{
    BackendId, Draft, Error, ErrorKind, Instance, Known, ProcessId, Result, SandboxBackend,
    SandboxEvent, SandboxId, SandboxSpec, SandboxState,
    guest::{Link, RECONNECT},
    record::Record,
};

/// The pause before the last of the greetings that are tried, each after twice the pause before.
const LAST_GREETING: Duration = Duration::from_millis(64);

/// How many detached processes of a sandbox a manager waits for at once. Of more it hears when it is asked
/// for them.
const MOST_WATCHED: usize = 256;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: SandboxId,
    record: Mutex<Option<Arc<Record>>>,
    link: tokio::sync::Mutex<Option<Arc<Link>>>,
    /// Held from a record's way into the journal to its place in the queue, so that the queue is in
    /// order.
    appending: tokio::sync::Mutex<()>,
    pending: Mutex<VecDeque<Pending>>,
    /// Held by whoever hands events to a sink, so that a sink gets them in order.
    pub(super) delivering: tokio::sync::Mutex<()>,
    pub(super) arrived: Notify,
    /// The detached processes whose ends are waited for.
    watched: Mutex<HashSet<ProcessId>>,
    /// Held by whoever looks whether a destination is in the history, and records it.
    pub(super) telling_egress: tokio::sync::Mutex<()>,
}

/// An event that its sink has not taken yet.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    pub(super) event: Arc<SandboxEvent>,
    /// Which sink it is for, by its address.
    pub(super) sink: usize,
    /// The call that caused it; when that has ended, any sink will do.
    pub(super) call: Weak<()>,
}

impl Shared {
    pub(super) fn new(id: SandboxId) -> Self {
        Self {
            id,
            record: Mutex::default(),
            link: tokio::sync::Mutex::default(),
            appending: tokio::sync::Mutex::default(),
            pending: Mutex::default(),
            delivering: tokio::sync::Mutex::default(),
            arrived: Notify::new(),
            watched: Mutex::default(),
            telling_egress: tokio::sync::Mutex::default(),
        }
    }

    /// The record as the journal has it now.
    pub(crate) async fn record(&self, inner: &Inner) -> Result<Arc<Record>> {
        self.try_record(inner).await?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "open", "there is no such sandbox in this journal")
                .with_sandbox(&self.id)
        })
    }

    pub(super) async fn try_record(&self, inner: &Inner) -> Result<Option<Arc<Record>>> {
        let known = self.cached().as_ref().map_or(0, |record| record.seq);
        let new = inner.journal.read(&self.id, known).await;
        let new = new.map_err(|error| error.with_sandbox(&self.id))?;
        let mut cached = self.cached();
        match &mut *cached {
            None => *cached = Record::fold(&new).map(Arc::new),
            Some(record) => {
                let seq = record.seq;
                let new: Vec<_> = new.into_iter().filter(|event| event.seq > seq).collect();
                if !new.is_empty() {
                    Arc::make_mut(record).apply_all(&new);
                }
            }
        }
        Ok(cached.clone())
    }

    /// Puts a record into the journal and into the queue for its sink.
    pub(super) async fn append(
        &self,
        inner: &Inner,
        draft: Draft,
        sink: usize,
        call: &Weak<()>,
    ) -> Result<Arc<SandboxEvent>> {
        let _order = self.appending.lock().await;
        let event = inner.journal.append(draft).await;
        let event = Arc::new(event.map_err(|error| error.with_sandbox(&self.id))?);
        if let Some(record) = &mut *self.cached()
            && record.seq + 1 == event.seq
        {
            Arc::make_mut(record).apply_all(std::slice::from_ref(&*event));
        }
        let pending = Pending { event: Arc::clone(&event), sink, call: call.clone() };
        self.pending().push_back(pending);
        self.arrived.notify_waiters();
        Ok(event)
    }

    /// The first event that this sink may have: its own, or one whose call has ended.
    pub(super) fn next_for(&self, sink: usize) -> Option<Pending> {
        let deliverable = |entry: &&Pending| entry.sink == sink || entry.call.strong_count() == 0;
        self.pending().iter().find(deliverable).cloned()
    }

    pub(super) fn delivered(&self, seq: u64) {
        self.pending().retain(|entry| entry.event.seq != seq);
    }

    /// A connection to the present instance's guest.
    ///
    /// # Errors
    ///
    /// `Lost` (recorded, once) if the instance is gone; `Conflict` if the sandbox is in a state in which
    /// nothing runs.
    pub(crate) async fn link(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<Arc<Link>> {
        loop {
            match self.try_link(inner).await? {
                Ok(link) => return Ok(link),
                Err((instance, error)) => self.note_loss(inner, &instance, &error).await?,
            }
        }
    }

    /// As [`link`](Self::link), for whoever has the sandbox's lock: a loss is not recorded.
    pub(super) async fn link_locked(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<Arc<Link>> {
        let tried = self.try_link(inner).await?;
        tried.map_err(|(_, error)| error.with_sandbox(&self.id))
    }

    /// A connection; or the instance that is gone, and what says so.
    async fn try_link(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
    ) -> Result<std::result::Result<Arc<Link>, (Instance, Error)>> {
        let record = self.record(inner).await?;
        let instance = running_instance(&record)?;
        let mut slot = self.link.lock().await;
        if let Some(link) = &*slot
            && link.instance() == &instance.id
            && !link.is_closed()
        {
            return Ok(Ok(Arc::clone(link)));
        }
        let backend = inner.backend(&instance.backend)?;
        match connect(&*backend, instance).await {
            Ok(link) => {
                let link = self.put_to_use(inner, link, &record.spec).await?;
                *slot = Some(Arc::clone(&link));
                drop(slot);
                for (process, _) in record.open_processes() {
                    ends::watch(inner, self, process);
                }
                Ok(Ok(link))
            }
            Err(error) if error.kind() == ErrorKind::Lost => Ok(Err((instance.clone(), error))),
            Err(error) => Err(error.with_sandbox(&self.id)),
        }
    }

    /// A connection that is used: as long as it lives, it renews the sandbox's lease, and the guest is answered
    /// when processes want to connect to the outside.
    pub(super) async fn put_to_use(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        link: Link,
        spec: &SandboxSpec,
    ) -> Result<Arc<Link>> {
        egress::serve(inner, self, &link, spec).await?;
        let link = Arc::new(link);
        if let Some(lease) = spec.lifetime.lease_seconds {
            lifetime::keep_lease(&link, lease).await?;
        }
        Ok(link)
    }

    /// Lets go of the connection, as the instance is about to be another one.
    pub(super) async fn unlink(&self) {
        self.link.lock().await.take();
    }

    /// Lets go of this connection, if it is still the one in use.
    pub(crate) async fn unlink_from(&self, link: &Arc<Link>) {
        let mut slot = self.link.lock().await;
        if slot.as_ref().is_some_and(|used| Arc::ptr_eq(used, link)) {
            slot.take();
        }
    }

    /// Asks something with a single answer that can be asked again: over a cut connection it is, for a
    /// bounded time.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        request: Request,
    ) -> Result<Response> {
        let mut repeats = Repeats::new();
        loop {
            let answer = async { self.link(inner).await?.call(request.clone()).await };
            match answer.await {
                Err(error) if repeats.again(&error).await => {}
                answer => return answer.map_err(|error| error.with_sandbox(&self.id)),
            }
        }
    }

    /// Begins to wait for a process's end, unless somebody does, or too many are waited for.
    pub(super) fn begin_watching(&self, process: &ProcessId) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.len() < MOST_WATCHED && watched.insert(process.clone())
    }

    pub(super) fn end_watching(&self, process: &ProcessId) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(process);
    }

    /// Uses this connection from now on; without one, the next call makes it.
    pub(super) async fn relink(&self, link: Option<Arc<Link>>) {
        *self.link.lock().await = link;
    }

    /// Records that the instance is gone, unless that is known, or another one has taken its place
    /// meanwhile.
    async fn note_loss(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        instance: &Instance,
        error: &Error,
    ) -> Result<()> {
        // Whoever is just replacing the instance gets to finish.
        let _lock = inner.journal.lock(&self.id).await?;
        let record = self.record(inner).await?;
        let now = running_instance(&record)?;
        if now.id != instance.id {
            return Ok(());
        }
        // The same one may have been stopped and started.
        match connect(&*inner.backend(&now.backend)?, now).await {
            Ok(_) => return Ok(()),
            Err(again) if again.kind() == ErrorKind::Lost => {}
            Err(again) => return Err(again.with_sandbox(&self.id)),
        }
        let recorder = Recorder::of_nobody(inner, self, record.consumer.clone());
        if let Some(reason) = lifetime::is_over(&record) {
            recorder.record(Known::Expired { reason: reason.into() }).await?;
            return ends::lose(&recorder).await;
        }
        recorder.record(Known::Lost { reason: error.to_string() }).await?;
        ends::lose(&recorder).await?;
        if let Err(failed) = life::recover(&recorder, &record).await {
            tracing::warn!(error = %failed, "a lost sandbox could not be brought back");
        }
        Err(error.clone().with_sandbox(&self.id))
    }

    fn cached(&self) -> MutexGuard<'_, Option<Arc<Record>>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Repeats what can be done again when the connection is cut, for a bounded time.
#[derive(Debug)]
pub(crate) struct Repeats {
    deadline: Instant,
    pause: Duration,
}

impl Repeats {
    pub(crate) fn new() -> Self {
        Self { deadline: Instant::now() + RECONNECT, pause: Duration::from_millis(1) }
    }

    /// Whether to try again after this error, once some time has passed.
    pub(crate) async fn again(&mut self, error: &Error) -> bool {
        let cut = error.kind() == ErrorKind::Unavailable && error.is_retryable();
        if !cut || Instant::now() >= self.deadline {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(Duration::from_millis(500));
        true
    }
}

/// Connects to an instance's guest and greets it.
pub(super) async fn connect(backend: &dyn SandboxBackend, instance: &Instance) -> Result<Link> {
    let named = |error: Error| error.with_backend(&backend.id()).with_sandbox(&instance.sandbox);
    let mut pause = Duration::from_millis(1);
    loop {
        let stream = backend.connect(instance).await.map_err(named)?;
        match Link::connect(stream, &instance.id).await {
            Ok(link) => return Ok(link),
            // Cut in the middle, it is made again: nothing was asked yet. If the guest has ended meanwhile,
            // the backend says so.
            Err(error) if error.kind() == ErrorKind::Unavailable && pause < LAST_GREETING => {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            Err(error) => match backend.connect(instance).await {
                Err(lost) if lost.kind() == ErrorKind::Lost => return Err(named(lost)),
                _ => return Err(named(error)),
            },
        }
    }
}

/// What is done to a place, when the place is somebody else's.
pub(super) fn refuse_borrowed(record: &Record, operation: &'static str) -> Result<()> {
    if !record.borrowed {
        return Ok(());
    }
    let message = "its place is borrowed: it was attached to, and only its owner may do this; `detach` \
                   leaves it as it was";
    Err(Error::new(ErrorKind::NotOwned, operation, message).with_sandbox(&record.id))
}

/// The instance that calls go to, or why they cannot.
pub(crate) fn running_instance(record: &Record) -> Result<&Instance> {
    let refuse = |kind, message: &str| {
        Err(Error::new(kind, "use the sandbox", message).with_sandbox(&record.id))
    };
    match record.state {
        SandboxState::Ready | SandboxState::Active => {}
        SandboxState::Stopped => {
            return refuse(ErrorKind::Conflict, "it is stopped; start it first");
        }
        SandboxState::Paused => {
            return refuse(ErrorKind::Conflict, "it is paused; resume it first");
        }
        SandboxState::Lost => {
            return refuse(
                ErrorKind::Lost,
                "its instance is gone (the history says why); rewind it to a snapshot, or destroy it",
            );
        }
        SandboxState::Expired => {
            return refuse(ErrorKind::Lost, "its time was over; destroy it and make another");
        }
        SandboxState::Requested | SandboxState::Provisioning => {
            return refuse(ErrorKind::Conflict, "it is still being made");
        }
        SandboxState::Failed => return refuse(ErrorKind::Conflict, "it could not be made"),
        SandboxState::Destroying | SandboxState::Destroyed => {
            return refuse(ErrorKind::Lost, "it was destroyed");
        }
    }
    match &record.instance {
        Some(instance) => Ok(instance),
        None => refuse(ErrorKind::Lost, "its history names no instance"),
    }
}

impl Inner {
    /// The backend of this id.
    pub(crate) fn backend(&self, id: &BackendId) -> Result<Arc<dyn SandboxBackend>> {
        let found = self.backends.iter().find(|backend| backend.id() == *id);
        found.cloned().ok_or_else(|| {
            let known: Vec<String> =
                self.backends.iter().map(|backend| backend.id().to_string()).collect();
            let message = format!("this manager has no backend {id}; it has: {}", known.join(", "));
            Error::new(ErrorKind::Unavailable, "choose a backend", message).retryable(false)
        })
    }
}
