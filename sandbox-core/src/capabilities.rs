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
    /// Where its sandboxes are, and what they cost.
    #[serde(default)]
    pub hosting: Hosting,
}

/// Where a backend's sandboxes are, and what they cost. The default is this machine, for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hosting {
    /// On machines of one's own, not on a provider's.
    pub self_hosted: bool,
    /// What a sandbox costs in an hour, in millionths of a US dollar.
    pub micro_usd_per_hour: u64,
    /// The hosts that can be chosen from, for backends that have hosts.
    pub hosts: Vec<String>,
    /// Only for requests and profiles that name the backend, as there is less to expect of it than of others.
    pub only_by_name: bool,
}

impl Default for Hosting {
    fn default() -> Self {
        let hosts = Vec::new();
        Self { self_hosted: true, micro_usd_per_hour: 0, hosts, only_by_name: false }
    }
}

/// How far a sandbox is kept apart from its host, the least first.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// Processes with a directory of their own; nothing keeps them there.
    #[default]
    Process,
    /// Namespaces and a filter of system calls: the host's kernel, and nothing else of the host.
    Container,
    /// A kernel of its own.
    MicroVm,
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
    /// Snapshots in which files with holes keep them, and do not take up their whole size.
    SparseSnapshots,
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
    /// A kernel that is not the host's.
    OwnKernel,
    /// Container images as the root.
    Images,
    /// A directory of another host, itself, as the workspace of a sandbox there.
    RemoteWorkspace,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Self; 17] = [
        Self::NetworkDeny,
        Self::NetworkHost,
        Self::LimitPids,
        Self::LimitMemory,
        Self::LimitCpu,
        Self::Snapshot,
        Self::SnapshotLive,
        Self::SparseSnapshots,
        Self::Pause,
        Self::Stop,
        Self::Users,
        Self::SyscallFilter,
        Self::ProcessIsolation,
        Self::Pty,
        Self::OwnKernel,
        Self::Images,
        Self::RemoteWorkspace,
    ];
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
        Self {
            backend,
            version: version.into(),
            features: BTreeMap::new(),
            hosting: Hosting::default(),
        }
    }

    /// The same, hosted like this.
    #[must_use]
    pub fn hosted(mut self, hosting: Hosting) -> Self {
        self.hosting = hosting;
        self
    }

    /// How far its sandboxes are kept apart from the host, as its features say.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        let has = |feature| self.level(feature) == Level::Full;
        if has(Feature::OwnKernel) {
            Isolation::MicroVm
        } else if has(Feature::ProcessIsolation) && has(Feature::SyscallFilter) {
            Isolation::Container
        } else {
            Isolation::Process
        }
    }

    /// The same, with one feature more.
    #[must_use]
    pub fn with(mut self, feature: Feature, level: Level, evidence: impl Into<String>) -> Self {
        self.features.insert(feature, Support { level, evidence: evidence.into() });
        self
    }

    /// The same, and none of the features that nothing was said of, for this reason.
    #[must_use]
    pub fn with_nothing_else(mut self, evidence: &str) -> Self {
        for feature in Feature::ALL {
            let none = || Support { level: Level::None, evidence: evidence.to_owned() };
            self.features.entry(feature).or_insert_with(none);
        }
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

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nothing_was_said_of_can_be_said_at_once() {
        let found = Capabilities::new(BackendId::new("x"), "1")
            .with(Feature::Stop, Level::Full, "seen")
            .with_nothing_else("a directory");
        assert_eq!(found.level(Feature::Stop), Level::Full);
        assert_eq!(found.evidence(Feature::Stop), "seen");
        assert_eq!(found.level(Feature::Pause), Level::None);
        assert_eq!(found.evidence(Feature::Pause), "a directory");
        assert_eq!(found.features.len(), Feature::ALL.len());
    }

    #[test]
    fn isolation_is_what_the_features_say() {
        let none = Capabilities::new(BackendId::new("x"), "1");
        assert_eq!(none.isolation(), Isolation::Process);
        let some = none.with(Feature::ProcessIsolation, Level::Full, "seen");
        assert_eq!(some.isolation(), Isolation::Process, "without a filter it is no container");
        let container = some.with(Feature::SyscallFilter, Level::Full, "seen");
        assert_eq!(container.isolation(), Isolation::Container);
        let machine = container.with(Feature::OwnKernel, Level::Full, "seen");
        assert_eq!(machine.isolation(), Isolation::MicroVm);
        assert!(Isolation::Process < Isolation::Container);
    }
}
