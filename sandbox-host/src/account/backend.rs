//! What the contract of a backend asks for.

use std::{
    fs, io,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use async_trait::async_trait;
use jiff::Timestamp;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Feature, Found, GuestBinaries, GuestStream,
    Instance, InstanceState, Level, LocalReach, Provision, Reachability, Result, SandboxBackend,
    SnapshotData, SnapshotId, SnapshotRequest, SnapshotTaken, Usage,
};

use super::{
    cleanup,
    error::{at, blocking, failed, lost},
    instance::{self, HOME, InstanceDir, Marks, WORKSPACE, private_dir},
    launch, programs,
    refuse::{self, WHY},
    tool, tree,
};
use crate::{changes, message::Isolation, size};

/// Makes sandboxes of the account that it runs as.
#[derive(Debug, Clone)]
pub struct AccountHost {
    /// In instances and snapshots.
    id: BackendId,
    state: Arc<PathBuf>,
    guests: Arc<GuestBinaries>,
}

impl AccountHost {
    /// Under this name, and with its state in this directory.
    #[must_use]
    pub fn new(name: Isolation, state: PathBuf, guests: GuestBinaries) -> Self {
        let id = BackendId::new(name.to_string());
        Self { id, state: Arc::new(state), guests: Arc::new(guests) }
    }

    /// The directory of an instance, whether it is there or not.
    #[cfg(feature = "program")]
    pub(crate) fn directory(&self, instance: &Instance) -> PathBuf {
        self.dir(instance).path().to_owned()
    }

    /// The workspace of an instance, as it is on this host; `None` if the instance is not there.
    #[cfg(feature = "program")]
    pub(crate) fn workspace(&self, instance: &Instance) -> Result<Option<PathBuf>> {
        let dir = self.dir(instance);
        let marks = dir.marks().map_err(at("find the workspace", dir.path()))?;
        Ok(marks.map(|marks| dir.workspace_of(&marks.request.spec)))
    }

