//! The backend: what the trait asks for, put together from the other modules.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Found, GuestStream, Instance, InstanceState, Provision,
    Reachability, Result, SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, Usage,
};

use crate::{
    attach, changes,
    error::ID,
    instance::about,
    launch, life, look,
    pool::Pool,
    probe, provision,
    shared::{Parts, Shared},
    snapshot, sweep,
};

/// Makes sandboxes that are containers.
///
/// Cheap to clone; clones share what was found out about the engine. Any number of backends, in any
/// number of processes, may use one engine; those of one [scope](crate::DockerBackendBuilder::scope) see each
/// other's sandboxes.
#[derive(Clone)]
pub struct DockerBackend {
    shared: Shared,
    pool: Arc<Pool>,
}

impl DockerBackend {
    pub(crate) fn from_parts(parts: Parts, pool: Pool) -> Self {
        Self { shared: Shared::new(parts), pool: Arc::new(pool) }
    }

    /// A backend of another scope on the same engine, with the same settings and without a pool. What is
    /// known of the engine is not found out again.
    #[must_use]
    pub fn in_scope(&self, scope: impl Into<String>) -> Self {
        let old = &self.shared;
        let mut settings = old.settings.clone();
        settings.scope = scope.into();
        let mut parts = Parts::new(
            old.endpoint.clone(),
            old.timeout,
            settings,
            (old.image.clone(), old.pull, old.watcher.clone()),
            (old.docker_config.clone(), old.guests.clone()),
            old.max_layers,
        );
        parts.engine = Arc::clone(&old.engine);
        Self::from_parts(parts, Pool::new(None))
    }

    /// Makes the containers that the [pool](crate::DockerBackendBuilder::pool) lacks, and returns when they are
    /// ready. It fills itself up again each time one is taken.
    ///
    /// # Errors
    ///
    /// As making a sandbox of the pool's spec does.
    pub async fn fill_pool(&self) -> Result<()> {
        self.pool.fill(&self.shared).await
    }

    /// Removes the containers of the pool that nobody has taken. Without this they end with the process,
    /// and are removed when a pool of the same scope is filled next.
    pub async fn drain_pool(&self) {
        self.pool.drain(&self.shared).await;
    }

    /// Removes the images that the backend prepared and that nothing uses. They are made again when they
    /// are needed. Returns how many there were.
    ///
    /// # Errors
    ///
    /// If the engine cannot be asked.
    pub async fn remove_prepared_images(&self) -> Result<usize> {
        sweep::remove_prepared(&self.shared).await
    }
}

impl fmt::Debug for DockerBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DockerBackend")
            .field("endpoint", &self.shared.endpoint)
            .field("settings", &self.shared.settings)
            .field("image", &self.shared.image)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl SandboxBackend for DockerBackend {
    fn id(&self) -> BackendId {
        BackendId::new(ID)
    }

    async fn probe(&self) -> Result<Capabilities> {
        let probed = self.shared.engine.probed.get_or_try_init(|| probe::probe(&self.shared)).await;
        probed.cloned().map_err(|error| error.with_backend(&self.id()))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let made = provision::provision(&self.shared, &self.pool, request).await;
        made.map_err(|error| error.with_sandbox(&request.sandbox).with_backend(&self.id()))
    }

    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance> {
        let attached = attach::attach(&self.shared, external, request).await;
        attached.map_err(|error| error.with_sandbox(&request.sandbox).with_backend(&self.id()))
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        launch::connect(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        look::inspect(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        life::reachability(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        let taken = snapshot::take(&self.shared, request).await;
        taken.map_err(|error| about(error, &request.instance))
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        let measured = snapshot::size(&self.shared, snapshot).await;
        measured.map_err(|error| error.with_backend(&self.id()))
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        let deleted = snapshot::delete(&self.shared, snapshot).await;
        deleted.map_err(|error| error.with_backend(&self.id()))
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        let found = changes::changes(&self.shared, instance, since).await;
        found.map_err(|error| about(error, instance))
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        life::usage(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        life::pause(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        life::resume(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        life::stop(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let started = life::start_again(&self.shared, instance, request).await;
        started.map_err(|error| about(error, instance))
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        life::teardown(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn retire(&self, instance: &Instance) -> Result<()> {
        life::retire(&self.shared, instance).await.map_err(|error| about(error, instance))
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        let found = life::inventory(&self.shared).await;
        found.map_err(|error| error.with_backend(&self.id()))
    }
}
