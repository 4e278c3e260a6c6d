//! An instance's directory: its marks, its workspace, its socket.

use std::{
    fs,
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use sandbox_core::{
    BackendId, Found, Instance, InstanceId, InstanceState, Provision, Result, SandboxSpec,
    WorkspaceMode,
};
use serde::{Deserialize, Serialize};

use super::{
    error::{at, failed},
    process::boot_id,
    processes::{self, GuestId},
    tree,
};

/// The directories of an instance's files, and of a snapshot's.
pub(super) const WORKSPACE: &str = "workspace";
pub(super) const HOME: &str = "home";
const MARKS: &str = "instance.json";
const TRASH: &str = ".trash-";
const NEW: &str = ".new-";
const LOG_TAIL: u64 = 4096;

/// What an instance's directory says about it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Marks {
    pub(super) request: Provision,
    pub(super) created_at: Timestamp,
}

/// The guest that was started last.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Started {
    guest: GuestId,
    boot_id: String,
}

/// An instance's directory.
#[derive(Debug, Clone)]
pub(super) struct InstanceDir {
    id: InstanceId,
    path: PathBuf,
}

impl InstanceDir {
    pub(super) fn of(instances: &Path, id: &InstanceId) -> Self {
        let path = instances.join(id.as_str());
        let trash = instances.join(format!("{TRASH}{id}"));
        // What is half removed is still the instance.
        let path = if !path.exists() && trash.exists() { trash } else { path };
        Self { id: id.clone(), path }
    }

    /// Makes the directory with its marks; it gets its name when they are in it.
    pub(super) fn create(instances: &Path, marks: &Marks) -> Result<Self> {
        const OPERATION: &str = "provision";
        let id = marks.request.instance.clone();
        let path = instances.join(id.as_str());
        if path.exists() {
            return Err(failed(OPERATION, format!("there is an instance {id} already")));
        }
        let new = Self { id: id.clone(), path: instances.join(format!("{NEW}{id}")) };
        let made = || {
            tree::remove(&new.path)?;
            private_dir(&new.path)?;
            new.write_marks(marks)?;
            fs::rename(&new.path, &path)
        };
        made().map_err(at(OPERATION, &path))?;
        Ok(Self { id, path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What snapshots cover.
    pub(super) fn files(&self) -> PathBuf {
        self.path.join("files")
    }

    pub(super) fn workspace(&self) -> PathBuf {
        self.files().join(WORKSPACE)
    }

    /// The workspace of an instance of this spec: its own, or the directory that is bound.
    pub(super) fn workspace_of(&self, spec: &SandboxSpec) -> PathBuf {
        bound(spec).cloned().unwrap_or_else(|| self.workspace())
    }

    pub(super) fn home(&self) -> PathBuf {
        self.files().join(HOME)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join("guest.log")
    }

    pub(super) fn marks(&self) -> io::Result<Option<Marks>> {
        read_json(&self.path.join(MARKS))
    }

    pub(super) fn write_marks(&self, marks: &Marks) -> io::Result<()> {
        write_json(&self.path.join(MARKS), marks)
    }

    pub(super) fn note(&self, guest: GuestId) -> io::Result<()> {
        write_json(&self.path.join("guest.json"), &Started { guest, boot_id: boot_id()? })
    }

    /// The guest that was started last, in this start of the host; it need not run any more.
    fn started(&self) -> io::Result<Option<GuestId>> {
        let started: Option<Started> = read_json(&self.path.join("guest.json"))?;
        let now = boot_id()?;
        Ok(started.filter(|started| started.boot_id == now).map(|started| started.guest))
    }

    /// The guest, if it runs.
    pub(super) fn guest(&self) -> io::Result<Option<GuestId>> {
        match self.started()? {
            Some(guest) => Ok(guest.find()?.map(|_| guest)),
            None => Ok(None),
        }
    }

    pub(super) fn state(&self) -> io::Result<InstanceState> {
        Ok(match (self.path.exists(), self.guest()?) {
            (false, _) => InstanceState::Gone,
            (true, None) => InstanceState::Stopped,
            (true, Some(_)) => InstanceState::Running,
        })
    }

    /// Ends all that runs.
    pub(super) fn end(&self) -> io::Result<()> {
        processes::end(self.started()?, self.id.as_str())
    }

    /// Ends the instance and removes all of it. A second time it does nothing.
    pub(super) fn remove(&self, instances: &Path) -> Result<()> {
        const OPERATION: &str = "teardown";
        if !self.path.exists() {
            return Ok(());
        }
        self.end().map_err(at(OPERATION, &self.path))?;
        let trash = instances.join(format!("{TRASH}{}", self.id));
        tree::discard(&self.path, &trash, MARKS).map_err(at(OPERATION, &trash))
    }

    /// A socket that the guest listens on.
    pub(super) fn listen(&self) -> io::Result<UnixListener> {
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
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let dir = self.open()?;
        UnixStream::connect(socket_in(&dir))
    }

    fn open(&self) -> io::Result<fs::File> {
        fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(&self.path)
    }

    /// The instance as the history keeps it.
    pub(super) fn describe(
        &self,
        backend: &BackendId,
        marks: &Marks,
        guest: Option<GuestId>,
    ) -> Instance {
        Instance {
            id: self.id.clone(),
            sandbox: marks.request.sandbox.clone(),
            backend: backend.clone(),
            data: serde_json::json!({ "pid": guest.map(|guest| guest.pid) }),
        }
    }

    /// The last that the guest had to say, as text in one line.
    pub(super) fn last_words(&self) -> Option<String> {
        let mut file = fs::File::open(self.log()).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL))).ok()?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let words: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// The directory that is the workspace itself, if it is one.
pub(super) fn bound(spec: &SandboxSpec) -> Option<&PathBuf> {
    spec.workspace.as_ref().filter(|_| spec.workspace_mode == WorkspaceMode::Bind)
}

/// Every instance here, half-removed ones too.
pub(super) fn all(backend: &BackendId, instances: &Path) -> Result<Vec<Found>> {
    const OPERATION: &str = "inventory";
    let entries = match fs::read_dir(instances) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(OPERATION, instances))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(OPERATION, instances))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Ok(id) = name.trim_start_matches(TRASH).parse() else { continue };
        let dir = InstanceDir { id, path: entry.path() };
        let look = || Ok((dir.marks()?, dir.state()?, dir.guest()?));
        let known: io::Result<_> = look();
        let (marks, state, guest) = known.map_err(at(OPERATION, &dir.path))?;
        let Some(marks) = marks else {
            // Its removal was interrupted at the very end.
            let _ = fs::remove_dir(&dir.path);
            continue;
        };
        found.push(Found {
            instance: dir.describe(backend, &marks, guest),
            owner: marks.request.owner.clone(),
            state,
            created_at: marks.created_at,
        });
    }
    Ok(found)
}

/// A path that is short, however long the directory's is: a socket's address holds 107 bytes.
fn socket_in(dir: &fs::File) -> PathBuf {
    format!("/proc/self/fd/{}/guest.sock", dir.as_raw_fd()).into()
}

pub(super) fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Replaces a file as a whole.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec_pretty(value)?)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    fs::rename(&new, path)
}
