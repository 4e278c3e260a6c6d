//! A backend in one file, as somebody would write it in an afternoon: read it from top to bottom.
//!
//! A sandbox is a directory with a copy of its workspace, and the guest in a table of processes of its own:
//! the program `unshare` of util-linux makes a process id namespace, whose first process is the guest. When
//! that ends, the kernel ends all others. A snapshot is a copy of the directory.
//!
//! That is not much, and its [`probe`](SandboxBackend::probe) says so: it keeps nobody from the host's files
//! and network, and has no limits. Everything else that a sandbox can do (commands, terminals, files,
//! shell sessions, deadlines, output that survives a cut connection) comes with the guest and the core.
//!
//! `examples/tests/custom_backend.rs` runs the conformance suite on it; the program `custom_backend` uses it.

use std::{
    fs,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use jiff::Timestamp;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Feature, Found, GuestBinaries, GuestSetup,
    GuestStream, Instance, InstanceState, Level, LocalReach, Network, Provision, Reachability,
    Result, Root, SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, Usage,
    WorkspaceMode, directories,
};
use serde::{Deserialize, Serialize};

/// How long a guest may take to come up, or to end when it is killed. Both take milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

const WHY: &str =
    "sandboxes have a table of processes of their own, and everything else is the host's";

const CAN: [Feature; 6] = [
    Feature::NetworkHost,
    Feature::Pty,
    Feature::Snapshot,
    Feature::SnapshotLive,
    Feature::SparseSnapshots,
    Feature::Stop,
];

/// See the [module](self). All that it knows is in its directory, so that any process can use it.
#[derive(Debug, Clone)]
pub struct CustomBackend {
    state: Arc<PathBuf>,
}

/// What is written down about an instance: how it is found again, and whose it is.
#[derive(Serialize, Deserialize)]
struct Marks {
    request: Provision,
    created_at: Timestamp,
}

/// A guest, as this host counts processes. Its start time tells it from a later one with its number.
#[derive(Serialize, Deserialize)]
struct Guest {
    pid: u32,
    started: u64,
}

// ── The contract: what is made, how it is spoken to, how it ends. ──────────────────────────────────────

#[async_trait]
impl SandboxBackend for CustomBackend {
    fn id(&self) -> BackendId {
        BackendId::new("custom")
    }

