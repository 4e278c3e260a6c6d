//! What a harness elsewhere and the host program say to each other: one question for each run of the
//! program, on its standard input, and the answer on its standard output.
//!
//! Each message is JSON, with its length before it (four bytes, the lowest first). While the program works
//! it says so every few seconds, so that one that hangs can be told from one that has much to do. Both
//! sides are of one build: the program is brought along by the one that asks.

use std::{collections::BTreeMap, fmt, io, path::PathBuf, time::Duration};

use sandbox_core::{
    Capabilities, Change, Error, ErrorKind, Found, Instance, InstanceState, Provision,
    Reachability, SnapshotData, SnapshotId, Usage,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest message. The longest there is tells of two million changes.
const MOST: u32 = 1 << 30;

/// One run of the host program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Call {
    /// What it is to know.
    pub settings: Settings,
    /// What it is to do.
    pub request: Request,
    /// The connection that it was started through: see [`Request::Forget`].
    pub link: String,
}

/// What the host program is to know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Where instances, layers and workspaces are kept.
    pub state_dir: PathBuf,
    /// How sandboxes are separated from the host.
    pub isolation: Isolation,
    /// How compose projects are brought up, with [`Isolation::Compose`].
    #[serde(default)]
    pub compose: Option<Compose>,
}

/// How a compose project is brought up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compose {
    /// The program of compose, and its first arguments.
    pub command: Vec<String>,
    /// The engine's own program, and its first arguments.
    pub engine: Vec<String>,
    /// Added to the environment of both, and of the sandbox's processes.
    pub env: BTreeMap<String, String>,
    /// The project's files, in the workspace; those that compose finds by itself if there are none.
    pub files: Vec<String>,
    /// How long it may take until all services run.
    pub patience: Duration,
}

/// How sandboxes are separated from the host. What is made in one way is kept apart from all else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// By bubblewrap: namespaces, overlays, limits.
    #[default]
    Bwrap,
    /// Not at all: a sandbox is a directory, and processes of the account.
    Account,
    /// Likewise, on a machine that is there for it.
    Machine,
    /// Likewise, beside the services of a compose project.
    Compose,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bwrap => "bwrap",
            Self::Account => "account",
            Self::Machine => "machine",
            Self::Compose => "compose",
        })
    }
}

/// What the host program is to do; mostly what [`SandboxBackend`](sandbox_core::SandboxBackend) asks for,
/// with the host's own paths.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "there is one of them at a time")]
pub enum Request {
    /// Say what can be enforced.
    Probe,
    /// Make an instance, on a workspace of [`Populate`](Self::Populate)'s, if it has one.
    Provision(Provision),
    /// Become the byte stream to a guest, once that is answered.
    Connect(Instance),
    /// Say how it is.
    Inspect(Instance),
    /// Say how somebody on the host gets in.
    Reachability(Instance),
    /// Take a snapshot.
    Snapshot {
        /// Of this instance.
        instance: Instance,
        /// Under this id.
        snapshot: SnapshotId,
        /// Nothing runs.
        idle: bool,
        /// How the instance may be replaced.
        successor: Provision,
    },
    /// Measure one.
    SnapshotSize(SnapshotData),
    /// Remove one.
    DeleteSnapshot(SnapshotData),
    /// Tell what differs.
    Changes {
        /// In this instance.
        instance: Instance,
        /// Since this.
        since: Option<SnapshotData>,
    },
    /// Tell what only the host knows of its use.
    Usage(Instance),
    /// Hold it still.
    Pause(Instance),
    /// Let it go on.
    Resume(Instance),
    /// End its processes.
    Stop(Instance),
    /// Start it again.
    Start {
        /// This one.
        instance: Instance,
        /// With these deadlines.
        request: Provision,
    },
    /// Remove it.
    Teardown(Instance),
    /// Tell of all that are there.
    Inventory,
    /// Take in a directory: lists of what is in it follow, and what is [wanted](Populated::Wanted) of it.
    Populate {
        /// Where it comes from: what was taken in from there before need not be sent again.
        origin: String,
    },
    /// End what was started through connections that are broken: what serves them does not know it yet.
    Forget {
        /// Their names.
        links: Vec<String>,
    },
}

/// What the host program answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "there is one of them at a time")]
pub enum Answer {
    /// It still works.
    Working,
    /// It is done, and there is nothing to say.
    Done,
    /// It could not be done.
    Failed(Failure),
    /// To `Probe`.
    Capabilities(Capabilities),
    /// To `Provision` and `Start`.
    Instance(Instance),
    /// To `Inspect`.
    State(InstanceState),
    /// To `Reachability`.
    Reachability(Reachability),
    /// To `Snapshot`.
    Snapshot {
        /// The snapshot.
        data: SnapshotData,
        /// The instance that has taken the old one's place.
        successor: Option<Instance>,
    },
    /// To `SnapshotSize`.
    Size(u64),
    /// To `Changes`.
    Changes(Vec<Change>),
    /// To `Usage`.
    Usage(Usage),
    /// To `Inventory`.
    Inventory(Vec<Found>),
    /// To `Populate`.
    Populated(Populated),
}

