//! What a backend has to do: make, freeze, copy and remove a place with the guest in it, and hand over a
//! byte stream to that guest. Everything else is written once, in the core and the guest.

use std::{fmt, path::PathBuf, time::Duration};

use async_trait::async_trait;
use jiff::Timestamp;
use sandbox_guest::Setup as GuestSetup;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{
    BackendId, Capabilities, InstanceId, OwnerId, Reachability, Result, SandboxId, SandboxSpec,
    SnapshotId, Usage,
};

/// Makes instances.
///
/// All methods but [`retire`](Self::retire) are required; what a backend cannot do is
/// [`Error::unsupported`](crate::Error::unsupported), and its [`Capabilities`] say so beforehand. Every
/// method may be cancelled by dropping its future: what it made until then must be findable through
/// [`inventory`](Self::inventory) by the instance's id, or be gone.
#[async_trait]
pub trait SandboxBackend: Send + Sync + fmt::Debug {
    /// Its id, the same in every process.
    fn id(&self) -> BackendId;

    /// What this host really enforces, each with the evidence that was seen. Tries things rather than
    /// reading version numbers.
    ///
    /// # Errors
    ///
    /// `Unavailable` if no sandbox can be made here at all; the message says what is missing.
    async fn probe(&self) -> Result<Capabilities>;

    /// Makes an instance and starts its guest; returns when [`connect`](Self::connect) can be called
    /// (the guest may still be setting itself up).
    ///
    /// # Errors
    ///
    /// After an error nothing of it is left. `Unsupported` before anything is made if the spec asks for
    /// what cannot be enforced here.
    async fn provision(&self, request: &Provision) -> Result<Instance>;

    /// A byte stream to the guest. The core exchanges the preambles and bounds the wait.
    ///
    /// # Errors
    ///
    /// `Lost` if the guest is gone (with what it said last, if it said anything); `Unavailable` if it
    /// cannot be reached now.
    async fn connect(&self, instance: &Instance) -> Result<GuestStream>;

    /// Brings a guest into a place that somebody else made and that this backend can find by this name,
    /// beside what runs there. The place is borrowed: it is never stopped, snapshotted or removed, and
    /// [`teardown`](Self::teardown) takes out only what was brought in.
    ///
    /// # Errors
    ///
    /// `Unsupported` where there is nothing like that, `NotFound` if it is not there. After an error nothing
    /// is left in it.
    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance>;

    /// How the instance is.
    ///
    /// # Errors
    ///
    /// Only if that cannot be found out; an instance that is not there is [`InstanceState::Gone`].
    async fn inspect(&self, instance: &Instance) -> Result<InstanceState>;

    /// How someone else gets in.
    ///
    /// # Errors
    ///
    /// `Lost` if nothing runs.
    async fn reachability(&self, instance: &Instance) -> Result<Reachability>;

    /// Takes a snapshot of the filesystem. The guest has stopped all processes; they go on afterwards.
    ///
    /// Asked again with the same ids, as after a crash in the middle of it, it finishes what was begun,
    /// or returns what is there.
    ///
    /// # Errors
    ///
    /// After an error the instance is as it was, or `Lost`.
    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken>;

    /// How much a snapshot adds to the one below it, in bytes on disk.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not there.
    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64>;

    /// Removes a snapshot. What instances and other snapshots build on stays usable: its data goes when
    /// the last of them does. Removing it twice is no error.
    ///
    /// # Errors
    ///
    /// If something could not be removed.
    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()>;

    /// What the instance's filesystem has that a snapshot had not, in any order; without a snapshot,
    /// what a fresh instance of its spec had not. The instance need not run, and what runs in it goes on
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// `NotFound` if the snapshot's data is gone; `Unsupported` or `Conflict`, with the reason, if the two
    /// cannot be compared; `LimitExceeded` if there are too many changes to tell.
    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>>;

    /// What only the backend knows of what an instance uses and may use: what its limits are, and what
    /// it takes on disk. What it does not know is `None`; the guest tells the rest, and what both know
    /// is taken from the guest. May take as long as a walk through the instance's own files.
    ///
    /// # Errors
    ///
    /// `Lost` if the instance is gone. A figure that cannot be read is no error.
    async fn usage(&self, instance: &Instance) -> Result<Usage>;

