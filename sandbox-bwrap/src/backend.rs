//! The backend: the host's own sandboxes are those of the local one.

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Found, GuestStream, Instance, InstanceState, Provision,
    Reachability, Result, SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, Usage,
};
use sandbox_host::bwrap::BwrapHost;

use crate::BwrapBackendBuilder;

/// Makes sandboxes of this host with bubblewrap.
///
/// Cheap to clone; clones share what was found out about the host. Any number of backends, in any number
/// of processes, may use one state directory.
#[derive(Debug, Clone)]
pub struct BwrapBackend {
    host: BwrapHost,
}

impl BwrapBackend {
    /// With the defaults: the state directory of this user, and the `bwrap` in `PATH`.
    ///
    /// # Errors
    ///
    /// As [`BwrapBackendBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Set up step by step.
    #[must_use]
    pub fn builder() -> BwrapBackendBuilder {
        BwrapBackendBuilder::default()
    }

    pub(crate) fn on(host: BwrapHost) -> Self {
        Self { host }
    }
}

#[async_trait]
impl SandboxBackend for BwrapBackend {
    fn id(&self) -> BackendId {
        self.host.id()
    }

    async fn probe(&self) -> Result<Capabilities> {
        self.host.probe().await
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        self.host.provision(request).await
    }

    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance> {
        self.host.attach(external, request).await
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        self.host.connect(instance).await
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.host.inspect(instance).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.host.reachability(instance).await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        self.host.snapshot(request).await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        self.host.delete_snapshot(snapshot).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        self.host.changes(instance, since).await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        self.host.snapshot_size(snapshot).await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.host.usage(instance).await
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.host.pause(instance).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.host.resume(instance).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.host.stop(instance).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        self.host.start(instance, request).await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.host.teardown(instance).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.host.inventory().await
    }
}