/// What is said while a directory is taken in.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Populated {
    /// These files' contents are needed, by their places in the list; more may follow.
    Wanted(Vec<u32>),
    /// All that is needed was said.
    Send,
    /// It is there, as this directory.
    At(PathBuf),
}

/// An error on its way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failure {
    /// Its kind.
    pub kind: ErrorKind,
    /// Its message, and its causes'.
    pub message: String,
    /// Whether it is worth another try.
    pub retryable: bool,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let mut message = error.message().to_owned();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            message.push_str(&format!(": {error}"));
            cause = error.source();
        }
        Self { kind: error.kind(), message, retryable: error.is_retryable() }
    }
}

impl Failure {
    /// The error again, of what was asked for.
    #[must_use]
    pub fn into_error(self, operation: &'static str) -> Error {
        Error::new(self.kind, operation, self.message).retryable(self.retryable)
    }
}

/// What is in a directory that is taken in. Directories come before what is in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Below the directory; empty for itself.
    #[serde(with = "sandbox_core::path_bytes")]
    pub path: PathBuf,
    /// What it is.
    pub kind: EntryKind,
    /// Its permission bits.
    pub mode: u32,
    /// When it was modified, in nanoseconds since the Unix epoch.
    pub modified: i64,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// So long.
        size: u64,
        /// When anything of it changed, in nanoseconds since the Unix epoch. With size, mode and
        /// modification it tells a file that was sent before from another.
        changed: i64,
    },
    /// A symbolic link.
    Link {
        /// To there.
        #[serde(with = "sandbox_core::path_bytes")]
        to: PathBuf,
    },
    /// A FIFO.
    Fifo,
}

/// A part of a directory's list; an empty one is the end.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Listed(pub Vec<Entry>);

/// Writes a message.
///
/// # Errors
///
/// If it cannot be written.
pub async fn write(to: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(message)?).await?;
    to.flush().await
}

/// A message as bytes.
///
/// # Errors
///
/// If it cannot be said in JSON (a path that is not UTF-8), or is too long.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = u32::try_from(bytes.len() - 4).ok().filter(|length| *length <= MOST);
    let length = length.ok_or_else(|| io::Error::other("a message is too long"))?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

/// Reads a message; `None` at the end of the stream.
///
/// # Errors
///
/// `InvalidData` if it is none; and if it cannot be read.
pub async fn read<T: DeserializeOwned>(
    from: &mut (impl AsyncRead + Unpin),
    most: u32,
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let length = u32::from_le_bytes(length);
    if length > most.min(MOST) {
        let message = format!("a message of {length} bytes, where at most {most} are expected");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut bytes = Vec::new();
    let read = (&mut *from).take(length.into()).read_to_end(&mut bytes).await?;
    if read != length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// What the host program says first: whatever an account's shell has said before is no answer.
pub const BEGIN: &[u8] = b"\nsandbox-host answers\n";

/// How long a message may be that is no list of changes or instances.
pub const SMALL: u32 = 16 << 20;
/// How long any may be.
pub const LARGE: u32 = MOST;

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use super::*;

    #[tokio::test]
    async fn messages_come_back_as_they_were() {
        let entry = Entry {
            path: OsStr::from_bytes(b"a/\xff").into(),
            kind: EntryKind::Link { to: "b c".into() },
            mode: 0o777,
            modified: -1,
        };
        let mut bytes = encode(&Listed(vec![entry.clone()])).unwrap();
        bytes.extend(encode(&Answer::Done).unwrap());
        let mut from = &bytes[..];
        let Listed(list) = read(&mut from, SMALL).await.unwrap().unwrap();
        assert_eq!(list, [entry]);
        assert!(matches!(read(&mut from, SMALL).await.unwrap(), Some(Answer::Done)));
        assert!(read::<Answer>(&mut from, SMALL).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn what_is_no_message_is_refused_before_it_is_read() {
        let mut shell = &b"Welcome to this machine!"[..];
        let error = read::<Answer>(&mut shell, SMALL).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let whole = encode(&Answer::Done).unwrap();
        let error = read::<Answer>(&mut &whole[..6], SMALL).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn an_error_keeps_its_kind_and_its_causes() {
        let cause = io::Error::other("disk on fire");
        let error = Error::io("snapshot", "/var/x", cause).retryable(true);
        let back = Failure::from(&error).into_error("snapshot");
        assert_eq!(back.to_string(), "snapshot: /var/x: disk on fire");
        assert_eq!(back.kind(), error.kind());
        assert!(back.is_retryable());
    }
}
