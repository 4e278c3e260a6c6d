//! What a sandbox uses.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a sandbox uses, and may use at most. What cannot be told here is `None`, never 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Usage {
    /// CPU time of all its processes since its instance started, of those that have ended too.
    pub cpu: Option<Duration>,
    /// Memory of its processes now, in bytes; what several share counts once.
    pub memory: Option<u64>,
    /// The most memory that it ever used, in bytes, as its memory limit counts it: with the files that
    /// the kernel keeps in memory for it.
    pub memory_peak: Option<u64>,
    /// How much memory it may use as a whole, in bytes.
    pub memory_limit: Option<u64>,
    /// Its processes now, without the guest's own.
    pub pids: Option<u64>,
    /// How many processes and threads it may have.
    pub pids_limit: Option<u64>,
    /// What it has written since it was made, or since its last snapshot, as far as that is still there:
    /// in bytes on disk.
    pub disk: Option<u64>,
    /// Bytes that it received from outside, its own loopback not counted.
    pub network_received: Option<u64>,
    /// Bytes that it sent, likewise.
    pub network_sent: Option<u64>,
}

impl Usage {
    /// These figures, and where one is missing, the other's.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            cpu: self.cpu.or(other.cpu),
            memory: self.memory.or(other.memory),
            memory_peak: self.memory_peak.or(other.memory_peak),
            memory_limit: self.memory_limit.or(other.memory_limit),
            pids: self.pids.or(other.pids),
            pids_limit: self.pids_limit.or(other.pids_limit),
            disk: self.disk.or(other.disk),
            network_received: self.network_received.or(other.network_received),
            network_sent: self.network_sent.or(other.network_sent),
        }
    }
}
