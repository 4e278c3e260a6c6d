//! The backend: what the trait asks for, put together from the other modules.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use bollard::Docker;
use sandbox_core::{
    BackendId, Capabilities, Change, Found, GuestBinaries, GuestStream, Instance, InstanceId,
    InstanceState, Provision, Reachability, Result, SandboxBackend, SnapshotData, SnapshotRequest,
    SnapshotTaken, Usage,
};

use crate::{
    attach, changes,
    config::{self, DockerBackendBuilder},
    container::Settings,
    contexts::Endpoint,
    error::{ID, asking},
    image::Prepared,
    instance::about,
    launch,
    leaving::Leaving,
    life,
    pool::{Pool, PoolOptions},
    probe,
    pull::{PullPolicy, Watcher},
    snapshot,
};

/// Makes sandboxes that are containers.
///
/// Cheap to clone; clones share what was found out about the engine. Any number of backends, in any
/// number of processes, may use one engine; those of one [scope](DockerBackendBuilder::scope) see each
/// other's sandboxes.
#[derive(Clone)]
pub struct DockerBackend {
    shared: Shared,
}

impl DockerBackend {
    /// With the defaults: the engine that the `docker` program would use, and no standard image.
    ///
    /// # Errors
    ///
    /// As [`DockerBackendBuilder::build`].
    pub fn connect_with_defaults() -> Result<Self> {
        Self::builder().build()
    }

    /// Set up step by step.
    #[must_use]
    pub fn builder() -> DockerBackendBuilder {
        DockerBackendBuilder::default()
    }

    pub(crate) fn from_parts(parts: Parts) -> Self {
        Self { shared: Shared(Arc::new(parts)) }
    }

    /// A backend of another scope on the same engine, with the same settings and without a pool. What is
    /// known of the engine is not found out again.
    #[must_use]
    pub fn in_scope(&self, scope: impl Into<String>) -> Self {
        let old = &self.shared;
        let mut settings = old.settings.clone();
        settings.scope = scope.into();
        let parts = Parts::new(
            old.endpoint.clone(),
            old.timeout,
            settings,
            (old.image.clone(), old.pull, old.watcher.clone()),
            (old.docker_config.clone(), old.guests.clone(), None),
            old.max_layers,
        );
        Self::from_parts(Parts { engine: Arc::clone(&old.engine), ..parts })
    }

    /// Makes the containers that the [pool](DockerBackendBuilder::pool) lacks, and returns when they are
    /// ready. It fills itself up again each time one is taken.
    ///
    /// # Errors
    ///
    /// As making a sandbox of the pool's spec does.
    pub async fn fill_pool(&self) -> Result<()> {
        self.shared.pool.fill(&self.shared).await
    }

    /// Removes the containers of the pool that nobody has taken. Without this they end with the process,
    /// and are removed when a pool of the same scope is filled next.
    pub async fn drain_pool(&self) {
        self.shared.pool.drain(&self.shared).await;
    }

    /// Removes the images that the backend prepared and that nothing uses. They are made again when they
    /// are needed. Returns how many there were.
    ///
    /// # Errors
    ///
    /// If the engine cannot be asked.
    pub async fn remove_prepared_images(&self) -> Result<usize> {
        snapshot::remove_prepared(&self.shared).await
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

/// What all parts of a backend know.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Parts>);

impl std::ops::Deref for Shared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

pub(crate) struct Parts {
    pub(crate) endpoint: Endpoint,
    timeout: Duration,
    pub(crate) settings: Settings,
    pub(crate) image: Option<String>,
    pub(crate) pull: PullPolicy,
    pub(crate) watcher: Option<Watcher>,
    pub(crate) docker_config: PathBuf,
    pub(crate) guests: GuestBinaries,
    pub(crate) pool: Pool,
    /// From how many layers on a snapshot is made into one.
    pub(crate) max_layers: usize,
    client: tokio::sync::OnceCell<Docker>,
    /// What is known of the engine; backends of other scopes share it.
    pub(crate) engine: Arc<Engine>,
    /// Connections that came with the start of a guest and that nobody has asked for yet.
    first: Mutex<HashMap<InstanceId, GuestStream>>,
    /// Containers that are being removed.
    pub(crate) leaving: Leaving,
}

/// What was found out about an engine.
#[derive(Default)]
pub(crate) struct Engine {
    pub(crate) probed: tokio::sync::OnceCell<Capabilities>,
    pub(crate) preparing: tokio::sync::Mutex<()>,
    prepared: Mutex<HashMap<String, Prepared>>,
}

impl Parts {
    pub(crate) fn new(
        endpoint: Endpoint,
        timeout: Duration,
        settings: Settings,
        (image, pull, watcher): (Option<String>, PullPolicy, Option<Watcher>),
        (docker_config, guests, pool): (PathBuf, GuestBinaries, Option<PoolOptions>),
        max_layers: usize,
    ) -> Self {
        Self {
            endpoint,
            timeout,
            settings,
            image,
            pull,
            watcher,
            docker_config,
            guests,
            pool: Pool::new(pool),
            max_layers,
            client: tokio::sync::OnceCell::new(),
            engine: Arc::default(),
            first: Mutex::default(),
            leaving: Leaving::default(),
        }
    }

    /// The engine's client, which speaks the version that the engine does.
    pub(crate) async fn docker(&self, operation: &'static str) -> Result<&Docker> {
        let made = self.client.get_or_try_init(|| async {
            let docker = config::client(&self.endpoint, self.timeout)?;
            let what = format!("ask {:?} for its version", self.endpoint);
            docker.negotiate_version().await.map_err(asking(operation, what))
        });
        made.await
    }

    pub(crate) fn known(&self, image: &str) -> Option<Prepared> {
        self.prepared().get(image).cloned()
    }

    pub(crate) fn learn(&self, prepared: &Prepared) {
        self.prepared().insert(prepared.image.clone(), prepared.clone());
    }

    /// A prepared image has turned out not to be there any more.
    pub(crate) fn forget(&self, image: &str) {
        self.prepared().remove(image);
    }

    fn prepared(&self) -> MutexGuard<'_, HashMap<String, Prepared>> {
        self.engine.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep_first(&self, instance: &InstanceId, stream: GuestStream) {
        self.first().insert(instance.clone(), stream);
    }

    pub(crate) fn take_first(&self, instance: &InstanceId) -> Option<GuestStream> {
        self.first().remove(instance)
    }

    fn first(&self) -> MutexGuard<'_, HashMap<InstanceId, GuestStream>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
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
        let made = launch::provision(&self.shared, request).await;
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
        life::inspect(&self.shared, instance).await.map_err(|error| about(error, instance))
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
        let started = launch::start_again(&self.shared, instance, request).await;
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
