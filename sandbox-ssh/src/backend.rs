//! The backend: what the contract asks for, asked of the hosts.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Found, GuestStream, Hosting, Instance,
    InstanceState, Provision, Reachability, Result, Root, SandboxBackend, SandboxSpec,
    SnapshotData, SnapshotRequest, SnapshotTaken, Usage, WorkspaceMode,
};
use sandbox_host::message::{Answer, Request};

use crate::{
    address::Address,
    error::nonsense,
    host::Host,
    instance::{self, Place},
    links::Fault,
    placement::Attempts,
    reach,
    settings::Settings,
    snapshot, workspace,
};

/// Makes sandboxes on other hosts, over SSH.
///
/// Cheap to clone; clones share their connections, which end with the last of them.
#[derive(Clone)]
pub struct SshBackend {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Arc<Settings>,
    /// Those to make sandboxes on come first; then those that there may be some on.
    hosts: Mutex<Vec<Arc<Host>>>,
    /// On how many of them sandboxes are made that name none.
    own: usize,
}

impl SshBackend {
    pub(crate) fn from_parts(hosts: Vec<Address>, own: usize, settings: Settings) -> Self {
        let settings = Arc::new(settings);
        let host = |address| Arc::new(Host::new(address, Arc::clone(&settings)));
        let hosts = hosts.into_iter().map(host).collect();
        Self { shared: Arc::new(Shared { settings, hosts: Mutex::new(hosts), own }) }
    }

