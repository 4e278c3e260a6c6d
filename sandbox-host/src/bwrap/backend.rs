//! What the contract of a backend asks for, put together from the other modules.

use std::{fmt, io};

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Found, GuestStream, Instance, InstanceState,
    LocalReach, Network, Provision, Reachability, Result, SandboxBackend, SnapshotData,
    SnapshotRequest, SnapshotTaken, Usage,
};

use crate::size;

use super::{
    ID,
    cgroup::Controller,
    changes,
    error::{at, blocking, lost},
    instance::{self, InstanceDir, PARTS},
    layers,
    plan::{ENTER_PROGRAM, WORKSPACE},
    probe, provision,
    run_as::RunAs,
    shared::Shared,
    snapshot,
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
    pub(crate) fn from_shared(shared: Shared) -> Self {
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

#[async_trait]
impl SandboxBackend for BwrapHost {
    fn id(&self) -> BackendId {
        BackendId::new(ID)
    }

    async fn probe(&self) -> Result<Capabilities> {
        let probed = self.shared.probed.get_or_try_init(|| probe::probe(&self.shared, self)).await;
        probed.cloned().map_err(|error| error.with_backend(&self.id()))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let layers = match &request.from {
            Some(snapshot) => layers::layers_of("provision", snapshot)?,
            None => Vec::new(),
        };
        let made = provision::on_layers(&self.shared, request, layers).await;
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
        let deleted = blocking("delete snapshot", move || layers::delete(&state, &snapshot)).await;
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
        let measured = blocking("measure the snapshot", move || layers::size_of(&state, &id)).await;
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
                let started =
                    provision::start_again(&self.shared, &self.dir(instance), marks, request).await;
                started.map_err(|error| about(error, instance))
            }
        }
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.on("teardown", instance, |shared, dir| {
            dir.remove(&shared.state)?;
            layers::collect(&shared.state)
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
