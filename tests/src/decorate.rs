//! Backends around backends, to see what happens when one fails, is slow, or is wrong.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Found, GuestStream, Instance, InstanceId,
    InstanceState, Provision, Reachability, Result, SandboxBackend, SnapshotData, SnapshotRequest,
    SnapshotTaken, Usage,
};
use tokio::sync::Notify;

/// What a decorated backend does otherwise; whatever is not defined is done by the inner one.
#[async_trait]
#[allow(missing_docs, reason = "they are the backend's")]
pub trait Decoration: Send + Sync + Debug {
    async fn probe(&self, inner: &dyn SandboxBackend) -> Result<Capabilities> {
        inner.probe().await
    }

    async fn provision(&self, inner: &dyn SandboxBackend, request: &Provision) -> Result<Instance> {
        inner.provision(request).await
    }

    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<GuestStream> {
        inner.connect(instance).await
    }

    async fn inspect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<InstanceState> {
        inner.inspect(instance).await
    }

    async fn snapshot(
        &self,
        inner: &dyn SandboxBackend,
        request: &SnapshotRequest,
    ) -> Result<SnapshotTaken> {
        inner.snapshot(request).await
    }

    async fn delete_snapshot(
        &self,
        inner: &dyn SandboxBackend,
        snapshot: &SnapshotData,
    ) -> Result<()> {
        inner.delete_snapshot(snapshot).await
    }

    async fn usage(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<Usage> {
        inner.usage(instance).await
    }

    async fn stop(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<()> {
        inner.stop(instance).await
    }

    async fn start(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
        request: &Provision,
    ) -> Result<Instance> {
        inner.start(instance, request).await
    }

    async fn teardown(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<()> {
        inner.teardown(instance).await
    }

    async fn inventory(&self, inner: &dyn SandboxBackend) -> Result<Vec<Found>> {
        inner.inventory().await
    }
}

/// A backend with a decoration.
#[derive(Debug)]
pub struct Decorated<D> {
    inner: Arc<dyn SandboxBackend>,
    decoration: D,
}

impl<D: Decoration + 'static> Decorated<D> {
    /// This one, decorated.
    pub fn new(inner: Arc<dyn SandboxBackend>, decoration: D) -> Arc<Self> {
        Arc::new(Self { inner, decoration })
    }

    /// What it is decorated with.
    pub fn decoration(&self) -> &D {
        &self.decoration
    }
}

#[async_trait]
impl<D: Decoration> SandboxBackend for Decorated<D> {
    fn id(&self) -> BackendId {
        self.inner.id()
    }

    async fn probe(&self) -> Result<Capabilities> {
        self.decoration.probe(&*self.inner).await
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        self.decoration.provision(&*self.inner, request).await
    }

    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance> {
        self.inner.attach(external, request).await
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        self.decoration.connect(&*self.inner, instance).await
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.decoration.inspect(&*self.inner, instance).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.inner.reachability(instance).await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        self.decoration.snapshot(&*self.inner, request).await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        self.decoration.delete_snapshot(&*self.inner, snapshot).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        self.inner.changes(instance, since).await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        self.inner.snapshot_size(snapshot).await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.decoration.usage(&*self.inner, instance).await
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.inner.pause(instance).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.inner.resume(instance).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.decoration.stop(&*self.inner, instance).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        self.decoration.start(&*self.inner, instance, request).await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.decoration.teardown(&*self.inner, instance).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.decoration.inventory(&*self.inner).await
    }
}

/// Where a [`Faulty`] backend fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Before an instance is made.
    Provision,
    /// When the guest of an instance that was just made is spoken to for the first time.
    Greeting,
    /// Before a snapshot is taken.
    Snapshot,
    /// Before an instance is removed.
    Teardown,
}

/// Fails on demand.
#[derive(Debug, Default)]
pub struct Faulty {
    at: Mutex<Option<Step>>,
    made: Mutex<Option<Instance>>,
}

impl Faulty {
    /// Fails here from now on.
    pub fn fail_at(&self, step: Step) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(step);
    }

    /// Fails no more.
    pub fn heal(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn check(&self, step: Step) -> Result<()> {
        if *self.at.lock().unwrap_or_else(PoisonError::into_inner) == Some(step) {
            let message = "it was told to fail";
            return Err(Error::new(ErrorKind::Backend, "be faulty", message));
        }
        Ok(())
    }
}

#[async_trait]
impl Decoration for Faulty {
    async fn provision(&self, inner: &dyn SandboxBackend, request: &Provision) -> Result<Instance> {
        self.check(Step::Provision)?;
        let instance = inner.provision(request).await?;
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Some(instance.clone());
        Ok(instance)
    }

    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<GuestStream> {
        let new = {
            let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            made.as_ref().is_some_and(|made| made.id == instance.id)
        };
        if new {
            self.check(Step::Greeting)?;
        }
        inner.connect(instance).await
    }

    async fn snapshot(
        &self,
        inner: &dyn SandboxBackend,
        request: &SnapshotRequest,
    ) -> Result<SnapshotTaken> {
        self.check(Step::Snapshot)?;
        inner.snapshot(request).await
    }

    async fn teardown(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<()> {
        self.check(Step::Teardown)?;
        inner.teardown(instance).await
    }
}

/// Makes instances, and says so only when it is told to.
#[derive(Debug, Default)]
pub struct Slow {
    made: AtomicBool,
    go_on: Notify,
}

impl Slow {
    /// Whether an instance was made that has not been told of.
    pub fn has_made_one(&self) -> bool {
        self.made.load(Ordering::Acquire)
    }

    /// Tells of it.
    pub fn go_on(&self) {
        self.go_on.notify_one();
    }
}

#[async_trait]
impl Decoration for Slow {
    async fn provision(&self, inner: &dyn SandboxBackend, request: &Provision) -> Result<Instance> {
        let made = inner.provision(request).await;
        self.made.store(true, Ordering::Release);
        self.go_on.notified().await;
        made
    }
}

/// Says what becomes of an instance only when it is asked about another one meanwhile.
#[derive(Debug, Default)]
pub struct Gathering {
    asked: Mutex<HashSet<InstanceId>>,
    another: Notify,
}

impl Gathering {
    /// How many instances it was asked about.
    pub fn asked(&self) -> usize {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[async_trait]
impl Decoration for Gathering {
    async fn inspect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<InstanceState> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(instance.id.clone());
        self.another.notify_waiters();
        loop {
            let another = self.another.notified();
            tokio::pin!(another);
            another.as_mut().enable();
            if self.asked() > 1 {
                return inner.inspect(instance).await;
            }
            another.await;
        }
    }
}