    /// All hosts that are known by now.
    fn hosts(&self) -> Vec<Arc<Host>> {
        self.shared.hosts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those that a sandbox may come to be on, in the order in which to try them.
    fn candidates(&self, spec: &SandboxSpec) -> Result<Vec<Arc<Host>>> {
        let hosts: Vec<Arc<Host>> = if spec.hosts.is_empty() {
            self.hosts().into_iter().take(self.shared.own).collect()
        } else {
            spec.hosts.iter().map(|name| self.host(name)).collect::<Result<_>>()?
        };
        if hosts.is_empty() {
            let message = "no host is named, neither for this sandbox nor for the backend";
            return Err(Error::new(ErrorKind::InvalidSpec, "choose a host", message));
        }
        Ok(hosts)
    }

    /// The host of a name.
    fn host(&self, name: &str) -> Result<Arc<Host>> {
        let address = Address::parse(name)?;
        let mut hosts = self.shared.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = hosts.iter().find(|host| *host.address() == address) {
            return Ok(Arc::clone(known));
        }
        let host = Arc::new(Host::new(address, Arc::clone(&self.shared.settings)));
        hosts.push(Arc::clone(&host));
        Ok(host)
    }

    /// Asks an instance's host for something that may be asked for twice.
    async fn ask(
        &self,
        operation: &'static str,
        instance: &Instance,
        request: impl FnOnce(Instance, &Place) -> Request,
    ) -> Result<(Answer, Place)> {
        let asked = async {
            let place = known(operation, instance)?;
            let host = self.host(&place.host)?;
            let request = request(instance::inner(instance, &place), &place);
            Ok((host.call(operation, place.isolation, request).await?, place))
        };
        let asked: Result<_> = asked.await;
        asked.map_err(|error| about(error, instance))
    }

    /// Asks for a snapshot of what runs. That is not asked for twice: when a connection breaks, what holds
    /// the processes still breaks too, and what is copied after that is of no one instant. What there is
    /// of it is removed.
    async fn ask_once(
        &self,
        operation: &'static str,
        wanted: &SnapshotRequest,
        request: impl FnOnce(Instance, &Place) -> Request,
    ) -> Result<(Answer, Place)> {
        let asked = async {
            let place = known(operation, &wanted.instance)?;
            let host = self.host(&place.host)?;
            let request = request(instance::inner(&wanted.instance, &place), &place);
            let error = match host.call_once(operation, place.isolation, request).await {
                Ok(answer) => return Ok((answer, place)),
                Err(Fault::Other(error)) => return Err(error),
                Err(Fault::Link(error)) => error,
            };
            let half = SnapshotData {
                id: wanted.snapshot.clone(),
                backend: BackendId::new(place.isolation.to_string()),
                size: None,
                data: serde_json::Value::Null,
            };
            let removed =
                host.call("delete snapshot", place.isolation, Request::DeleteSnapshot(half)).await;
            if let Err(leftover) = removed {
                tracing::warn!(error = %leftover, "what was half copied is left on the host");
            }
            Err(error)
        };
        let asked: Result<_> = asked.await;
        asked.map_err(|error| about(error, &wanted.instance))
    }

    async fn done(
        &self,
        operation: &'static str,
        instance: &Instance,
        request: impl FnOnce(Instance) -> Request,
    ) -> Result<()> {
        match self.ask(operation, instance, |inner, _| request(inner)).await? {
            (Answer::Done, _) => Ok(()),
            (_, place) => Err(misunderstood(operation, &place)),
        }
    }

    /// Makes a fresh instance on the first host that can be used.
    async fn place(&self, request: &Provision) -> Result<Instance> {
        let hosts = self.candidates(&request.spec)?;
        let mut attempts = Attempts::on(hosts.len());
        for host in &hosts {
            match self.make_on(host, request).await {
                Ok(made) => return Ok(made),
                Err(error) => attempts.failed(host.address(), error)?,
            }
        }
        Err(attempts.none_left())
    }

    async fn make_on(&self, host: &Host, request: &Provision) -> Result<Instance> {
        const OPERATION: &str = "provision";
        let (isolation, _) = host.isolation().await?;
        let workspace = match &request.spec.workspace {
            // It is there.
            Some(directory) if is_there(request) => Some(directory.clone()),
            Some(directory) => Some(workspace::bring(host, isolation, directory).await?),
            None => None,
        };
        let place = Place {
            host: host.address().to_string(),
            isolation,
            workspace,
            hints: request.spec.reachability.clone(),
            inner: serde_json::Value::Null,
        };
        self.provision_at(OPERATION, host, place, request, None).await
    }

    /// Has a host make an instance. That is not asked for twice: if nobody knows whether it was made, it
    /// is removed.
    async fn provision_at(
        &self,
        operation: &'static str,
        host: &Host,
        place: Place,
        request: &Provision,
        from: Option<SnapshotData>,
    ) -> Result<Instance> {
        let mut inner = here(request, place.workspace.clone());
        inner.from = from;
        let isolation = place.isolation;
        let error = match host.call_once(operation, isolation, Request::Provision(inner)).await {
            Ok(Answer::Instance(made)) => return instance::outer(&self.id(), made, &place),
            Ok(_) => return Err(misunderstood(operation, &place)),
            Err(Fault::Other(error)) if is_there(request) => return Err(at(&error, host)),
            Err(Fault::Other(error)) => return Err(error),
            Err(Fault::Link(error)) => error,
        };
        let half = Instance {
            id: request.instance.clone(),
            sandbox: request.sandbox.clone(),
            backend: BackendId::new(isolation.to_string()),
            data: serde_json::Value::Null,
        };
        if let Err(leftover) = host.call("teardown", isolation, Request::Teardown(half)).await {
            tracing::warn!(error = %leftover, "what was half made is left for the inventory");
        }
        Err(error)
    }
}

impl fmt::Debug for SshBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts();
        let hosts: Vec<&str> = hosts.iter().map(|host| host.address().as_str()).collect();
        f.debug_struct("SshBackend").field("hosts", &hosts).finish_non_exhaustive()
    }
}

#[async_trait]
impl SandboxBackend for SshBackend {
    fn id(&self) -> BackendId {
        self.shared.settings.kind.id()
    }

    async fn probe(&self) -> Result<Capabilities> {
        let hosts: Vec<Arc<Host>> = self.hosts().into_iter().take(self.shared.own).collect();
        if hosts.is_empty() {
            let message = "no host is named; whether there can be sandboxes depends on the host";
            let error = Error::new(ErrorKind::Unavailable, "probe", message).retryable(false);
            return Err(error.with_backend(&self.id()));
        }
        let mut attempts = Attempts::on(hosts.len());
        for host in &hosts {
            let error = match host.isolation().await {
                Ok((isolation, found)) => {
                    let version =
                        format!("{}, isolation {isolation}: {}", host.address(), found.version);
                    let names = hosts.iter().map(|host| host.address().to_string());
                    let hosting = Hosting { hosts: names.collect(), ..Hosting::default() };
                    let backend = self.id();
                    let found = Capabilities { backend, version, hosting, ..found.clone() };
                    return Ok(self.shared.settings.kind.told(found));
                }
                Err(error) => error.with_backend(&self.id()),
            };
            attempts.failed(host.address(), error)?;
        }
        Err(attempts.none_left().with_backend(&self.id()))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let made = async {
            refuse(request)?;
            match &request.from {
                Some(from) => {
                    let (place, inner) = snapshot::place("provision", &self.id(), from)?;
                    let host = self.host(&place.host)?;
                    self.provision_at("provision", &host, place, request, Some(inner)).await
                }
                None => self.place(request).await,
            }
        };
        let made: Result<Instance> = made.await;
        made.map_err(|error| error.with_sandbox(&request.sandbox).with_backend(&self.id()))
    }

