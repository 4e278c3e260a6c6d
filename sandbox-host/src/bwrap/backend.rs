//! What the contract of a backend asks for, put together from the other modules.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use async_trait::async_trait;
use jiff::Timestamp;
use rustix::fs::FlockOperation;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Found, GuestBinaries, GuestStream, Instance,
    InstanceState, LocalReach, Network, Provision, Reachability, Result, SandboxBackend,
    SnapshotData, SnapshotId, SnapshotRequest, SnapshotTaken, Usage,
};

use crate::size;

use super::{
    ID,
    cgroup::{Available, Controller},
    changes,
    config::{BwrapHostBuilder, RunAs, State},
    error::{at, blocking, lost},
    instance::{self, InstanceDir, Marks, PARTS},
    launch::{self, Made},
    plan::{self, ENTER_PROGRAM, WORKSPACE},
    probe,
    process::boot_id,
    programs, snapshot,
    staging::Stager,
};

/// Makes sandboxes of the host that it runs on with bubblewrap.
///
/// Cheap to clone; clones share what was found out about the host. Any number of backends, in any number
/// of processes, may use one state directory.
#[derive(Clone)]
pub struct BwrapHost {
    shared: Shared,
}

impl BwrapHost {
    /// With the defaults: the state directory of this user, and the `bwrap` in `PATH`.
    ///
    /// # Errors
    ///
    /// As [`BwrapHostBuilder::build`].
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Set up step by step.
    #[must_use]
    pub fn builder() -> BwrapHostBuilder {
        BwrapHostBuilder::default()
    }

    pub(crate) fn from_parts(
        state: State,
        program: PathBuf,
        guests: GuestBinaries,
        run_as: Option<RunAs>,
    ) -> Self {
        let shared = Shared(Arc::new(Parts {
            state,
            program,
            guests,
            run_as,
            stager: Stager::new(run_as),
            available: OnceLock::new(),
            probed: tokio::sync::OnceCell::new(),
        }));
        Self { shared }
    }

    /// A connection to an instance's guest.
    ///
    /// # Errors
    ///
    /// As [`SandboxBackend::connect`].
    pub fn connect_socket(&self, instance: &Instance) -> Result<std::os::unix::net::UnixStream> {
        let dir = self.dir(instance);
        dir.connect_blocking().map_err(|error| about(not_connected(&dir, error), instance))
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    fn dir(&self, instance: &Instance) -> InstanceDir {
        InstanceDir::of(&self.shared.state, &instance.id)
    }

    /// Runs blocking work on an instance, and puts the sandbox into its error.
    async fn on<T: Send + 'static>(
        &self,
        operation: &'static str,
        instance: &Instance,
        work: impl FnOnce(&Shared, &InstanceDir) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (shared, dir) = (self.shared.clone(), self.dir(instance));
        blocking(operation, move || work(&shared, &dir)).await.map_err(|e| about(e, instance))
    }
}

impl fmt::Debug for BwrapHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BwrapHost")
            .field("state_dir", &self.shared.state.root)
            .field("program", &self.shared.program)
            .field("run_as", &self.shared.run_as)
            .finish_non_exhaustive()
    }
}

/// What all parts of a backend know.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Parts>);

#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) state: State,
    pub(crate) program: PathBuf,
    pub(crate) guests: GuestBinaries,
    pub(crate) run_as: Option<RunAs>,
    pub(crate) stager: Stager,
    available: OnceLock<Available>,
    pub(crate) probed: tokio::sync::OnceCell<Capabilities>,
}

impl std::ops::Deref for Shared {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Shared {
    /// The directory with the guest program.
    pub(crate) fn guest_dir(&self) -> Result<PathBuf> {
        programs::guest_dir(&self.guests, &self.state.guests())
    }

    /// The control groups of this host; looked for once.
    pub(crate) fn available(&self) -> &Available {
        self.available.get_or_init(Available::find)
    }

    /// A new instance on these layers.
    pub(crate) async fn provision_on(
        &self,
        request: &Provision,
        layers: Vec<SnapshotId>,
    ) -> Result<Instance> {
        let (made, dir, marks) = {
            let (shared, request) = (self.clone(), request.clone());
            blocking("provision", move || shared.make(request, layers)).await?
        };
        self.bring_up(made, &dir, marks).await
    }

