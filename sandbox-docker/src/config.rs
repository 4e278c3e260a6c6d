//! Setting up a backend.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use sandbox_core::{GuestBinaries, Limits, Result};

use crate::{
    archive::Owner,
    backend::DockerBackend,
    container::Settings,
    contexts::{self, Asked},
    pool::{Pool, PoolOptions},
    pull_options::{PullPolicy, PullProgress, Watcher},
    shared::Parts,
};

/// How long the engine may take to answer, unless said otherwise. A commit of gigabytes takes a while.
const PATIENCE: Duration = Duration::from_secs(600);

/// A sandbox's processes and threads, unless its spec or the builder says otherwise.
const PIDS: u64 = 4096;

/// The engine takes 125 layers, and a snapshot adds one.
const MAX_LAYERS: usize = 100;

/// The user that sandboxes run as, unless said otherwise: no system's own.
const USER: Owner = Owner { uid: 1000, gid: 1000 };

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
}

/// Sets up a [`DockerBackend`] step by step.
#[derive(Debug, Clone)]
pub struct DockerBackendBuilder {
    host: Option<String>,
    context: Option<String>,
    config_dir: Option<PathBuf>,
    scope: String,
    image: Option<String>,
    pull: PullPolicy,
    watcher: Option<Watcher>,
    user: Owner,
    read_only_root: bool,
    runtime: Option<String>,
    ulimits: BTreeMap<String, i64>,
    limits: Limits,
    guests: Option<GuestBinaries>,
    pool: Option<PoolOptions>,
    timeout: Duration,
    direct: bool,
    max_layers: usize,
}

impl Default for DockerBackendBuilder {
    fn default() -> Self {
        let mut limits = Limits::default();
        limits.pids = Some(PIDS);
        Self {
            host: None,
            context: None,
            config_dir: None,
            scope: "default".to_owned(),
            image: None,
            pull: PullPolicy::default(),
            watcher: None,
            user: USER,
            read_only_root: false,
            runtime: None,
            ulimits: BTreeMap::from([("core".to_owned(), 0)]),
            limits,
            guests: None,
            pool: None,
            timeout: PATIENCE,
            direct: true,
            max_layers: MAX_LAYERS,
        }
    }
}

