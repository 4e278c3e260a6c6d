//! What a host really enforces, as data.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::BackendId;

/// What a backend can do on this host, each with the evidence that was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Whose.
    pub backend: BackendId,
    /// What it stands on, such as `bubblewrap 0.8.0`.
    pub version: String,
    /// Each feature that was looked into.
    pub features: BTreeMap<Feature, Support>,
}

/// Something a backend may be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Feature {
    /// A network with nothing but its own loopback.
    NetworkDeny,
    /// The host's network.
    NetworkHost,
    /// A limit of processes.
    LimitPids,
    /// A limit of memory.
    LimitMemory,
    /// A limit of CPU time.
    LimitCpu,
    /// Snapshots, rewinds and forks.
    Snapshot,
    /// Snapshots while processes run.
    SnapshotLive,
    /// Pause and resume.
    Pause,
    /// Stop and start.
    Stop,
    /// Other users than the sandbox's own.
    Users,
    /// A filter of system calls.
    SyscallFilter,
    /// Processes that cannot see the host's.
    ProcessIsolation,
    /// Terminals.
    Pty,
}

/// How far something is supported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Support {
    /// How far.
    pub level: Level,
    /// What was tried and seen.
    pub evidence: String,
}

/// How far something is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// For the sandbox as a whole.
    Full,
    /// Only for each process by itself.
    PerProcess,
    /// Not at all.
    None,
}

impl Capabilities {
    /// Nothing yet.
    pub fn new(backend: BackendId, version: impl Into<String>) -> Self {
        Self { backend, version: version.into(), features: BTreeMap::new() }
    }

    /// The same, with one feature more.
    #[must_use]
    pub fn with(mut self, feature: Feature, level: Level, evidence: impl Into<String>) -> Self {
        self.features.insert(feature, Support { level, evidence: evidence.into() });
        self
    }

    /// How far a feature is supported; one that nobody looked into is not.
    #[must_use]
    pub fn level(&self, feature: Feature) -> Level {
        self.features.get(&feature).map_or(Level::None, |support| support.level)
    }

    /// Why a feature is (not) supported.
    #[must_use]
    pub fn evidence(&self, feature: Feature) -> &str {
        self.features.get(&feature).map_or("never tried", |support| &support.evidence)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
