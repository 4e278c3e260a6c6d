//! An instance's directory: its marks, its files, its socket, and whether it lives.

use std::{
    fs,
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use sandbox_core::{Found, Instance, InstanceId, InstanceState, Provision, Result, SnapshotId};
use serde::{Deserialize, Serialize};

use super::{
    ID,
    cgroup::Groups,
    error::{at, failed},
    process::{BwrapInfo, Guest, boot_id},
    run_as::RunAs,
    state::State,
    tree,
};

/// The parts of a sandbox's filesystem that are overlays of their own.
pub(crate) const PARTS: [&str; 2] = ["root", "workspace"];
/// How long a killed PID namespace may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
const MARKS: &str = "instance.json";
const TRASH: &str = ".trash-";
const NEW: &str = ".new-";
const LOG_TAIL: u64 = 4096;

/// What an instance's directory says about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Marks {
    /// What it was made from.
    pub(crate) request: Provision,
    pub(crate) created_at: Timestamp,
    /// The snapshots that it stands on, lowest first.
    pub(crate) layers: Vec<SnapshotId>,
    /// As whom it runs, if not as the harness.
    pub(crate) run_as: Option<RunAs>,
    /// Its control groups, made or to be made.
    pub(crate) groups: Option<Groups>,
    /// The start of the host in which it was last launched.
    pub(crate) boot_id: String,
}

/// What an [`Instance`] tells of itself beyond its id. The directory has the last word.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Data {
    pid: Option<u32>,
    start_time: Option<u64>,
    boot_id: String,
    layers: Vec<SnapshotId>,
    run_as: Option<RunAs>,
    cgroup: Option<Groups>,
}

/// An instance's directory.
#[derive(Debug, Clone)]
pub(crate) struct InstanceDir {
    pub(crate) id: InstanceId,
    path: PathBuf,
}

impl InstanceDir {
    /// Where an instance's directory is, if it is.
    pub(crate) fn of(state: &State, id: &InstanceId) -> Self {
        let instances = state.instances();
        let path = instances.join(id.as_str());
        let trash = instances.join(format!("{TRASH}{id}"));
        // What is half removed is still the instance.
        let path = if !path.exists() && trash.exists() { trash } else { path };
        Self { id: id.clone(), path }
    }

    /// Makes the directory with its marks and empty upper layers.
    pub(crate) fn create(state: &State, marks: &Marks, like: &[PathBuf; 2]) -> Result<Self> {
        const OPERATION: &str = "provision";
        let id = marks.request.instance.clone();
        let path = state.instances().join(id.as_str());
        if path.exists() {
            return Err(failed(OPERATION, format!("there is an instance {id} already")));
        }
        // It gets its name when its marks are in it, so that whatever has the name can be told about.
        let new = Self { id: id.clone(), path: state.instances().join(format!("{NEW}{id}")) };
        let made = (|| {
            private_dir(&new.path)?;
            new.write_marks(marks)?;
            fs::rename(&new.path, &path)
        })();
        if let Err(error) = made {
            let _ = tree::remove(&new.path);
            return Err(at(OPERATION, &path)(error));
        }
        let dir = Self { id, path };
        dir.make_fs(marks.run_as, like).map_err(at(OPERATION, &dir.fs()))?;
        Ok(dir)
    }

    /// The upper and work directories. Those of the upper layer look like the ones they are laid over.
    fn make_fs(&self, run_as: Option<RunAs>, like: &[PathBuf; 2]) -> io::Result<()> {
        let own = |path: &Path| match run_as {
            Some(RunAs { uid, gid }) => chown(path, Some(uid), Some(gid)),
            None => Ok(()),
        };
        for directory in [self.fs(), self.fs().join("upper"), self.fs().join("work")] {
            private_dir(&directory)?;
            own(&directory)?;
        }
        self.renew_upper(run_as, like)?;
        self.renew_work(run_as)
    }