    async fn attach(&self, _: &str, _: &Provision) -> Result<Instance> {
        let reason = "nothing on a host is attached to; a sandbox that names the host has a workspace of its own \
                      there, and leaves the rest of it alone";
        Err(Error::unsupported("attach", reason).with_backend(&self.id()))
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        let connected = async {
            let place = known("connect", instance)?;
            let host = self.host(&place.host)?;
            let request = Request::Connect(instance::inner(instance, &place));
            let stream = host.stream(place.isolation, request).await?;
            Ok(Box::new(stream) as GuestStream)
        };
        let connected: Result<GuestStream> = connected.await;
        connected.map_err(|error| about(error, instance))
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        match self.ask("inspect", instance, |inner, _| Request::Inspect(inner)).await? {
            (Answer::State(state), _) => Ok(state),
            (_, place) => Err(misunderstood("inspect", &place)),
        }
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        const OPERATION: &str = "reachability";
        match self.ask(OPERATION, instance, |inner, _| Request::Reachability(inner)).await? {
            (Answer::Reachability(Reachability::Local(local)), place) => {
                let host = self.host(&place.host)?;
                let reach = reach::reach(host.settings(), host.address(), &place, &local);
                Ok(Reachability::Ssh(reach))
            }
            (_, place) => Err(misunderstood(OPERATION, &place)),
        }
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        const OPERATION: &str = "snapshot";
        let from = request.successor.from.as_ref();
        let from = from.map(|from| snapshot::place(OPERATION, &self.id(), from)).transpose()?;
        let ask = |inner, place: &Place| {
            let mut successor = here(&request.successor, place.workspace.clone());
            successor.from = from.map(|(_, inner)| inner);
            let (snapshot, idle) = (request.snapshot.clone(), request.idle);
            Request::Snapshot { instance: inner, snapshot, idle, successor }
        };
        let (answer, place) = if request.idle {
            self.ask(OPERATION, &request.instance, ask).await?
        } else {
            self.ask_once(OPERATION, request, ask).await?
        };
        match answer {
            Answer::Snapshot { data, successor } => Ok(SnapshotTaken {
                data: snapshot::outer(&self.id(), data, &place)?,
                successor: successor
                    .map(|made| instance::outer(&self.id(), made, &place))
                    .transpose()?,
            }),
            _ => Err(misunderstood(OPERATION, &place)),
        }
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        const OPERATION: &str = "measure the snapshot";
        let (place, inner) = snapshot::place(OPERATION, &self.id(), snapshot)?;
        let host = self.host(&place.host)?;
        match host.call(OPERATION, place.isolation, Request::SnapshotSize(inner)).await? {
            Answer::Size(size) => Ok(size),
            _ => Err(misunderstood(OPERATION, &place)),
        }
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        const OPERATION: &str = "delete snapshot";
        let (place, inner) = snapshot::place(OPERATION, &self.id(), snapshot)?;
        let host = self.host(&place.host)?;
        match host.call(OPERATION, place.isolation, Request::DeleteSnapshot(inner)).await? {
            Answer::Done => Ok(()),
            _ => Err(misunderstood(OPERATION, &place)),
        }
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        const OPERATION: &str = "changes";
        let since = since.map(|since| snapshot::place(OPERATION, &self.id(), since)).transpose()?;
        let since = since.map(|(_, inner)| inner);
        let ask = |instance, _: &Place| Request::Changes { instance, since };
        match self.ask(OPERATION, instance, ask).await? {
            (Answer::Changes(changes), _) => Ok(changes),
            (_, place) => Err(misunderstood(OPERATION, &place)),
        }
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        match self.ask("usage", instance, |inner, _| Request::Usage(inner)).await? {
            (Answer::Usage(usage), _) => Ok(usage),
            (_, place) => Err(misunderstood("usage", &place)),
        }
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.done("pause", instance, Request::Pause).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.done("resume", instance, Request::Resume).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.done("stop", instance, Request::Stop).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let ask = |inner, place: &Place| {
            let mut request = here(request, place.workspace.clone());
            request.from = None;
            Request::Start { instance: inner, request }
        };
        match self.ask("start", instance, ask).await? {
            (Answer::Instance(started), place) => instance::outer(&self.id(), started, &place),
            (_, place) => Err(misunderstood("start", &place)),
        }
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        if instance.data.is_string() {
            // It was to be attached to somebody's place, and there is no such thing here.
            return Ok(());
        }
        if instance::place("teardown", instance)?.is_some() {
            return self.done("teardown", instance, Request::Teardown).await;
        }
        // Only its id is known: wherever it may be.
        let hosts = self.hosts();
        if hosts.is_empty() {
            let message = "it is not known on which host it may be; name that host for the backend";
            let error = Error::new(ErrorKind::Unavailable, "teardown", message);
            return Err(about(error.retryable(false), instance));
        }
        for host in &hosts {
            let isolation = host.placed().await.map_err(|error| about(error, instance))?;
            let half =
                Instance { backend: BackendId::new(isolation.to_string()), ..instance.clone() };
            let removed = host.call("teardown", isolation, Request::Teardown(half)).await;
            removed.map_err(|error| about(error, instance))?;
        }
        Ok(())
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        let mut all = Vec::new();
        for host in &self.hosts() {
            let isolation = host.placed().await?;
            let found = match host.call("inventory", isolation, Request::Inventory).await? {
                Answer::Inventory(found) => found,
                _ => return Err(nonsense("inventory", host.address(), "answers another question")),
            };
            let place = Place {
                host: host.address().to_string(),
                isolation,
                workspace: None,
                hints: Default::default(),
                inner: serde_json::Value::Null,
            };
            for one in found {
                all.push(Found {
                    instance: instance::outer(&self.id(), one.instance, &place)?,
                    ..one
                });
            }
        }
        Ok(all)
    }
}

