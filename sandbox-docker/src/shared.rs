//! What all parts of a backend know: how it is set up, and what was found out about its engine.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bollard::Docker;
use sandbox_core::{Capabilities, GuestBinaries, GuestStream, InstanceId, Result};

use crate::{
    container::Settings,
    contexts::Endpoint,
    error::asking,
    leaving::Leaving,
    pull_options::{PullPolicy, Watcher},
};

/// What all parts of a backend know.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Parts>);

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }
}

impl std::ops::Deref for Shared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

pub(crate) struct Parts {
    pub(crate) endpoint: Endpoint,
    pub(crate) timeout: Duration,
    pub(crate) settings: Settings,
    pub(crate) image: Option<String>,
    pub(crate) pull: PullPolicy,
    pub(crate) watcher: Option<Watcher>,
    pub(crate) docker_config: PathBuf,
    pub(crate) guests: GuestBinaries,
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

/// An image that sandboxes can be made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prepared {
    /// Its name.
    pub(crate) image: String,
    /// The environment that it asks for.
    pub(crate) env: Vec<String>,
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
        (docker_config, guests): (PathBuf, GuestBinaries),
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
            let docker = self.endpoint.client(self.timeout)?;
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