    /// A connection to an instance's guest.
    ///
    /// # Errors
    ///
    /// As [`SandboxBackend::connect`].
    pub fn connect_socket(&self, instance: &Instance) -> Result<UnixStream> {
        let dir = self.dir(instance);
        let error = match dir.connect() {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        Err(match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
                let words = dir.last_words().map(|words| format!("; it said last: {words}"));
                let message = format!("the guest does not run{}", words.unwrap_or_default());
                lost("connect", message).with_source(error)
            }
            _ => Error::io("connect", "the guest's socket", error),
        })
    }

    /// Waits until an instance's guest has ended, if one runs.
    ///
    /// # Errors
    ///
    /// If that cannot be told.
    #[cfg(feature = "program")]
    pub(crate) fn wait_for_guest(&self, instance: &Instance) -> Result<()> {
        let dir = self.dir(instance);
        let waited = || match dir.guest()? {
            Some(guest) => guest.wait(),
            None => Ok(()),
        };
        waited().map_err(at("wait for the guest", dir.path()))
    }

    fn instances(&self) -> PathBuf {
        self.state.join("instances")
    }

    fn snapshots(&self) -> PathBuf {
        self.state.join("snapshots")
    }

    fn files_of(&self, snapshot: &SnapshotId) -> PathBuf {
        self.snapshots().join(snapshot.as_str())
    }

    fn dir(&self, instance: &Instance) -> InstanceDir {
        InstanceDir::of(&self.instances(), &instance.id)
    }

    fn prepare(&self) -> Result<()> {
        for dir in [self.instances(), self.snapshots(), self.state.join("guest")] {
            let make = || {
                fs::create_dir_all(&dir)?;
                fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))
            };
            make().map_err(at("prepare the state directory", &dir))?;
        }
        Ok(())
    }

    fn program(&self) -> Result<PathBuf> {
        Ok(programs::guest_dir(&self.guests, &self.state.join("guest"))?.join("guest"))
    }

    /// Copies a directory to where nothing is.
    async fn copy(&self, operation: &'static str, from: PathBuf, to: PathBuf) -> Result<()> {
        let this = self.clone();
        let output = tool::run(operation, "the guest program", move || {
            let mut command = Command::new(this.program()?);
            command.arg("copy-tree").arg(from).arg(to);
            Ok((command, None))
        })
        .await?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(failed(operation, format!("{} ({})", said.trim(), output.status)))
    }

    async fn on<T: Send + 'static>(
        &self,
        operation: &'static str,
        instance: &Instance,
        work: impl FnOnce(&Self, &InstanceDir) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (this, dir) = (self.clone(), self.dir(instance));
        blocking(operation, move || work(&this, &dir)).await
    }

    async fn make(&self, request: &Provision) -> Result<Instance> {
        const OPERATION: &str = "provision";
        refuse::refuse(request, &self.id)?;
        let from = request.from.as_ref().map(|from| self.existing(OPERATION, from)).transpose()?;
        let (dir, made) = {
            let (this, request) = (self.clone(), request.clone());
            let made = blocking(OPERATION, move || {
                this.prepare()?;
                let marks = Marks { request, created_at: Timestamp::now() };
                let instances = this.instances();
                let dir = InstanceDir::create(&instances, &marks)?;
                Ok((dir.clone(), Made { dir: Some(dir), instances }))
            });
            made.await?
        };
        if let Some(from) = from {
            self.copy(OPERATION, from, dir.files()).await?;
        } else {
            let make = || {
                private_dir(&dir.files())?;
                private_dir(&dir.home())
            };
            make().map_err(at(OPERATION, dir.path()))?;
            let workspace = dir.workspace();
            if instance::bound(&request.spec).is_some() {
                // It is there already.
            } else if let Some(source) = &request.spec.workspace {
                self.copy(OPERATION, source.clone(), workspace).await?;
            } else {
                let make = || {
                    private_dir(&workspace)?;
                    fs::set_permissions(&workspace, fs::Permissions::from_mode(0o755))
                };
                make().map_err(at(OPERATION, &workspace))?;
            }
        }
        let launched = {
            let (this, dir, request) = (self.clone(), dir.clone(), request.clone());
            blocking(OPERATION, move || launch::launch(&dir, &this.program()?, &request)).await?
        };
        let marks = dir.marks().map_err(at(OPERATION, dir.path()))?;
        let marks = marks.ok_or_else(|| lost(OPERATION, "it was removed while it was made"))?;
        made.keep();
        Ok(dir.describe(&self.id, &marks, Some(launched)))
    }

    /// The files of a snapshot that is there.
    fn existing(&self, operation: &'static str, snapshot: &SnapshotData) -> Result<PathBuf> {
        if snapshot.backend != self.id {
            let message =
                format!("{} is a snapshot of the backend {}", snapshot.id, snapshot.backend);
            return Err(Error::unsupported(operation, message));
        }
        let files = self.files_of(&snapshot.id);
        if files.is_dir() {
            return Ok(files);
        }
        let message = format!("the snapshot {} is not in {}", snapshot.id, self.state.display());
        Err(Error::new(ErrorKind::NotFound, operation, message))
    }
}

/// A half-made instance; dropping it removes it.
struct Made {
    dir: Option<InstanceDir>,
    instances: PathBuf,
}

impl Made {
    fn keep(mut self) {
        self.dir = None;
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        let instances = std::mem::take(&mut self.instances);
        let removal = cleanup::spawn(move || {
            if let Err(error) = dir.remove(&instances) {
                tracing::warn!(%error, "a half-made instance is left for the inventory");
            }
        });
        if let Err(error) = removal {
            tracing::warn!(%error, "a half-made instance is left for the inventory");
        }
    }
}

#[async_trait]
impl SandboxBackend for AccountHost {
    fn id(&self) -> BackendId {
        self.id.clone()
    }