    /// Stops all execution, keeping it in memory.
    ///
    /// # Errors
    ///
    /// `Unsupported` where the host has nothing for it.
    async fn pause(&self, instance: &Instance) -> Result<()>;

    /// Lets a paused instance go on.
    ///
    /// # Errors
    ///
    /// `Lost` if it is gone.
    async fn resume(&self, instance: &Instance) -> Result<()>;

    /// Ends the instance's processes and keeps its files. Idempotent.
    ///
    /// # Errors
    ///
    /// If something could not be ended.
    async fn stop(&self, instance: &Instance) -> Result<()>;

    /// Starts a stopped instance: a new guest on the same files. `request` is what the instance was
    /// made with, with deadlines of now. Returns the instance as it is from then on.
    ///
    /// # Errors
    ///
    /// `Lost` if the files are gone.
    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance>;

    /// Removes everything of the instance. Idempotent; also for what is half made, which may be found by its
    /// id alone: its `data` is null then, or, where it was to be [attached](Self::attach), a string with the
    /// name of that place.
    ///
    /// # Errors
    ///
    /// If something could not be removed; the message names it.
    async fn teardown(&self, instance: &Instance) -> Result<()>;

    /// Removes an instance whose place another has taken. As [`teardown`](Self::teardown), which it is
    /// unless a backend has something faster: it may return once nothing of the instance runs any more, if
    /// what is left of it is removed without this process too.
    ///
    /// # Errors
    ///
    /// As `teardown`.
    async fn retire(&self, instance: &Instance) -> Result<()> {
        self.teardown(instance).await
    }

    /// Every instance here that carries our marks, whoever owns it, half-made ones too.
    ///
    /// # Errors
    ///
    /// If it cannot be found out.
    async fn inventory(&self) -> Result<Vec<Found>>;
}

/// A byte stream to a guest.
pub type GuestStream = Box<dyn ByteStream>;

/// Something to read from and write to.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// What to make.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Provision {
    /// For this sandbox.
    pub sandbox: SandboxId,
    /// Under this id; the guest answers to it.
    pub instance: InstanceId,
    /// The sandbox's how-manieth instance by creation, rewind and recreation, from 1.
    pub generation: u32,
    /// Marked as this owner's.
    pub owner: OwnerId,
    /// As asked for, paths resolved.
    pub spec: SandboxSpec,
    /// The host name inside.
    pub hostname: String,
    /// `/etc/machine-id` inside: 32 hexadecimal digits.
    pub machine_id: String,
    /// With the filesystem of this snapshot, instead of a fresh one.
    pub from: Option<SnapshotData>,
    /// When the guest must end by itself.
    pub expires_at: Option<Timestamp>,
    /// When it must end unless the lease has been renewed.
    pub lease_until: Option<Timestamp>,
    /// After how long without a process and a request it must end.
    pub idle_limit: Option<Duration>,
}

impl Provision {
    /// A request for a fresh instance.
    #[must_use]
    pub fn new(sandbox: SandboxId, owner: OwnerId, spec: SandboxSpec) -> Self {
        let hostname = format!("sbx-{}", &sandbox.as_str()[sandbox.as_str().len() - 8..]);
        let machine_id = sandbox.as_str().trim_start_matches("sbx_").to_owned();
        Self {
            sandbox,
            instance: InstanceId::new(),
            generation: 1,
            owner,
            spec,
            hostname,
            machine_id,
            from: None,
            expires_at: None,
            lease_until: None,
            idle_limit: None,
        }
    }

    /// What every guest of this instance is told at its start: which instance it is, the spec's
    /// environment, and when it must end. How it is reached, its workspace and what it does to the
    /// filesystem first are the backend's to add.
    ///
    /// What the backend wants in the environment where the spec says nothing goes before what is there:
    /// of two variables with one name, the later counts.
    #[must_use]
    pub fn guest_setup(&self) -> GuestSetup {
        let milliseconds = |at: Timestamp| u64::try_from(at.as_millisecond()).unwrap_or(0);
        let whole = |limit: Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        GuestSetup {
            instance: self.instance.to_string(),
            env: self.spec.env.clone().into_iter().collect(),
            expires_at: self.expires_at.map(milliseconds),
            lease_until: self.lease_until.map(milliseconds),
            idle_ms: self.idle_limit.map(whole),
            ..GuestSetup::default()
        }
    }
}

