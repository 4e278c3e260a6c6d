//! A backend for hosts with nothing: plain directories, and the guest as an ordinary process.
//!
//! It isolates nothing, and says so. It is for tests of what stands above backends, and of this suite:
//! what passes on it does so without the help of containers and namespaces.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use jiff::Timestamp;
use rustix::process::{Pid, Signal, kill_process};
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Feature, Found, GuestBinaries, GuestStream,
    Instance, InstanceState, Level, LocalReach, Network, Provision, Reachability, Result, Root,
    SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, Usage, WorkspaceMode,
    directories,
};

const ID: &str = "directory";

/// In the environment of all that belongs to an instance.
const MARK: &str = "DIRECTORY_BACKEND_INSTANCE";

/// Likewise for all of one state directory.
const STATE_MARK: &str = "DIRECTORY_BACKEND_STATE";

/// How long a guest may take to come up, or to end when it is told to.
const PATIENCE: Duration = Duration::from_secs(20);

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct DirectoryBackend {
    state: Arc<PathBuf>,
    id: BackendId,
}

/// What is written down about an instance.
#[derive(serde::Serialize, serde::Deserialize)]
struct Marks {
    request: Provision,
    created_at: Timestamp,
}

impl DirectoryBackend {
    /// With its state in this directory.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self { state: Arc::new(state.to_owned()), id: BackendId::new(ID) }
    }

    /// The same under another id, for managers with several.
    #[must_use]
    pub fn called(mut self, id: &str) -> Self {
        self.id = BackendId::new(id);
        self
    }

    /// The directory that an instance shows as its workspace.
    #[must_use]
    pub fn workspace(&self, instance: &Instance) -> PathBuf {
        self.dir(instance).join("workspace")
    }

    /// The directory that a snapshot's files are in.
    ///
    /// # Errors
    ///
    /// If it is not one of this backend's.
    pub fn files_of(snapshot: &SnapshotData) -> Result<PathBuf> {
        let path = snapshot.data["files"].as_str().map(PathBuf::from);
        path.ok_or_else(|| Error::new(ErrorKind::Backend, "snapshot", "it is another backend's"))
    }

    /// Ends every process of every instance that was ever made here, known or not; for tests that leave
    /// some on purpose.
    pub fn end_all(&self) {
        let state = self.state.to_string_lossy().into_owned();
        for pid in marked(&format!("{STATE_MARK}={state}")).unwrap_or_default() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    fn dir(&self, instance: &Instance) -> PathBuf {
        self.state.join("i").join(instance.id.as_str())
    }

    fn describe(&self, request: &Provision) -> Instance {
        Instance {
            id: request.instance.clone(),
            sandbox: request.sandbox.clone(),
            backend: self.id(),
            data: serde_json::Value::Null,
        }
    }

    fn make(&self, request: &Provision) -> Result<Instance> {
        refuse(request)?;
        let instance = self.describe(request);
        let dir = self.dir(&instance);
        let made = || {
            fs::create_dir_all(&dir)?;
            let marks = Marks { request: request.clone(), created_at: Timestamp::now() };
            fs::write(dir.join("marks.json"), serde_json::to_vec(&marks)?)?;
            let workspace = dir.join("workspace");
            match (&request.from, &request.spec.workspace) {
                (Some(snapshot), _) => {
                    copy(&Self::files_of(snapshot).map_err(io::Error::other)?, &workspace)
                }
                (None, Some(source)) => copy(source, &workspace),
                (None, None) => fs::create_dir(workspace),
            }
        };
        let done = made().map_err(at("provision", &dir)).and_then(|()| self.launch(&dir, request));
        if let Err(error) = done {
            self.remove(&instance)?;
            return Err(error);
        }
        Ok(instance)
    }

    /// Starts a guest and waits until it can be connected to.
    fn launch(&self, dir: &Path, request: &Provision) -> Result<()> {
        let program = self.program()?;
        let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
        let mut setup = request.guest_setup();
        setup.listen_path = Some(path("socket"));
        setup.workspace = path("workspace");
        let base = [
            ("PATH", "/usr/local/bin:/usr/bin:/bin".to_owned()),
            ("HOME", path("workspace")),
            (MARK, request.instance.to_string()),
            (STATE_MARK, self.state.to_string_lossy().into_owned()),
        ];
        setup.env.splice(0..0, base.map(|(key, value)| (key.to_owned(), value)));
        let log = dir.join("log");
        let start = || {
            fs::write(dir.join("setup.json"), serde_json::to_vec(&setup)?)?;
            let mut command = Command::new(&program);
            command.args(["init", "--setup"]).arg(dir.join("setup.json"));
            command.env_clear();
            command.env(MARK, request.instance.as_str()).env(STATE_MARK, &*self.state);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log)?);
            let mut child = command.spawn()?;
            fs::write(dir.join("guest"), identity(child.id()).unwrap_or_default())?;
            // It may outlive this process, which reaps it if it does not.
            std::thread::spawn(move || child.wait());
            Ok(())
        };
        start().map_err(at("start the guest", dir))?;
        let deadline = Instant::now() + PATIENCE;
        while !dir.join("socket").exists() {
            if guest(dir).is_none() || Instant::now() > deadline {
                let said = fs::read_to_string(&log).unwrap_or_default();
                let message = format!("the guest did not come up: {said}");
                return Err(Error::new(ErrorKind::Backend, "start the guest", message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The guest program, written once for this state directory.
    fn program(&self) -> Result<PathBuf> {
        fs::create_dir_all(&*self.state).map_err(at("prepare", &self.state))?;
        GuestBinaries::standard()?.get(std::env::consts::ARCH)?.install(&self.state)
    }

    /// Ends everything of an instance.
    fn end(&self, instance: &Instance) -> Result<()> {
        let dir = self.dir(instance);
        if let Some(pid) = guest(&dir) {
            // Asked to end, it would still tell how its processes ended by its own hand.
            let _ = kill_process(pid, Signal::KILL);
            let deadline = Instant::now() + PATIENCE;
            while guest(&dir).is_some() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        // What it leaves: all that carries the mark, or descends from what does. What starts another and
        // ends while it is looked for can be missed; so can what is just becoming another program.
        let deadline = Instant::now() + PATIENCE;
        let mut looks = 0;
        while looks < 3 {
            let left = marked(&format!("{MARK}={}", instance.id)).map_err(at("end", &dir))?;
            looks = if left.is_empty() { looks + 1 } else { 0 };
            if Instant::now() > deadline {
                let message = format!("processes do not end: {left:?}");
                return Err(Error::new(ErrorKind::Backend, "end", message));
            }
            for pid in left {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = fs::remove_file(dir.join("socket"));
        Ok(())
    }

    fn remove(&self, instance: &Instance) -> Result<()> {
        self.end(instance)?;
        let dir = self.dir(instance);
        remove(&dir).map_err(at("teardown", &dir))
    }

    fn marks(&self, dir: &Path) -> io::Result<Marks> {
        Ok(serde_json::from_slice(&fs::read(dir.join("marks.json"))?)?)
    }

    fn state_of(&self, instance: &Instance) -> InstanceState {
        let dir = self.dir(instance);
        match (dir.exists(), guest(&dir)) {
            (false, _) => InstanceState::Gone,
            (true, None) => InstanceState::Stopped,
            (true, Some(_)) => InstanceState::Running,
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&this)).await;
        done.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::Backend, "work", "the work was broken off")
                .with_source(error))
        })
    }
}

#[async_trait]
impl SandboxBackend for DirectoryBackend {
    fn id(&self) -> BackendId {
        self.id.clone()
    }

    async fn probe(&self) -> Result<Capabilities> {
        let no = "sandboxes are ordinary processes in ordinary directories";
        let mut found = Capabilities::new(self.id(), "directories");
        for feature in [Feature::NetworkHost, Feature::Stop, Feature::Pty] {
            found = found.with(feature, Level::Full, no);
        }
        for feature in [Feature::Snapshot, Feature::SnapshotLive, Feature::SparseSnapshots] {
            found = found.with(feature, Level::Full, "the directory is copied");
        }
        Ok(found.with_nothing_else(no))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let request = request.clone();
        self.blocking(move |this| this.make(&request)).await
    }

    async fn attach(&self, _: &str, _: &Provision) -> Result<Instance> {
        let reason = "a directory is no place that somebody else made";
        Err(Error::unsupported("attach", reason))
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        let dir = self.dir(instance);
        match tokio::net::UnixStream::connect(dir.join("socket")).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) if guest(&dir).is_none() => {
                let message = "the guest does not run";
                Err(Error::new(ErrorKind::Lost, "connect", message).with_source(error))
            }
            Err(error) => {
                let message = "the guest's socket";
                Err(Error::new(ErrorKind::Unavailable, "connect", message).with_source(error))
            }
        }
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        Ok(self.state_of(instance))
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        let pid = guest(&self.dir(instance)).and_then(|pid| u32::try_from(pid.as_raw_pid()).ok());
        let pid = pid
            .ok_or_else(|| Error::new(ErrorKind::Lost, "reachability", "the guest does not run"))?;
        Ok(Reachability::Local(LocalReach::new(pid, self.workspace(instance))))
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        let request = request.clone();
        self.blocking(move |this| {
            let files = this.state.join("s").join(request.snapshot.as_str());
            let taken = || {
                fs::create_dir_all(this.state.join("s"))?;
                copy(&this.workspace(&request.instance), &files)
            };
            if let Err(error) = taken() {
                let _ = remove(&files);
                return Err(at("snapshot", &files)(error));
            }
            let data = SnapshotData {
                id: request.snapshot.clone(),
                backend: this.id(),
                size: None,
                data: serde_json::json!({ "files": files }),
            };
            Ok(SnapshotTaken { data, successor: None })
        })
        .await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        let files = Self::files_of(snapshot)?;
        self.blocking(move |_| remove(&files).map_err(at("delete snapshot", &files))).await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        let files = Self::files_of(snapshot)?;
        self.blocking(move |_| directories::size(&files).map_err(at("measure", &files))).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        let (dir, now) = (self.dir(instance), self.workspace(instance));
        let then = since.map(Self::files_of).transpose()?;
        self.blocking(move |this| {
            let marks = this.marks(&dir).map_err(at("changes", &dir))?;
            let then = then.or(marks.request.spec.workspace);
            directories::compare(&now, then.as_deref(), Path::new("/workspace"))
                .map_err(at("changes", &now))
        })
        .await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        let instance = instance.clone();
        self.blocking(move |this| {
            let workspace = this.workspace(&instance);
            if !workspace.exists() {
                return Err(Error::new(ErrorKind::Lost, "usage", "its files are gone"));
            }
            let mut usage = Usage::default();
            // All of its directory is its own: a copy.
            usage.disk = directories::size(&workspace).ok();
            Ok(usage)
        })
        .await
    }

    async fn pause(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("pause", "nothing here holds processes up"))
    }

    async fn resume(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("resume", "nothing here holds processes up"))
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        let instance = instance.clone();
        self.blocking(move |this| this.end(&instance)).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let (instance, request) = (instance.clone(), request.clone());
        self.blocking(move |this| {
            let dir = this.dir(&instance);
            if guest(&dir).is_none() {
                if !dir.exists() {
                    return Err(Error::new(ErrorKind::Lost, "start", "its files are gone"));
                }
                this.end(&instance)?;
                this.launch(&dir, &request)?;
            }
            Ok(instance)
        })
        .await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        let instance = instance.clone();
        self.blocking(move |this| this.remove(&instance)).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.blocking(|this| {
            let dir = this.state.join("i");
            let entries = match fs::read_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries.map_err(at("inventory", &dir))?,
            };
            let mut found = Vec::new();
            for entry in entries {
                let path = entry.map_err(at("inventory", &dir))?.path();
                // One that is just being made or removed has no marks.
                let Ok(Marks { request, created_at }) = this.marks(&path) else { continue };
                let instance = this.describe(&request);
                let state = this.state_of(&instance);
                found.push(Found { instance, owner: request.owner, state, created_at });
            }
            Ok(found)
        })
        .await
    }
}