    async fn probe(&self) -> Result<Capabilities> {
        let this = self.clone();
        let program = blocking("probe", move || {
            this.prepare()?;
            this.program()
        });
        let program = program.await?;
        let output = tool::run("probe", "the guest program", move || {
            let mut command = Command::new(program);
            command.arg("--version");
            Ok((command, None))
        });
        let output = output.await?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !output.status.success() {
            let message = format!("the guest program does not run here ({})", output.status);
            return Err(Error::new(ErrorKind::Unavailable, "probe", message).retryable(false));
        }
        let mut found = Capabilities::new(self.id(), format!("the account alone, {version}"));
        for feature in [
            Feature::NetworkDeny,
            Feature::LimitPids,
            Feature::LimitMemory,
            Feature::LimitCpu,
            Feature::Pause,
            Feature::Users,
            Feature::SyscallFilter,
            Feature::ProcessIsolation,
        ] {
            found = found.with(feature, Level::None, WHY);
        }
        for feature in [Feature::NetworkHost, Feature::Stop, Feature::Pty] {
            found = found.with(feature, Level::Full, WHY);
        }
        for feature in [Feature::Snapshot, Feature::SnapshotLive, Feature::SparseSnapshots] {
            found = found.with(feature, Level::Full, "the files are copied, holes as holes");
        }
        Ok(found)
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        self.make(request).await
    }