    fn make(
        &self,
        request: Provision,
        layers: Vec<SnapshotId>,
    ) -> Result<(Made, InstanceDir, Marks)> {
        const OPERATION: &str = "provision";
        plan::refuse(&request.spec)?;
        launch::guest_limits(self.available(), &request.spec.limits)?;
        self.state.prepare()?;
        let marks = Marks {
            created_at: Timestamp::now(),
            run_as: self.run_as,
            groups: self.available().plan(&request.instance, &request.spec.limits),
            boot_id: boot_id().map_err(at(OPERATION, Path::new("/proc")))?,
            layers,
            request,
        };
        let lock = self.state.lock(FlockOperation::LockShared);
        let _lock = lock.map_err(at(OPERATION, &self.state.root))?;
        snapshot::check_layers(OPERATION, &self.state, &marks.layers)?;
        // From before the first file on, so that nothing is left whatever fails.
        let made = Made::instance(self, &InstanceDir::of(&self.state, &marks.request.instance));
        let like = snapshot::topmost(&self.state, &marks.layers);
        let dir = InstanceDir::create(&self.state, &marks, &like)?;
        Ok((made, dir, marks))
    }

    async fn bring_up(&self, made: Made, dir: &InstanceDir, marks: Marks) -> Result<Instance> {
        let (made, guest) = launch::launch(self, dir, &marks, made).await?;
        let instance = dir.describe(&marks, Some(&guest))?;
        made.keep();
        Ok(instance)
    }

    /// A new guest on the files of an instance that does not run.
    pub(crate) async fn start_again(
        &self,
        dir: &InstanceDir,
        mut marks: Marks,
        request: &Provision,
    ) -> Result<Instance> {
        const OPERATION: &str = "start";
        let mut request = request.clone();
        request.instance = dir.id.clone();
        let marks = {
            let (shared, dir) = (self.clone(), dir.clone());
            blocking(OPERATION, move || {
                launch::guest_limits(shared.available(), &request.spec.limits)?;
                let now = boot_id().map_err(at(OPERATION, Path::new("/proc")))?;
                if marks.boot_id != now {
                    tracing::warn!(
                        instance = %dir.id,
                        "the host was restarted since this instance ran; what it wrote last may be lost"
                    );
                }
                let adopted = snapshot::adopt_sealed(&shared.state, &dir, &mut marks)?;
                marks.boot_id = now;
                marks.groups = shared.available().plan(&dir.id, &request.spec.limits);
                marks.request = request;
                let renew = || {
                    match std::fs::remove_file(dir.info()) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        _ => {}
                    }
                    dir.write_marks(&marks)?;
                    if adopted {
                        dir.renew_upper(marks.run_as, &snapshot::topmost(&shared.state, &marks.layers))?;
                    }
                    dir.renew_work(marks.run_as)
                };
                renew().map_err(at(OPERATION, &dir.fs()))?;
                Ok(marks)
            })
            .await?
        };
        self.bring_up(Made::guest(self, dir), dir, marks).await
    }
}

#[async_trait]
impl SandboxBackend for BwrapHost {
    fn id(&self) -> BackendId {
        BackendId::new(ID)
    }

    async fn probe(&self) -> Result<Capabilities> {
        let probed = self.shared.probed.get_or_try_init(|| probe::probe(self)).await;
        probed.cloned().map_err(|error| error.with_backend(&self.id()))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let layers = match &request.from {
            Some(snapshot) => snapshot::layers_of("provision", snapshot)?,
            None => Vec::new(),
        };
        let made = self.shared.provision_on(request, layers).await;
        made.map_err(|error| error.with_sandbox(&request.sandbox).with_backend(&self.id()))
    }