    async fn probe(&self) -> Result<Capabilities> {
        // Not what version there is, but whether it works.
        let tried = self.blocking(|_| run(&mut unshare("true".as_ref()), "probe")).await;
        tried.map_err(|error| {
            let message = "`unshare` of util-linux makes no namespaces here";
            Error::new(ErrorKind::Unavailable, "probe", message).with_source(error)
        })?;
        let found = Capabilities::new(self.id(), "unshare and directories");
        let why = "it takes no more than processes and files";
        let found = CAN.into_iter().fold(found, |found, what| found.with(what, Level::Full, why));
        Ok(found.with_nothing_else(WHY))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        refuse(request)?;
        let request = request.clone();
        self.blocking(move |this| {
            let made = this.make(&request);
            if made.is_err() {
                // After an error nothing of it is left.
                this.remove(&this.describe(&request))?;
            }
            made
        })
        .await
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        let dir = self.dir(instance);
        match tokio::net::UnixStream::connect(dir.join("socket")).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) if Guest::of(&dir).is_none() => {
                let words = fs::read_to_string(dir.join("log")).unwrap_or_default();
                let message = format!("the guest does not run; it said last: {:?}", words.trim());
                Err(Error::new(ErrorKind::Lost, "connect", message).with_source(error))
            }
            Err(error) => Err(Error::io("connect", "the guest's socket", error)),
        }
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        Ok(state_of(&self.dir(instance)))
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        let dir = self.dir(instance);
        let gone = || Error::new(ErrorKind::Lost, "reachability", "the guest does not run");
        let (guest, _) = Guest::of(&dir).ok_or_else(gone)?;
        Ok(Reachability::Local(LocalReach::new(guest.pid, dir.join("workspace"))))
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.on("stop", self.dir(instance), end).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let (dir, instance, request) = (self.dir(instance), instance.clone(), request.clone());
        self.blocking(move |this| match state_of(&dir) {
            InstanceState::Gone => {
                Err(Error::new(ErrorKind::Lost, "start", "the instance's files are gone"))
            }
            InstanceState::Stopped => this.launch(&dir, &request).map(|()| instance),
            _ => Ok(instance),
        })
        .await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        let instance = instance.clone();
        self.blocking(move |this| this.remove(&instance)).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.blocking(|this| {
            let mut found = Vec::new();
            let dir = this.state.join("instances");
            for entry in fs::read_dir(&dir).map_err(at("inventory", &dir))? {
                let dir = entry.map_err(at("inventory", &dir))?.path();
                // One that is just being made or removed has no marks.
                let Some(Marks { request, created_at }) = Marks::of(&dir) else { continue };
                let (instance, state) = (this.describe(&request), state_of(&dir));
                found.push(Found { instance, owner: request.owner, state, created_at });
            }
            Ok(found)
        })
        .await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        const OPERATION: &str = "snapshot";
        let (id, backend) = (request.snapshot.clone(), self.id());
        let data = SnapshotData { id, backend, size: None, data: serde_json::Value::Null };
        let workspace = self.dir(&request.instance).join("workspace");
        let files = self.files_of(&data);
        self.blocking(move |_| {
            if files.exists() {
                return Ok(());
            }
            // Whole or not at all: asked again after a crash, a half copy is made anew.
            let half = files.with_extension("half");
            remove(&half).map_err(at(OPERATION, &half))?;
            let copied = copy(&workspace, &half, OPERATION);
            copied.and_then(|()| fs::rename(&half, &files).map_err(at(OPERATION, &files)))
        })
        .await?;
        Ok(SnapshotTaken { data, successor: None })
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        self.on("measure", self.files_of(snapshot), directories::size).await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        let files = self.files_of(snapshot);
        self.on("delete snapshot", files.with_extension("half"), remove).await?;
        self.on("delete snapshot", files, remove).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        let (dir, since) = (self.dir(instance), since.map(|since| self.files_of(since)));
        self.blocking(move |_| {
            let Some(marks) = Marks::of(&dir) else {
                return Err(Error::new(ErrorKind::Lost, "changes", "the instance is gone"));
            };
            let then = since.or(marks.request.spec.workspace);
            let (now, shown) = (dir.join("workspace"), Path::new(sandbox_core::WORKSPACE));
            directories::compare(&now, then.as_deref(), shown).map_err(at("changes", &now))
        })
        .await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        let size = self.on("usage", self.dir(instance).join("workspace"), directories::size).await;
        let gone = |error| {
            let message = "the instance's files are gone";
            Error::new(ErrorKind::Lost, "usage", message).with_source(error)
        };
        let mut usage = Usage::default();
        usage.disk = Some(size.map_err(gone)?);
        Ok(usage)
    }

    // What cannot be had is an error that says why; the probe has said so beforehand.

    async fn attach(&self, _: &str, _: &Provision) -> Result<Instance> {
        Err(Error::unsupported("attach", "there are no places here that somebody else made"))
    }

    async fn pause(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("pause", WHY))
    }

    async fn resume(&self, _: &Instance) -> Result<()> {
        Err(Error::unsupported("resume", WHY))
    }
}

/// Fail closed: what cannot be enforced is refused before anything is made.
fn refuse(request: &Provision) -> Result<()> {
    let spec = &request.spec;
    let limits = &spec.limits;
    let refused = [
        (spec.network != Network::Host, "the network cannot be denied"),
        (limits.pids.is_some(), "the number of processes cannot be limited"),
        (limits.memory.is_some(), "memory cannot be limited"),
        (limits.cpu_millis.is_some(), "CPU time cannot be limited"),
        (spec.root != Root::Standard, "there is no root directory of its own"),
        (!spec.mounts.is_empty(), "nothing can be mounted"),
        (spec.workspace_mode != WorkspaceMode::Private, "the workspace is always a copy"),
    ];
    match refused.into_iter().find(|(asked, _)| *asked) {
        Some((_, what)) => Err(Error::unsupported("provision", format!("{what}: {WHY}"))),
        None => Ok(()),
    }
}