    async fn attach(&self, _: &str, _: &Provision) -> Result<Instance> {
        let reason = "a directory is no place that somebody else made";
        Err(Error::unsupported("attach", reason))
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        let (this, instance) = (self.clone(), instance.clone());
        let stream = blocking("connect", move || this.connect_socket(&instance)).await?;
        let stream = stream
            .set_nonblocking(true)
            .and_then(|()| tokio::net::UnixStream::from_std(stream))
            .map_err(|error| Error::io("connect", "the guest's socket", error))?;
        Ok(Box::new(stream))
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.on("inspect", instance, |_, dir| dir.state().map_err(at("inspect", dir.path()))).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.on("reachability", instance, |_, dir| {
            let guest = dir.guest().map_err(at("reachability", dir.path()))?;
            let guest = guest.ok_or_else(|| lost("reachability", "the guest does not run"))?;
            let marks = dir.marks().map_err(at("reachability", dir.path()))?;
            let marks = marks.ok_or_else(|| lost("reachability", "the instance is gone"))?;
            let workspace = dir.workspace_of(&marks.request.spec);
            Ok(Reachability::Local(LocalReach::new(guest.pid, workspace)))
        })
        .await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        const OPERATION: &str = "snapshot";
        let data = SnapshotData {
            id: request.snapshot.clone(),
            backend: self.id(),
            size: None,
            data: serde_json::Value::Null,
        };
        let files = self.files_of(&request.snapshot);
        let (workspace, half) = self
            .on(OPERATION, &request.instance, {
                let files = files.clone();
                move |_, dir| {
                    // Whole, or nothing: a copy has its name when it is done.
                    if files.is_dir() {
                        return Ok((None, None));
                    }
                    let workspace = dir.files();
                    if !workspace.is_dir() {
                        return Err(lost(OPERATION, "the instance's files are gone"));
                    }
                    let half = half_of(&files);
                    tree::remove(&half).map_err(at(OPERATION, &half))?;
                    Ok((Some(workspace), Some(Half(half))))
                }
            })
            .await?;
        if let (Some(workspace), Some(half)) = (workspace, half) {
            self.copy(OPERATION, workspace, half.0.clone()).await?;
            fs::rename(&half.0, &files).map_err(at(OPERATION, &files))?;
        }
        Ok(SnapshotTaken { data, successor: None })
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        const OPERATION: &str = "delete snapshot";
        let files = self.files_of(&snapshot.id);
        blocking(OPERATION, move || {
            let gone = files.with_extension("deleted");
            // It may have been broken off.
            let half = half_of(&files);
            tree::remove(&half).map_err(at(OPERATION, &half))?;
            match fs::rename(&files, &gone) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed.map_err(at(OPERATION, &files))?,
            }
            tree::remove(&gone).map_err(at(OPERATION, &gone))
        })
        .await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        const OPERATION: &str = "measure the snapshot";
        let files = self.existing(OPERATION, snapshot)?;
        blocking(OPERATION, move || size::measure(&files).map_err(at(OPERATION, &files))).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        const OPERATION: &str = "changes";
        let since = since.map(|snapshot| self.existing(OPERATION, snapshot)).transpose()?;
        let (now, bound, workspace, home, program) = self
            .on(OPERATION, instance, move |this, dir| {
                let marks = dir.marks().map_err(at(OPERATION, dir.path()))?;
                let marks = marks.ok_or_else(|| lost(OPERATION, "the instance is gone"))?;
                let home = since.as_ref().map(|since| since.join(HOME));
                let workspace = since.map(|since| since.join(WORKSPACE));
                let bound = instance::bound(&marks.request.spec).is_some();
                let workspace = workspace.or(marks.request.spec.workspace);
                Ok((dir.clone(), bound, workspace, home, this.program()?))
            })
            .await?;
        let output = tool::run(OPERATION, "the guest program", move || {
            let mut command = Command::new(program);
            command.arg("changes");
            let home_is = now.home();
            let parts = [
                (Path::new("/workspace"), now.workspace(), workspace, "755"),
                (&home_is, now.home(), home, "700"),
            ];
            // Of a bound workspace there is nothing that could be compared.
            for (at, now, then, mode) in parts.into_iter().skip(usize::from(bound)) {
                command.arg("part").arg(at).arg("now").arg(now);
                match then {
                    Some(then) => command.arg("then").arg(then),
                    None => command.args(["root-mode", mode]),
                };
            }
            Ok((command, None))
        });
        changes::told(OPERATION, &output.await?)
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.on("usage", instance, |_, dir| {
            let workspace = dir.files();
            if !workspace.exists() {
                return Err(lost("usage", "the instance's files are gone"));
            }
            let mut usage = Usage::default();
            // All of its directory is its own: a copy.
            usage.disk = size::measure(&workspace).ok();
            Ok(usage)
        })
        .await
    }

    async fn pause(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("pause", format!("nothing holds processes up: {WHY}")))
    }

    async fn resume(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("resume", format!("nothing holds processes up: {WHY}")))
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.on("stop", instance, |_, dir| dir.end().map_err(at("stop", dir.path()))).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        const OPERATION: &str = "start";
        let (request, id) = (request.clone(), instance.id.clone());
        self.on(OPERATION, instance, move |this, dir| {
            let marks = dir.marks().map_err(at(OPERATION, dir.path()))?;
            let mut marks = marks.ok_or_else(|| lost(OPERATION, "its files are gone"))?;
            if let Some(running) = dir.guest().map_err(at(OPERATION, dir.path()))? {
                return Ok(dir.describe(&this.id, &marks, Some(running)));
            }
            dir.end().map_err(at(OPERATION, dir.path()))?;
            marks.request = request;
            marks.request.instance = id;
            dir.write_marks(&marks).map_err(at(OPERATION, dir.path()))?;
            let guest = launch::launch(dir, &this.program()?, &marks.request)?;
            Ok(dir.describe(&this.id, &marks, Some(guest)))
        })
        .await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.on("teardown", instance, |this, dir| dir.remove(&this.instances())).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        let (id, instances) = (self.id.clone(), self.instances());
        blocking("inventory", move || instance::all(&id, &instances)).await
    }
}

/// Where a snapshot is copied to before it is one.
fn half_of(files: &Path) -> PathBuf {
    files.with_file_name(format!(".new-{}", files.file_name().unwrap_or_default().display()))
}

/// A copy that is being made; what is left of it is removed with this.
struct Half(PathBuf);

impl Drop for Half {
    fn drop(&mut self) {
        let path: &Path = &self.0;
        if path.exists() {
            let path = path.to_owned();
            let _ = cleanup::spawn(move || {
                let _ = tree::remove(&path);
            });
        }
    }
}
