//! Starting bwrap, and through it the guest.

use std::{
    fs, io,
    io::{Seek, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, memfd_create},
};
use sandbox_core::{
    Access, Error, ErrorKind, Limits, Network, Result, Root, SandboxSpec, WorkspaceMode,
};
use sandbox_guest::preamble;
use tokio::sync::watch;

use crate::cleanup;

use super::{
    accounts,
    cgroup::{Available, Controller, Joined},
    error::{at, blocking, doing, failed},
    explain,
    host::HostView,
    instance::{InstanceDir, Marks},
    plan::{self, Fds, GuestLimits, Identity, Input, Sources},
    process::{BwrapInfo, Guest},
    programs::find_program,
    run_as::RunAs,
    shared::Shared,
    staging::{Kind, Wanted},
    sys::ChildSetup,
};

/// How long a guest may take to come up. It takes milliseconds; a machine that swaps takes longer.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long bwrap may take to end after its guest has.
const AFTERMATH: Duration = Duration::from_secs(2);
/// The kernel that began to count a user's processes for each user namespace by itself.
const COUNTS_BY_NAMESPACE: (u32, u32) = (5, 14);

/// What keeps a half-made instance, or a half-started guest, from being left behind: dropping it undoes
/// what was done.
#[derive(Debug)]
pub(crate) struct Made {
    shared: Shared,
    dir: Option<InstanceDir>,
    /// Whether the files stay.
    files_stay: bool,
    /// Whether bwrap, if it was started, has ended.
    ended: Option<watch::Receiver<bool>>,
}

impl Made {
    /// Of a new instance: all of it would be removed.
    pub(crate) fn instance(shared: &Shared, dir: &InstanceDir) -> Self {
        Self { shared: shared.clone(), dir: Some(dir.clone()), files_stay: false, ended: None }
    }

    /// Of a new guest on files that were there before: it would be ended.
    pub(crate) fn guest(shared: &Shared, dir: &InstanceDir) -> Self {
        Self { shared: shared.clone(), dir: Some(dir.clone()), files_stay: true, ended: None }
    }

    /// It is made; now it may stay.
    pub(crate) fn keep(mut self) {
        self.dir = None;
    }

    /// Undoes it and waits until that is done.
    pub(crate) async fn undo(mut self) -> Result<()> {
        match self.take() {
            Some(undo) => blocking("provision", undo).await,
            None => Ok(()),
        }
    }

    fn take(&mut self) -> Option<impl FnOnce() -> Result<()> + Send + 'static> {
        let dir = self.dir.take()?;
        let (shared, ended, files_stay) = (self.shared.clone(), self.ended.take(), self.files_stay);
        Some(move || {
            if let Some(ended) = ended {
                until_known(&dir, &ended);
            }
            if files_stay {
                dir.kill().map_err(doing("start", "ending the new guest"))
            } else {
                dir.remove(&shared.state)
            }
        })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let Some(undo) = self.take() else { return };
        let removal = cleanup::spawn(|| {
            if let Err(error) = undo() {
                tracing::warn!(%error, "a cancelled instance is left for the inventory");
            }
        });
        if let Err(error) = removal {
            tracing::warn!(%error, "a cancelled instance is left for the inventory");
        }
    }
}