/// What cannot be had here is refused.
fn refuse(request: &Provision) -> Result<()> {
    let spec = &request.spec;
    let limits = &spec.limits;
    let reason = if spec.network == Network::Deny {
        "the network cannot be denied to an ordinary process"
    } else if limits.pids.or(limits.memory).or(limits.cpu_millis).is_some() {
        "nothing limits ordinary processes together"
    } else if spec.root != Root::Standard || !spec.mounts.is_empty() {
        "an ordinary process has no filesystem of its own"
    } else if spec.workspace_mode != WorkspaceMode::Private {
        "the workspace is always a copy here"
    } else {
        return Ok(());
    };
    Err(Error::unsupported("provision", reason))
}

/// Copies a directory with everything that a snapshot keeps.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut command = Command::new("cp");
    let output = command.args(["-a", "--sparse=always", "--"]).arg(from).arg(to).output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(())
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A process's number and start time, unless it has ended.
fn identity(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    let start = fields.nth(18)?;
    (!matches!(state, "Z" | "X")).then(|| format!("{pid} {start}"))
}

/// The guest that runs in this directory.
fn guest(dir: &Path) -> Option<Pid> {
    let known = fs::read_to_string(dir.join("guest")).ok()?;
    let pid: u32 = known.split(' ').next()?.parse().ok()?;
    (identity(pid)? == known).then(|| Pid::from_raw(i32::try_from(pid).ok()?)).flatten()
}

/// The processes with a mark in their environment, and those that descend from them.
fn marked(mark: &str) -> io::Result<Vec<Pid>> {
    let mut parents = Vec::new();
    let mut found = HashSet::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        if identity(pid).is_none() {
            continue;
        }
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        if environ.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            found.insert(pid);
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent =
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parents.push((pid, parent.unwrap_or(0)));
    }
    loop {
        let before = found.len();
        let children = parents.iter().filter(|(_, parent)| found.contains(parent));
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        found.extend(children);
        if found.len() == before {
            break;
        }
    }
    Ok(found.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).collect())
}

fn at<'a>(operation: &'static str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::io(operation, path.display().to_string(), error)
}