// ── Making an instance: a directory, a copy, and a guest. ──────────────────────────────────────────────

impl CustomBackend {
    /// With its state in this directory.
    ///
    /// # Errors
    ///
    /// If the directory cannot be made.
    pub fn new(state: &Path) -> Result<Self> {
        for dir in ["instances", "snapshots"].map(|name| state.join(name)) {
            fs::create_dir_all(&dir).map_err(at("prepare", &dir))?;
        }
        Ok(Self { state: Arc::new(state.to_owned()) })
    }

    fn dir(&self, instance: &Instance) -> PathBuf {
        self.state.join("instances").join(instance.id.as_str())
    }

    fn files_of(&self, snapshot: &SnapshotData) -> PathBuf {
        self.state.join("snapshots").join(snapshot.id.as_str())
    }

    fn describe(&self, request: &Provision) -> Instance {
        let (id, sandbox) = (request.instance.clone(), request.sandbox.clone());
        Instance { id, sandbox, backend: self.id(), data: serde_json::Value::Null }
    }

    fn make(&self, request: &Provision) -> Result<Instance> {
        const OPERATION: &str = "provision";
        let instance = self.describe(request);
        let dir = self.dir(&instance);
        // The marks come first: whatever is made from here on can be found, and removed.
        let marks = Marks { request: request.clone(), created_at: Timestamp::now() };
        let mark = || {
            fs::create_dir(&dir)?;
            fs::write(dir.join("marks.json"), serde_json::to_vec(&marks)?)
        };
        mark().map_err(at(OPERATION, &dir))?;
        let workspace = dir.join("workspace");
        match (&request.from, &request.spec.workspace) {
            (Some(snapshot), _) => copy(&self.files_of(snapshot), &workspace, OPERATION)?,
            (None, Some(source)) => copy(source, &workspace, OPERATION)?,
            (None, None) => fs::create_dir(&workspace).map_err(at(OPERATION, &workspace))?,
        }
        self.launch(&dir, request)?;
        Ok(instance)
    }

    /// Starts a guest and waits until it can be connected to.
    fn launch(&self, dir: &Path, request: &Provision) -> Result<()> {
        const OPERATION: &str = "start the guest";
        let program =
            GuestBinaries::standard()?.get(std::env::consts::ARCH)?.install(&self.state)?;
        let text = |name: &str| dir.join(name).to_string_lossy().into_owned();
        let mut setup = request.guest_setup();
        setup.listen_path = Some(text("socket"));
        setup.workspace = text("workspace");
        let base = [("PATH", "/usr/local/bin:/usr/bin:/bin".into()), ("HOME", text("workspace"))];
        setup.env.splice(0..0, base.map(|(key, value)| (key.to_owned(), value)));
        let start = || {
            let _ = fs::remove_file(dir.join("socket"));
            unshare(&program)
                .args(["init", "--setup-stdin"])
                // Not the harness's: neither its environment, nor its terminal and what is typed there.
                .env_clear()
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(fs::File::create(dir.join("log"))?)
                .spawn()
        };
        let mut child = start().map_err(at(OPERATION, dir))?;
        if let Err(error) = come_up(&mut child, dir, &setup) {
            // Killed, it takes the guest with it.
            let _ = child.kill().and_then(|()| child.wait());
            let words = fs::read_to_string(dir.join("log")).unwrap_or_default();
            let message = format!("the guest did not come up: {}", words.trim());
            return Err(Error::new(ErrorKind::Backend, OPERATION, message).with_source(error));
        }
        // The guest may outlive this process, which reaps it if it does not.
        std::thread::spawn(move || child.wait());
        Ok(())
    }

    fn remove(&self, instance: &Instance) -> Result<()> {
        let dir = self.dir(instance);
        end(&dir).and_then(|()| remove(&dir)).map_err(at("teardown", &dir))
    }