    async fn attach(&self, _: &str, _: &Provision) -> Result<Instance> {
        let reason = "a sandbox of this backend is made of namespaces of its own; there is none to attach to";
        Err(Error::unsupported("attach", reason))
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        let dir = self.dir(instance);
        match dir.connect().await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => Err(about(not_connected(&dir, error), instance)),
        }
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.on("inspect", instance, |_, dir| dir.state().map_err(at("inspect", &dir.fs()))).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.on("reachability", instance, |_, dir| {
            let read = dir.marks().and_then(|marks| Ok((marks, dir.guest()?)));
            let (marks, guest) = read.map_err(at("reachability", &dir.fs()))?;
            let (Some(marks), Some(guest)) = (marks, guest) else {
                return Err(lost("reachability", "the guest does not run"));
            };
            let mut local = LocalReach::new(guest.pid, WORKSPACE);
            local.run_as = marks.run_as.map(|RunAs { uid, gid }| (uid, gid));
            local.shares_network = marks.request.spec.network == Network::Host;
            local.enter_program = Some(ENTER_PROGRAM.into());
            Ok(Reachability::Local(local))
        })
        .await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        let taken = snapshot::take(&self.shared, request).await;
        taken.map_err(|error| about(error, &request.instance))
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        let (state, snapshot) = (self.shared.state.clone(), snapshot.clone());
        let deleted =
            blocking("delete snapshot", move || snapshot::delete(&state, &snapshot)).await;
        deleted.map_err(|error| error.with_backend(&self.id()))
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        let found = changes::changes(&self.shared, &self.dir(instance), since).await;
        found.map_err(|error| about(error, instance))
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        let (state, id) = (self.shared.state.clone(), snapshot.id.clone());
        let measured =
            blocking("measure the snapshot", move || snapshot::size_of(&state, &id)).await;
        measured.map_err(|error| error.with_backend(&self.id()))
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.on("usage", instance, |_, dir| usage(dir)).await
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.on("pause", instance, |_, dir| freeze("pause", dir, true)).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.on("resume", instance, |_, dir| freeze("resume", dir, false)).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.on("stop", instance, |_, dir| dir.kill().map_err(at("stop", &dir.fs()))).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let known = self
            .on("start", instance, |_, dir| {
                let read = dir.marks().and_then(|marks| Ok((marks, dir.guest()?)));
                let (marks, guest) = read.map_err(at("start", &dir.fs()))?;
                let marks = marks.ok_or_else(|| lost("start", "the instance's files are gone"))?;
                // It runs already, perhaps by another process's doing.
                let running = match guest {
                    Some(guest) => Some(dir.describe(&marks, Some(&guest))?),
                    None => None,
                };
                Ok((marks, running))
            })
            .await?;
        match known {
            (_, Some(running)) => Ok(running),
            (marks, None) => {
                let started = self.shared.start_again(&self.dir(instance), marks, request).await;
                started.map_err(|error| about(error, instance))
            }
        }
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.on("teardown", instance, |shared, dir| {
            dir.remove(&shared.state)?;
            snapshot::collect(&shared.state)
        })
        .await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        let state = self.shared.state.clone();
        let found = blocking("inventory", move || {
            instance::all(&state)?.iter().map(|(dir, marks)| instance::found(dir, marks)).collect()
        });
        found.await.map_err(|error| error.with_backend(&self.id()))
    }
}

fn not_connected(dir: &InstanceDir, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            let words = dir.last_words().map(|words| format!("; it said last: {words}"));
            let message = format!("the guest does not run{}", words.unwrap_or_default());
            lost("connect", message).with_source(error)
        }
        io::ErrorKind::WouldBlock => {
            let message = "the guest takes no more connections now";
            Error::new(ErrorKind::Unavailable, "connect", message).with_source(error)
        }
        _ => Error::io("connect", "the guest's socket", error),
    }
}

fn usage(dir: &InstanceDir) -> Result<Usage> {
    let marks = dir.marks().map_err(at("usage", &dir.fs()))?;
    let marks = marks.ok_or_else(|| lost("usage", "the instance's files are gone"))?;
    let limits = &marks.request.spec.limits;
    let mut usage = Usage::default();
    // Where no control group holds it, the limit of memory is one of each single process.
    if let Some(groups) = marks.groups.filter(|groups| groups.limits(Controller::Memory)) {
        usage.memory_limit = limits.memory;
        usage.memory_peak = groups.memory_peak();
    }
    usage.pids_limit = limits.pids;
    let sizes = PARTS.iter().map(|part| size::measure(&dir.upper(part)));
    usage.disk = sizes.sum::<io::Result<u64>>().ok();
    Ok(usage)
}

fn freeze(operation: &'static str, dir: &InstanceDir, frozen: bool) -> Result<()> {
    let read = dir.marks().and_then(|marks| Ok((marks, dir.guest()?)));
    let (Some(marks), Some(guest)) = read.map_err(at(operation, &dir.fs()))? else {
        return Err(lost(operation, "the guest does not run"));
    };
    match marks.groups.filter(super::cgroup::Groups::can_freeze) {
        Some(groups) => {
            groups.freeze(frozen, || guest.all_inside()).map_err(at(operation, &dir.fs()))
        }
        None => Err(Error::unsupported(
            operation,
            "this host lets the harness make no control group, which it takes to hold a sandbox's \
             processes; stop the sandbox instead",
        )),
    }
}

fn about(error: Error, instance: &Instance) -> Error {
    error.with_sandbox(&instance.sandbox).with_backend(&instance.backend)
}
