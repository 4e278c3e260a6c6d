//! What a guest is told at its start, by the backend that starts it, before anything hostile runs.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// The guest's start: JSON, read from a file descriptor or a file that only the backend can write, or
/// from standard input (four bytes of length, big-endian, before it), which then becomes a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Setup {
    /// The instance; a client that means another one is refused.
    pub instance: String,
    /// An inherited descriptor that listens already.
    pub listen_fd: Option<i32>,
    /// Or the path of a Unix socket to make, with mode 0600.
    pub listen_path: Option<String>,
    /// Serve only what connects as this user, whatever the socket's mode: where the socket is within
    /// reach of the sandbox's processes, theirs is another one.
    pub listen_peer: Option<u32>,
    /// Done one after the other, with the rights the guest was started with; the first failure ends
    /// the guest.
    pub mounts: Vec<MountStep>,
    /// Where relative paths begin, and the working directory of a process that names none.
    pub workspace: String,
    /// The environment that every process begins with.
    pub env: Vec<(String, String)>,
    /// Drop every capability and forbid new ones, once the mounts are done.
    pub drop_capabilities: bool,
    /// Load the system-call filter, after that.
    pub filter_syscalls: bool,
    /// At most so many processes of this user in this user namespace (`RLIMIT_NPROC`).
    pub max_processes: Option<u64>,
    /// At most so much address space for each process, in bytes (`RLIMIT_AS`).
    pub max_address_space: Option<u64>,
    /// An inherited descriptor of the control group's `memory.events` (or, in version 1,
    /// `memory.oom_control`): its `oom_kill` line tells a kill for want of memory from another.
    pub oom_fd: Option<i32>,
    /// The sandbox's end, in milliseconds since the Unix epoch.
    pub expires_at: Option<u64>,
    /// The end of the harness's lease, likewise.
    pub lease_until: Option<u64>,
    /// End after so many milliseconds without a process and a request.
    pub idle_ms: Option<u64>,
}

/// One step towards the filesystem that the sandbox sees. Paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MountStep {
    /// Mount an overlay, and check that it can be written to.
    Overlay {
        /// The directory in which the relative paths of `lower`, `upper` and `work` begin: a mount's
        /// options measure a page at most, and a long history has many layers.
        base: String,
        /// The layers below, topmost first.
        lower: Vec<String>,
        /// The layer that takes the changes.
        upper: String,
        /// A directory on the same filesystem that the kernel works in.
        work: String,
        /// Where.
        target: String,
    },
    /// Move a mount.
    Move {
        /// From.
        from: String,
        /// To; made if it is missing.
        to: String,
    },
    /// Mount a file or directory at a second place.
    Bind {
        /// From.
        from: String,
        /// To; made if it is missing, as what `from` is.
        to: String,
        /// Not writable there.
        #[serde(default)]
        read_only: bool,
    },
    /// A filesystem in memory.
    Tmpfs {
        /// Where; made if it is missing.
        target: String,
        /// Permission bits of its root.
        mode: u32,
        /// At most so many bytes.
        #[serde(default)]
        size: Option<u64>,
    },
    /// A set of pseudo-terminals of its own.
    Devpts {
        /// Where; made if it is missing.
        target: String,
    },
    /// A symbolic link, unless something is there.
    Symlink {
        /// What it says.
        target: String,
        /// Where it is.
        path: String,
    },
    /// Write a small file.
    File {
        /// Where.
        path: String,
        /// What.
        contents: Bytes,
    },
    /// Make a directory and those above it.
    Dir {
        /// Where.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// Mount again as read-only.
    ReadOnly {
        /// What.
        target: String,
    },
    /// Make this the root, and let go of the old one.
    Pivot {
        /// A mount that has what the sandbox shall see.
        root: String,
    },
}