impl DockerBackendBuilder {
    /// The engine at this address: `unix:///PATH`, `tcp://HOST:PORT` or `ssh://[USER@]HOST`. Without it,
    /// and without a [context](Self::context), the one that the `docker` program would use: that of
    /// `DOCKER_HOST`, `DOCKER_CONTEXT`, the configuration's current context, or the standard socket.
    ///
    /// Over TCP, `DOCKER_TLS_VERIFY` and `DOCKER_CERT_PATH` count as they do for `docker`. Over SSH, the
    /// user's own configuration does, and `docker` must be installed on the host.
    #[must_use]
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = Some(host.into());
        self
    }

    /// The engine of this Docker context.
    #[must_use]
    pub fn context(mut self, context: impl Into<String>) -> Self {
        self.context = Some(context.into());
        self
    }

    /// Where Docker's configuration is: contexts and registry credentials. `DOCKER_CONFIG`, else
    /// `~/.docker`, if it is not given.
    #[must_use]
    pub fn config_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.config_dir = Some(directory.into());
        self
    }

    /// A name for all that this backend makes; `default` if it is not given. Backends of different
    /// scopes see nothing of each other's on the same engine.
    #[must_use]
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = scope.into();
        self
    }

    /// The image of sandboxes whose spec names none.
    #[must_use]
    pub fn image(mut self, image: impl Into<String>) -> Self {
        self.image = Some(image.into());
        self
    }

    /// When images are fetched; if they are missing, unless said otherwise.
    #[must_use]
    pub fn pull(mut self, policy: PullPolicy) -> Self {
        self.pull = policy;
        self
    }

    /// Is told how the fetching of an image goes on. It must not block.
    #[must_use]
    pub fn on_pull(mut self, tell: impl Fn(&PullProgress) + Send + Sync + 'static) -> Self {
        self.watcher = Some(Watcher(Arc::new(tell)));
        self
    }

    /// The user and group that sandboxes run as, and that their workspace belongs to; 1000 and 1000
    /// unless said otherwise. The image need not know them. 0 is root, without a single capability: it
    /// owns the image's files, and so can change them.
    #[must_use]
    pub fn user(mut self, uid: u32, gid: u32) -> Self {
        self.user = Owner { uid, gid };
        self
    }

    /// Only the workspace, the home and the directories for temporary files can be written to. They are
    /// volumes then, which no snapshot has in it: snapshots and `changes` are refused.
    #[must_use]
    pub fn read_only_root(mut self, read_only: bool) -> Self {
        self.read_only_root = read_only;
        self
    }

    /// The runtime, such as `runsc`; the engine's own if it is not given. The engine must know it.
    #[must_use]
    pub fn runtime(mut self, runtime: impl Into<String>) -> Self {
        self.runtime = Some(runtime.into());
        self
    }

    /// A limit of each single process (`setrlimit`), such as `nofile`, instead of the engine's own. An engine
    /// may not give more than it has itself. `core` is 0 unless said otherwise.
    #[must_use]
    pub fn ulimit(mut self, name: impl Into<String>, limit: u32) -> Self {
        self.ulimits.insert(name.into(), limit.into());
        self
    }

    /// Limits of sandboxes whose spec has none. Unless said otherwise, 4096 processes and threads; memory
    /// and CPU time are the engine's.
    #[must_use]
    pub fn default_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Other guest programs than [`GuestBinaries::standard`].
    #[must_use]
    pub fn guests(mut self, guests: GuestBinaries) -> Self {
        self.guests = Some(guests);
        self
    }

    /// Keep containers ready.
    #[must_use]
    pub fn pool(mut self, pool: PoolOptions) -> Self {
        self.pool = Some(pool);
        self
    }

    /// How long the engine may take to answer a request; ten minutes unless said otherwise.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether guests are connected to without the engine in between where that can be, so that what passes
    /// does not pass the engine; unless said otherwise, they are. It can be on Linux, with an engine behind a
    /// local socket, by who may look into its containers' processes: root. Elsewhere, and where this is
    /// false, the engine carries the connections, as it does for `docker exec`.
    #[must_use]
    pub fn direct_connections(mut self, direct: bool) -> Self {
        self.direct = direct;
        self
    }

    /// From how many layers on a snapshot's image is made into one of a single layer, at least 4; 100 unless
    /// said otherwise. That costs a copy of all its files, through this process.
    #[must_use]
    pub fn max_layers(mut self, layers: usize) -> Self {
        self.max_layers = layers.clamp(4, MAX_LAYERS);
        self
    }

    /// The backend. Nothing is asked of the engine yet: it may be started later.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if an address or the configuration cannot be understood, `NotFound` if a context is
    /// not there, and whatever [`GuestBinaries::standard`] says.
    pub fn build(self) -> Result<DockerBackend> {
        let directory = self.config_dir.or_else(standard_config_dir).unwrap_or_default();
        let variable = |name| std::env::var(name).ok();
        let asked = Asked {
            host: self.host.as_deref(),
            context: self.context.as_deref(),
            env_host: variable("DOCKER_HOST"),
            env_context: variable("DOCKER_CONTEXT"),
            env_cert_path: std::env::var_os("DOCKER_CERT_PATH").map(PathBuf::from),
            env_tls: variable("DOCKER_TLS_VERIFY").is_some_and(|value| !value.is_empty()),
        };
        let endpoint = contexts::find(&asked, &directory)?;
        let guests = match self.guests {
            Some(guests) => guests,
            None => GuestBinaries::standard()?,
        };
        let settings = Settings {
            scope: self.scope,
            user: self.user,
            read_only_root: self.read_only_root,
            runtime: self.runtime,
            ulimits: self.ulimits,
            limits: self.limits,
            local: endpoint.is_local(),
            direct: self.direct && endpoint.is_local(),
        };
        let parts = Parts::new(
            endpoint,
            self.timeout,
            settings,
            (self.image, self.pull, self.watcher),
            (directory, guests),
            self.max_layers,
        );
        Ok(DockerBackend::from_parts(parts, Pool::new(self.pool)))
    }
}

fn standard_config_dir() -> Option<PathBuf> {
    let named = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    named.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker")))
}