/// Where an instance is.
fn known(operation: &'static str, instance: &Instance) -> Result<Place> {
    instance::place(operation, instance)?.ok_or_else(|| {
        let message = "its history does not say on which host it is";
        Error::new(ErrorKind::Lost, operation, message)
    })
}

/// The request, with the paths of the host.
fn here(request: &Provision, workspace: Option<PathBuf>) -> Provision {
    let mut request = request.clone();
    request.spec.workspace = workspace;
    if is_there(&request) {
        request.spec.workspace_mode = WorkspaceMode::Bind;
    }
    request
}

/// Whether the workspace is a directory of the host.
fn is_there(request: &Provision) -> bool {
    request.spec.workspace_mode == WorkspaceMode::RemoteCanonical
}

/// The error, with the host's name.
fn at(error: &Error, host: &Host) -> Error {
    let message = format!("on {}: {}", host.address(), error.message());
    Error::new(error.kind(), error.operation(), message).retryable(error.is_retryable())
}

/// What is of this machine cannot be had on another.
fn refuse(request: &Provision) -> Result<()> {
    let spec = &request.spec;
    let reason = if !spec.mounts.is_empty() {
        "files of this machine cannot be mounted on another; put them into the workspace"
    } else if matches!(spec.root, Root::Directory(_)) {
        "a root directory of this machine cannot be shown on another"
    } else if spec.workspace_mode == WorkspaceMode::Bind {
        "a directory of this machine cannot be the workspace itself on another; without that mode it is \
         brought there, and a directory of that host is a remote workspace (remote-canonical)"
    } else {
        return Ok(());
    };
    Err(Error::unsupported("provision", reason))
}

fn misunderstood(operation: &'static str, place: &Place) -> Error {
    let message = format!("our program on {} answers another question", place.host);
    Error::new(ErrorKind::Backend, operation, message)
}

fn about(error: Error, instance: &Instance) -> Error {
    error.with_sandbox(&instance.sandbox).with_backend(&instance.backend)
}