    /// Makes those upper layers that are missing.
    pub(crate) fn renew_upper(&self, run_as: Option<RunAs>, like: &[PathBuf; 2]) -> io::Result<()> {
        for (part, like) in PARTS.iter().zip(like) {
            let upper = self.upper(part);
            if upper.is_dir() {
                continue;
            }
            private_dir(&upper)?;
            if let Some(RunAs { uid, gid }) = run_as {
                chown(&upper, Some(uid), Some(gid))?;
            }
            let mode =
                fs::metadata(like).map_or(0o755, |found| found.permissions().mode() & 0o7777);
            fs::set_permissions(&upper, fs::Permissions::from_mode(mode))?;
            if let Ok(modified) = fs::metadata(like).and_then(|found| found.modified()) {
                fs::File::open(&upper)?.set_modified(modified)?;
            }
        }
        Ok(())
    }

    /// Makes the work directories anew. The kernel refuses those of a volatile overlay, which say that
    /// nobody synced it; that only matters if the host itself stopped in between.
    pub(crate) fn renew_work(&self, run_as: Option<RunAs>) -> io::Result<()> {
        for part in PARTS {
            let work = self.work(part);
            tree::remove(&work)?;
            private_dir(&work)?;
            if let Some(RunAs { uid, gid }) = run_as {
                chown(&work, Some(uid), Some(gid))?;
            }
        }
        Ok(())
    }

    pub(crate) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// The directory that bwrap shows the guest during its set-up.
    pub(crate) fn fs(&self) -> PathBuf {
        self.path.join("fs")
    }

    pub(crate) fn upper(&self, part: &str) -> PathBuf {
        self.fs().join("upper").join(part)
    }

    fn work(&self, part: &str) -> PathBuf {
        self.fs().join("work").join(part)
    }

    /// What bwrap writes about the guest.
    pub(crate) fn info(&self) -> PathBuf {
        self.path.join("bwrap.json")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.path.join("launch.log")
    }

    /// Its marks; `None` if there is no such instance.
    pub(crate) fn marks(&self) -> io::Result<Option<Marks>> {
        match fs::read(self.path.join(MARKS)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn write_marks(&self, marks: &Marks) -> io::Result<()> {
        write_json(&self.path.join(MARKS), marks)
    }

    /// Its guest, if it runs.
    pub(crate) fn guest(&self) -> io::Result<Option<Guest>> {
        let Some(marks) = self.marks()? else { return Ok(None) };
        if marks.boot_id != boot_id()? {
            return Ok(None);
        }
        match BwrapInfo::read(&self.info())? {
            Some(info) => Guest::find(&info),
            None => Ok(None),
        }
    }

    pub(crate) fn state(&self) -> io::Result<InstanceState> {
        let Some(marks) = self.marks()? else { return Ok(InstanceState::Gone) };
        if self.guest()?.is_none() {
            return Ok(InstanceState::Stopped);
        }
        let frozen = marks.groups.as_ref().map_or(Ok(false), Groups::is_frozen)?;
        Ok(if frozen { InstanceState::Paused } else { InstanceState::Running })
    }

    /// Kills the guest and with it everything inside, without waiting for it.
    pub(crate) fn condemn(&self) -> io::Result<Option<Guest>> {
        let Some(guest) = self.guest()? else { return Ok(None) };
        guest.kill()?;
        // What is frozen ends when it thaws: the guest itself, or bwrap, which waits for it.
        if let Some(groups) = self.marks()?.and_then(|marks| marks.groups) {
            groups.thaw()?;
        }
        Ok(Some(guest))
    }

    /// Kills the guest and with it everything inside, and waits until it is gone.
    pub(crate) fn kill(&self) -> io::Result<()> {
        let Some(guest) = self.condemn()? else { return Ok(()) };
        if guest.wait(PATIENCE)? {
            return Ok(());
        }
        let message = format!("process {} did not end within {PATIENCE:?}", guest.pid);
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Ends the instance and removes all of it. A second time it does nothing.
    pub(crate) fn remove(&self, state: &State) -> Result<()> {
        const OPERATION: &str = "teardown";
        if !self.exists() {
            return Ok(());
        }
        self.kill().map_err(at(OPERATION, &self.path))?;
        let marks = self.marks().map_err(at(OPERATION, &self.path))?;
        if let Some(groups) = marks.and_then(|marks| marks.groups) {
            groups.remove().map_err(at(OPERATION, &self.path))?;
        }
        let trash = state.instances().join(format!("{TRASH}{}", self.id));
        tree::discard(&self.path, &trash, MARKS).map_err(at(OPERATION, &trash))
    }

    /// The instance as the history keeps it.
    pub(crate) fn describe(&self, marks: &Marks, guest: Option<&Guest>) -> Result<Instance> {
        let data = Data {
            pid: guest.map(|guest| guest.pid),
            start_time: guest.map(|guest| guest.start_time),
            boot_id: marks.boot_id.clone(),
            layers: marks.layers.clone(),
            run_as: marks.run_as,
            cgroup: marks.groups.clone(),
        };
        let data = serde_json::to_value(data)
            .map_err(|error| failed("provision", "the instance's data").with_source(error))?;
        Ok(Instance {
            id: self.id.clone(),
            sandbox: marks.request.sandbox.clone(),
            backend: sandbox_core::BackendId::new(ID),
            data,
        })
    }

    /// A socket that the guest listens on.
    pub(crate) fn listen(&self) -> io::Result<UnixListener> {
        let dir = self.open()?;
        let socket = socket_in(&dir);
        match fs::remove_file(&socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&socket)?;
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    /// A connection to its guest.
    pub(crate) async fn connect(&self) -> io::Result<tokio::net::UnixStream> {
        let dir = self.open()?;
        tokio::net::UnixStream::connect(socket_in(&dir)).await
    }

    /// The same, for who does not wait for anything else meanwhile.
    pub(crate) fn connect_blocking(&self) -> io::Result<std::os::unix::net::UnixStream> {
        let dir = self.open()?;
        std::os::unix::net::UnixStream::connect(socket_in(&dir))
    }

    fn open(&self) -> io::Result<fs::File> {
        fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(&self.path)
    }

    /// The last that bwrap and the guest had to say, as text in one line.
    pub(crate) fn last_words(&self) -> Option<String> {
        let mut file = fs::File::open(self.log()).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL))).ok()?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.chars().filter(|c| !c.is_control()).collect::<String>())
            .filter(|line| !line.trim().is_empty())
            .collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }
}