/// What a backend made. It lives in the history, so that another process can pick it up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its id.
    pub id: InstanceId,
    /// For this sandbox.
    pub sandbox: SandboxId,
    /// By this backend.
    pub backend: BackendId,
    /// What the backend needs to find it again.
    pub data: serde_json::Value,
}

/// How an instance is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum InstanceState {
    /// Its guest runs.
    Running,
    /// It is paused.
    Paused,
    /// Its guest does not run; its files are there.
    Stopped,
    /// There is nothing of it.
    Gone,
}

/// An instance that was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Which; good enough for [`SandboxBackend::teardown`] even where it is half made.
    pub instance: Instance,
    /// Its owner's mark.
    pub owner: OwnerId,
    /// How it is.
    pub state: InstanceState,
    /// When it was made.
    pub created_at: Timestamp,
}

/// A snapshot to take.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SnapshotRequest {
    /// Of this instance.
    pub instance: Instance,
    /// Under this id.
    pub snapshot: SnapshotId,
    /// No process runs: a backend may then replace the instance by a new one…
    pub idle: bool,
    /// … made like this, with an id of its own and `from` as it was at first.
    pub successor: Provision,
}

impl SnapshotRequest {
    /// A request.
    #[must_use]
    pub fn new(instance: Instance, snapshot: SnapshotId, idle: bool, successor: Provision) -> Self {
        Self { instance, snapshot, idle, successor }
    }
}

/// A snapshot that was taken.
#[derive(Debug, Clone)]
pub struct SnapshotTaken {
    /// What it is.
    pub data: SnapshotData,
    /// The instance that has taken the old one's place, if one has: the old one is gone then.
    pub successor: Option<Instance>,
}

/// A snapshot's data. It lives in the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotData {
    /// Which snapshot.
    pub id: SnapshotId,
    /// By which backend.
    pub backend: BackendId,
    /// What it adds to the snapshot below it, in bytes, where that is known without walking it.
    #[serde(default)]
    pub size: Option<u64>,
    /// What the backend needs to find it again.
    pub data: serde_json::Value,
}

/// A file, directory or link that differs.
///
/// An added directory is followed by all that is in it; a deleted one stands for all that was. A
/// directory whose entries have changed is no change itself, unless its mode has. What is one thing and
/// was another (a file, and was a directory) is modified. A file that has the kind, size, mode and time of
/// last modification that it had counts as unchanged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Change {
    /// As seen inside: absolute, and not necessarily UTF-8. Serialized as a string, or as a list of bytes
    /// where it is none.
    #[serde(with = "crate::path_bytes")]
    pub path: PathBuf,
    /// What happened to it.
    pub kind: ChangeKind,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// It was not there.
    Added,
    /// It was there, and is different.
    Modified,
    /// It is not there any more.
    Deleted,
}

/// Where a backend's state is if nobody says otherwise: `$XDG_STATE_HOME/sandboxer`, else
/// `~/.local/state/sandboxer`.
///
/// # Errors
///
/// `Unavailable` if neither variable is set.
pub fn default_state_dir() -> Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("sandboxer"))
        .ok_or_else(|| {
            let message = "neither XDG_STATE_HOME nor HOME is set; name a state directory";
            crate::Error::new(crate::ErrorKind::Unavailable, "find the state directory", message)
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_change_is_written_down_whatever_its_path() {
        for (path, text) in [
            (&b"/a b"[..], r#"{"path":"/a b","kind":"added"}"#),
            (b"/\xff", r#"{"path":[47,255],"kind":"added"}"#),
        ] {
            let path = std::ffi::OsStr::from_bytes(path).into();
            let change = Change { path, kind: ChangeKind::Added };
            assert_eq!(serde_json::to_string(&change).unwrap(), text);
            assert_eq!(serde_json::from_str::<Change>(text).unwrap(), change);
        }
    }
}