    /// Something about files and processes, done where waiting for them holds nobody up.
    async fn on<T: Send + 'static>(
        &self,
        operation: &'static str,
        path: PathBuf,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.blocking(move |_| work(&path).map_err(at(operation, &path))).await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&this)).await;
        let broken_off = |error| {
            Err(Error::new(ErrorKind::Backend, "work", "it was broken off").with_source(error))
        };
        done.unwrap_or_else(broken_off)
    }
}

impl Marks {
    fn of(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join("marks.json")).ok()?).ok()
    }
}

/// Notes which process the guest is, tells it what it is to do, and waits until it listens. A guest that is
/// told nothing, as its harness has ended, ends too: there is none that is not noted.
fn come_up(unshare: &mut Child, dir: &Path, setup: &GuestSetup) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut input = unshare.stdin.take();
    loop {
        if let Some(guest) = input.as_ref().and_then(|_| Guest::below(unshare)) {
            fs::write(dir.join("guest.json"), serde_json::to_vec(&guest)?)?;
            let setup = serde_json::to_vec(setup)?;
            let length = u32::try_from(setup.len()).map_err(io::Error::other)?;
            if let Some(mut input) = input.take() {
                input.write_all(&length.to_be_bytes())?;
                input.write_all(&setup)?;
            }
        } else if dir.join("socket").exists() {
            return Ok(());
        }
        if unshare.try_wait()?.is_some() || Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A program as the first process of a table of its own, which ends with `unshare` itself.
fn unshare(program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-current-user", "--pid", "--fork", "--kill-child"]);
    command.args(["--mount-proc", "--"]).arg(program);
    command
}

// ── How it runs, and how it ends. ──────────────────────────────────────────────────────────────────────

fn state_of(dir: &Path) -> InstanceState {
    match (dir.exists(), Guest::of(dir)) {
        (false, _) => InstanceState::Gone,
        (true, None) => InstanceState::Stopped,
        (true, Some(_)) => InstanceState::Running,
    }
}

/// Kills the guest; the kernel kills whatever else it has in its table, and lets it go last.
fn end(dir: &Path) -> io::Result<()> {
    let Some((_, handle)) = Guest::of(dir) else { return Ok(()) };
    pidfd_send_signal(&handle, Signal::KILL)?;
    let patience = Timespec::try_from(PATIENCE).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&patience))? {
        0 => Err(io::Error::new(io::ErrorKind::TimedOut, "its processes do not end")),
        _ => Ok(()),
    }
}

impl Guest {
    /// The one that runs in this directory, with what stands for it and no other process.
    fn of(dir: &Path) -> Option<(Self, OwnedFd)> {
        let noted: Self = serde_json::from_slice(&fs::read(dir.join("guest.json")).ok()?).ok()?;
        let pid = Pid::from_raw(i32::try_from(noted.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        (started(noted.pid)? == noted.started).then_some((noted, handle))
    }

    /// The only child of `unshare`, once it has one.
    fn below(unshare: &Child) -> Option<Self> {
        let pid = unshare.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        let pid = children.trim().parse().ok()?;
        Some(Self { pid, started: started(pid)? })
    }
}

/// When a process was started, unless it has ended.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(started)
}

// ── Files. ─────────────────────────────────────────────────────────────────────────────────────────────

/// Copies a directory with everything that a snapshot keeps.
fn copy(from: &Path, to: &Path, operation: &'static str) -> Result<()> {
    let mut command = Command::new("cp");
    command.args(["-a", "--sparse=always", "--reflink=auto", "--"]).arg(from).arg(to);
    run(&mut command, operation)
}

fn run(command: &mut Command, operation: &'static str) -> Result<()> {
    let program = Path::new(command.get_program()).to_owned();
    let output = command.output().map_err(at(operation, &program))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let message = format!("{} ({}): {}", program.display(), output.status, said.trim());
    Err(Error::new(ErrorKind::Backend, operation, message))
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn at<'a>(operation: &'static str, path: &'a Path) -> impl Fn(io::Error) -> Error + 'a {
    move |error| Error::io(operation, path.display().to_string(), error)
}