/// Every instance here, half-made and half-removed ones too.
pub(crate) fn all(state: &State) -> Result<Vec<(InstanceDir, Marks)>> {
    const OPERATION: &str = "inventory";
    let instances = state.instances();
    let entries = match fs::read_dir(&instances) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(OPERATION, &instances))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(OPERATION, &instances))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Ok(id) = name.trim_start_matches(TRASH).parse() else { continue };
        let dir = InstanceDir { id, path: entry.path() };
        match dir.marks() {
            Ok(Some(marks)) => found.push((dir, marks)),
            // Removed in the meantime; or its removal was interrupted at the very end.
            Ok(None) => {
                let _ = fs::remove_dir(&dir.path);
            }
            Err(error) => {
                tracing::warn!(path = %dir.path.display(), %error, "an instance cannot be read");
            }
        }
    }
    Ok(found)
}

/// As the trait wants it.
pub(crate) fn found(dir: &InstanceDir, marks: &Marks) -> Result<Found> {
    let failed = at("inventory", &dir.path);
    let guest = dir.guest();
    let (state, guest) = match dir.state().and_then(|state| Ok((state, guest?))) {
        Ok(known) => known,
        Err(error) => return Err(failed(error)),
    };
    Ok(Found {
        instance: dir.describe(marks, guest.as_ref())?,
        owner: marks.request.owner.clone(),
        state,
        created_at: marks.created_at,
    })
}

/// A path that is short, however long the directory's is: a socket's address holds 107 bytes.
fn socket_in(dir: &fs::File) -> PathBuf {
    format!("/proc/self/fd/{}/guest.sock", dir.as_raw_fd()).into()
}

pub(crate) fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)
}

/// Replaces a file as a whole.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec_pretty(value)?)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    fs::rename(&new, path)
}