/// Waits until it is known which process the guest is. bwrap says so before it lets it run; killing
/// bwrap alone would not end it.
fn until_known(dir: &InstanceDir, ended: &watch::Receiver<bool>) {
    let begin = std::time::Instant::now();
    let known = || matches!(BwrapInfo::read(&dir.info()), Ok(Some(_)));
    while !known() && !*ended.borrow() && begin.elapsed() < AFTERMATH {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The limits that the guest has to set because no control group can.
///
/// # Errors
///
/// `Unsupported` if a limit cannot be held here, with the evidence and what to do.
pub(crate) fn guest_limits(available: &Available, limits: &Limits) -> Result<GuestLimits> {
    let refuse = |what: &str, why: String, instead: &str| {
        let message = format!(
            "{what} of a sandbox cannot be limited here: {why}; run the harness as root or in a \
             control group of its own (`systemd-run --user --scope -p Delegate=yes`), {instead}"
        );
        Err(Error::unsupported("provision", message))
    };
    let mut found = GuestLimits::default();
    if let (Some(pids), Err(why)) = (limits.pids, available.evidence(Controller::Pids)) {
        if !counts_by_namespace() {
            return refuse("the processes", why, "or leave the limit out");
        }
        found.processes = Some(pids);
    }
    if let (Some(memory), Err(why)) = (limits.memory, available.evidence(Controller::Memory)) {
        if !limits.per_process_is_enough {
            let instead = "leave the limit out, or accept limits per process";
            return refuse("the memory", why, instead);
        }
        found.address_space = Some(memory);
    }
    if let (Some(_), Err(why)) = (limits.cpu_millis, available.evidence(Controller::Cpu)) {
        return refuse("the CPU time", why, "or leave the limit out");
    }
    Ok(found)
}

/// Whether `RLIMIT_NPROC` counts a sandbox's processes only, and all of them.
pub(crate) fn counts_by_namespace() -> bool {
    let release = rustix::system::uname();
    kernel_version(&release.release().to_string_lossy()).is_some_and(|v| v >= COUNTS_BY_NAMESPACE)
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Starts an instance's guest and waits until it serves. Whatever happens, `made` knows of what was
/// started: also if this is dropped while bwrap is being started.
pub(crate) async fn launch(
    shared: &Shared,
    dir: &InstanceDir,
    marks: &Marks,
    made: Made,
) -> Result<(Made, Guest)> {
    let (made, mut ended) = {
        let (shared, dir, marks) = (shared.clone(), dir.clone(), marks.clone());
        let mut made = made;
        let started = blocking("provision", move || {
            let started = start(&shared, &dir, &marks).map(watch_end);
            made.ended = started.as_ref().ok().cloned();
            Ok((made, started))
        });
        match started.await? {
            (made, Ok(ended)) => (made, ended),
            (made, Err(error)) => return Err(undone(made, error).await),
        }
    };
    match until_it_serves(shared, dir, &mut ended).await {
        Ok(guest) => Ok((made, guest)),
        Err(error) => Err(undone(made, error).await),
    }
}

/// The error, once what was made is gone.
async fn undone(made: Made, error: Error) -> Error {
    match made.undo().await {
        Ok(()) => error,
        Err(leftover) => {
            tracing::warn!(error = %leftover, "a failed instance is left for the inventory");
            error
        }
    }
}

/// Notices bwrap's end and clears its entry in the process table for as long as there is a runtime;
/// afterwards the harness is about to end, and then that is somebody else's.
fn watch_end(mut bwrap: tokio::process::Child) -> watch::Receiver<bool> {
    let (tell, ended) = watch::channel(false);
    tokio::spawn(async move {
        let status = bwrap.wait().await;
        tracing::debug!(?status, "bwrap ended");
        let _ = tell.send(true);
    });
    ended
}

async fn until_it_serves(
    shared: &Shared,
    dir: &InstanceDir,
    ended: &mut watch::Receiver<bool>,
) -> Result<Guest> {
    let greeted = tokio::time::timeout(PATIENCE, async {
        tokio::select! {
            greeted = greet(dir) => greeted,
            _ = ended.wait_for(|ended| *ended) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    })
    .await;
    let why = match greeted {
        Ok(Ok(())) => {
            let dir = dir.clone();
            return blocking("provision", move || {
                let found = dir.guest().map_err(at("provision", &dir.info()))?;
                found.ok_or_else(|| failed("provision", "the guest came up and ended at once"))
            })
            .await;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => {
            let message = format!("the guest did not come up within {PATIENCE:?}");
            return Err(Error::new(ErrorKind::Timeout, "provision", message));
        }
    };
    // Whatever ended the connection, the reason is what bwrap or the guest says when it ends.
    let _ = tokio::time::timeout(AFTERMATH, ended.wait_for(|ended| *ended)).await;
    let (shared, dir) = (shared.clone(), dir.clone());
    blocking("provision", move || Err(explain::explain(&shared, &dir.last_words().unwrap_or(why))))
        .await
}

/// Waits for the guest to answer: then its set-up has succeeded. The socket is there before it is.
async fn greet(dir: &InstanceDir) -> io::Result<()> {
    let mut stream = dir.connect().await?;
    preamble::exchange(&mut stream).await
}

fn start(shared: &Shared, dir: &InstanceDir, marks: &Marks) -> Result<tokio::process::Child> {
    const OPERATION: &str = "provision";
    let request = &marks.request;
    let view = HostView::look(Path::new("/")).map_err(doing(OPERATION, "looking at this host"))?;
    let wanted = wanted(shared, dir, marks, &view)?;
    let staged = shared.stager.stage(OPERATION, &wanted)?;
    let joined = match &marks.groups {
        Some(groups) => groups
            .make(&request.spec.limits)
            .map_err(doing(OPERATION, "making the sandbox's control groups"))?,
        None => Joined::default(),
    };
    let listener = dir.listen().map_err(doing(OPERATION, "making the guest's socket"))?;
    let (info, log) = (dir.info(), dir.log());
    let info: OwnedFd = private_file(&info).map_err(at(OPERATION, &info))?.into();
    let log = private_file(&log).map_err(at(OPERATION, &log))?;
    let memory = memfd_create("sandbox-setup", MemfdFlags::CLOEXEC)
        .map_err(|error| doing(OPERATION, "making room for the guest's set-up")(error.into()))?;
    let mut memory = fs::File::from(memory);

    let network = match request.spec.network {
        Network::Host => {
            let read = |path| fs::read_to_string(path).unwrap_or_default();
            Some((read("/etc/hosts"), read("/etc/resolv.conf")))
        }
        _ => None,
    };
    let accounts = match &request.spec.root {
        Root::Directory(root) => accounts::missing(root).map_err(at(OPERATION, root))?,
        _ => Vec::new(),
    };
    let host = network.as_ref().map(|(hosts, resolv)| (hosts.as_str(), resolv.as_str()));
    let input = Input {
        request,
        layers: &marks.layers,
        view: &view,
        sources: &sources(&staged.paths, request.spec.workspace.is_some()),
        fds: Fds {
            info: info.as_raw_fd(),
            setup: memory.as_raw_fd(),
            listen: listener.as_raw_fd(),
            oom: joined.oom.as_ref().map(AsRawFd::as_raw_fd),
        },
        guest_limits: guest_limits(shared.available(), &request.spec.limits)?,
        identity: &Identity::new(request, host).with(accounts),
    };
    let setup = serde_json::to_vec(&plan::setup(&input)?)
        .map_err(|error| failed(OPERATION, "the guest's set-up").with_source(error))?;
    memory
        .write_all(&setup)
        .and_then(|()| memory.rewind())
        .map_err(doing(OPERATION, "writing the guest's set-up"))?;

    let mut command = Command::new(find_program(&shared.program)?);
    command.args(plan::arguments(&input)).env_clear().current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut keep = vec![info, memory.into(), listener.into()];
    keep.extend(joined.oom);
    let limits = &request.spec.limits;
    let limited = limits.pids.is_some() || limits.memory.is_some() || limits.cpu_millis.is_some();
    ChildSetup {
        keep,
        groups: joined.procs,
        groups_are_required: limited,
        stage: staged.stage,
        die_with_thread: false,
    }
    .apply(&mut command);
    let program = command.get_program().to_owned();
    tokio::process::Command::from(command).spawn().map_err(|error| {
        let words = dir.last_words().unwrap_or_default();
        let what = format!("starting {}: {words}", Path::new(&program).display());
        Error::io(OPERATION, what.trim_end_matches(": ").to_owned(), error)
    })
}

/// Everything that bwrap mounts and that may have to be staged, in the order of [`sources`].
fn wanted(
    shared: &Shared,
    dir: &InstanceDir,
    marks: &Marks,
    view: &HostView,
) -> Result<Vec<Wanted>> {
    let spec = &marks.request.spec;
    let ours = |what, path| Wanted { what, path, kind: Kind::Ours };
    let root = root(shared, spec, view, marks.run_as)?;
    let mut wanted = vec![
        ours("instance's directory", dir.fs()),
        ours("layers' directory", shared.state.layers()),
        ours("guest's directory", shared.guest_dir()?),
        root,
    ];
    for mount in &spec.mounts {
        check_mount(mount, spec, view)?;
        let kind = Kind::Shown(mount.access);
        wanted.push(Wanted { what: "mount", path: mount.source.clone(), kind });
    }
    wanted.extend(workspace(spec));
    Ok(wanted)
}

/// What is below everything in the root.
pub(crate) fn root(
    shared: &Shared,
    spec: &SandboxSpec,
    view: &HostView,
    run_as: Option<RunAs>,
) -> Result<Wanted> {
    if let Root::Directory(path) = &spec.root {
        return Ok(Wanted { what: "root directory", path: path.clone(), kind: Kind::Below });
    }
    let skeletons = shared.state.skeletons();
    let path = view.skeleton(&skeletons, run_as).map_err(at("provision", &skeletons))?;
    Ok(Wanted { what: "skeleton", path, kind: Kind::Ours })
}

/// The directory that the workspace shows.
pub(crate) fn workspace(spec: &SandboxSpec) -> Option<Wanted> {
    let path = spec.workspace.clone()?;
    let kind = match spec.workspace_mode {
        WorkspaceMode::Bind => Kind::Shown(Access::ReadWrite),
        _ => Kind::Below,
    };
    Some(Wanted { what: "workspace", path, kind })
}

fn sources(paths: &[PathBuf], with_workspace: bool) -> Sources {
    let mut paths = paths.iter().cloned();
    let mut next = || paths.next().unwrap_or_default();
    let (fs, layers, guest, root) = (next(), next(), next(), next());
    let mut mounts: Vec<PathBuf> = paths.collect();
    let workspace = if with_workspace { mounts.pop() } else { None };
    Sources { fs, layers, guest, root, workspace, mounts }
}

/// A mount's target in a directory of the host cannot be made: it has to be there.
fn check_mount(mount: &sandbox_core::Mount, spec: &SandboxSpec, view: &HostView) -> Result<()> {
    let in_host = view.directories.iter().any(|directory| mount.target.starts_with(directory));
    if spec.root == Root::Standard && in_host && !mount.target.exists() {
        let message = format!(
            "nothing can be mounted at {}: the sandbox shows this host's directory there, read-only, and \
             the host has nothing of that name; mount it somewhere else, such as below /opt",
            mount.target.display()
        );
        return Err(Error::new(ErrorKind::InvalidSpec, "provision", message));
    }
    Ok(())
}

fn private_file(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_cannot_be_held_is_refused_with_what_to_do() {
        let nothing = Available::default();
        let mut limits = Limits::default();
        limits.memory = Some(1 << 20);
        let error = guest_limits(&nothing, &limits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("accept limits per process"), "{error}");
        limits.per_process_is_enough = true;
        let found = guest_limits(&nothing, &limits).unwrap();
        assert_eq!(found, GuestLimits { processes: None, address_space: Some(1 << 20) });
        limits.cpu_millis = Some(500);
        assert!(guest_limits(&nothing, &limits).is_err());
    }

    #[test]
    fn kernel_releases_are_read() {
        assert_eq!(kernel_version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(kernel_version("5.15.153.1-microsoft-standard-WSL2"), Some((5, 15)));
        assert_eq!(kernel_version("odd"), None);
    }

    #[test]
    fn the_workspace_is_told_from_the_mounts() {
        let paths: Vec<PathBuf> = ["f", "l", "g", "r", "m0", "m1", "w"].map(Into::into).into();
        let with = sources(&paths, true);
        assert_eq!(with.workspace, Some("w".into()));
        assert_eq!(with.mounts, [PathBuf::from("m0"), "m1".into()]);
        assert_eq!(sources(&paths[..4], false).workspace, None);
    }
}
