//! What happens to a sandbox, as records: the journal's lines and what sinks see are the same.

use std::net::SocketAddr;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;

use crate::{
    BackendId, Consumer, EventId, Instance, InstanceId, Name, Outcome, ProcessId, Reachability,
    Result, SandboxId, SandboxSpec, SnapshotData, SnapshotId, TurnId,
};

/// One record of a sandbox's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxEvent {
    /// Its id.
    pub id: EventId,
    /// The sandbox that it is about.
    pub sandbox_id: SandboxId,
    /// Its place in the sandbox's history: 1, 2, 3 … without gaps.
    pub seq: u64,
    /// When it was recorded.
    pub at: Timestamp,
    /// The turn of the call that caused it.
    #[serde(default)]
    pub turn: Option<TurnId>,
    /// On whose behalf.
    #[serde(default)]
    pub consumer: Consumer,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened. Kinds that this release does not know are kept as they are.
///
/// An intent (`…_requested`, `provisioning`, `attaching`, `destroying`, `process_started`) is recorded before its
/// effect, the result after it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "nearly every event is of a known kind")]
pub enum EventKind {
    /// A kind that this library knows.
    Known(Known),
    /// Any other, from an older or a newer release.
    Unknown(Value),
}

/// The kinds that this library knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "events are few, and kept behind pointers")]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Known {
    /// A sandbox was asked for. The first record of every history.
    Requested {
        /// Its name.
        name: Option<Name>,
        /// As asked for.
        spec: SandboxSpec,
        /// The snapshot that it starts from, and the sandbox that it is of.
        #[serde(default)]
        from: Option<ForkedFrom>,
    },
    /// An instance is about to be made.
    Provisioning {
        /// By this backend.
        backend: BackendId,
        /// With this id.
        instance: InstanceId,
        /// The how-manieth generation.
        generation: u32,
    },
    /// A backend could not make one; another may be tried.
    BackendFailed {
        /// Which.
        backend: BackendId,
        /// Why.
        error: String,
    },
    /// The sandbox can be used.
    Ready {
        /// Through this instance.
        instance: Instance,
        /// The how-manieth generation.
        generation: u32,
        /// How someone else gets in.
        reachability: Option<Reachability>,
        /// When it ends by itself.
        #[serde(default)]
        expires_at: Option<Timestamp>,
    },
    /// The guest is about to be brought into a place that somebody else made.
    Attaching {
        /// By this backend.
        backend: BackendId,
        /// What it calls that place.
        external: String,
        /// With this id.
        instance: InstanceId,
    },
    /// The guest was brought into a place that somebody else made, which is borrowed.
    Attached {
        /// What the backend calls that place.
        external: String,
        /// Through this instance.
        instance: Instance,
        /// How someone else gets in.
        reachability: Option<Reachability>,
    },
    /// The guest has left a borrowed place, which is as it was before.
    Detached,
    /// It is about to be stopped.
    StopRequested,
    /// It was stopped: its processes have ended, its files are there.
    Stopped,
    /// It is about to be started.
    StartRequested,
    /// It was started again.
    Started {
        /// The instance as it is now.
        instance: Instance,
    },
    /// It is paused.
    Paused,
    /// It goes on.
    Resumed,
    /// A snapshot is about to be taken.
    SnapshotRequested {
        /// With this id.
        snapshot: SnapshotId,
        /// Why, in the caller's words.
        label: String,
        /// The id of the instance that may take the place of the present one.
        successor: InstanceId,
    },
    /// A snapshot was taken.
    Snapshotted {
        /// With this id.
        snapshot: SnapshotId,
        /// Why, in the caller's words.
        label: String,
        /// The snapshot that the sandbox's filesystem came from, if it came from one.
        parent: Option<SnapshotId>,
        /// What the backend knows of it.
        data: SnapshotData,
        /// The instance that took the old one's place, if one did.
        instance: Option<Instance>,
    },
    /// A snapshot is about to be removed.
    SnapshotDeleteRequested {
        /// Which.
        snapshot: SnapshotId,
    },
    /// A snapshot was removed.
    SnapshotDeleted {
        /// Which.
        snapshot: SnapshotId,
    },
    /// The sandbox is about to get the filesystem of a snapshot.
    RewindRequested {
        /// Which.
        snapshot: SnapshotId,
        /// The id of the instance to be made.
        instance: InstanceId,
        /// The how-manieth generation that will be.
        generation: u32,
    },
    /// It has it.
    Rewound {
        /// Which snapshot's.
        snapshot: SnapshotId,
        /// Through this instance.
        instance: Instance,
        /// The how-manieth generation.
        generation: u32,
    },
    /// A new sandbox was made from one of its snapshots.
    Forked {
        /// Which snapshot.
        snapshot: SnapshotId,
        /// The new sandbox.
        into: SandboxId,
    },
    /// A process is about to be started.
    ProcessStarted {
        /// With this id.
        process: ProcessId,
        /// Program and arguments; what is not UTF-8 is replaced.
        argv: Vec<String>,
        /// Whether it goes on without its harness.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        detached: bool,
    },
    /// A process has ended, or was never started.
    ProcessExited {
        /// Which.
        process: ProcessId,
        /// How; `None` if it could not be started.
        outcome: Option<Outcome>,
        /// Why it could not be started.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The harness is about to change files itself. Whether it succeeded is the call's result.
    FileOperation {
        /// What it does: `write`, `remove` …
        operation: String,
        /// To what; what is not UTF-8 is replaced.
        path: String,
    },
    /// A port of the sandbox is about to be opened on the harness's loopback, for as long as the harness
    /// wants.
    PortForwarded {
        /// Which port.
        port: u16,
        /// Where.
        local: SocketAddr,
    },
    /// A process of the sandbox wanted to connect to the outside, and may: the first time for this
    /// destination.
    EgressAllowed {
        /// The host's name, or its address.
        host: String,
        /// The port there.
        port: u16,
        /// The pattern that allows it.
        pattern: String,
    },
    /// One that may not, likewise.
    EgressDenied {
        /// The host, as the process named it.
        host: String,
        /// The port there.
        port: u16,
        /// Why not.
        reason: String,
        /// There have been so many that no further ones are told.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        last_told: bool,
    },
    /// It ends by itself later than it would have.
    TtlExtended {
        /// Then.
        expires_at: Timestamp,
    },
    /// Its time was over, and it has ended by itself; what it leaves is to be removed.
    Expired {
        /// Which time: its TTL, its idle limit or its lease.
        reason: String,
    },
    /// The instance is gone, and nobody asked for that.
    Lost {
        /// What was seen.
        reason: String,
    },
    /// What a crash had left open was settled, or a lost sandbox came back.
    Recovered {
        /// What was found and done.
        what: String,
        /// The instance from now on, if it is another one.
        #[serde(default)]
        instance: Option<Instance>,
        /// The snapshot that its filesystem came from, if it is another one and came from one.
        #[serde(default)]
        snapshot: Option<SnapshotId>,
        /// The how-manieth generation.
        generation: u32,
    },
    /// The sandbox is about to be removed.
    Destroying,
    /// It was removed. Its history stays.
    Destroyed,
    /// Something that was asked for could not be done.
    Failed {
        /// What.
        operation: String,
        /// Why.
        error: String,
    },
}

/// Where a fork came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkedFrom {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The snapshot of it.
    pub snapshot: SnapshotId,
}

impl SandboxEvent {
    /// The kind's name, as the journal has it: `ready`, `process_exited` …
    #[must_use]
    pub fn name(&self) -> String {
        let value = serde_json::to_value(&self.kind).unwrap_or_default();
        value["kind"].as_str().unwrap_or("unknown").to_owned()
    }

    /// The kind, if this library knows it.
    #[must_use]
    pub fn known(&self) -> Option<&Known> {
        match &self.kind {
            EventKind::Known(known) => Some(known),
            EventKind::Unknown(_) => None,
        }
    }
}

impl Serialize for EventKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Known(known) => known.serialize(serializer),
            Self::Unknown(value) => value.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for EventKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let Some(kind) = value["kind"].as_str() else {
            return Err(D::Error::custom("a record without a kind"));
        };
        if KNOWN.contains(&kind) {
            // A known kind that does not fit is damage, not the future.
            Known::deserialize(&value).map(Self::Known).map_err(D::Error::custom)
        } else {
            Ok(Self::Unknown(value))
        }
    }
}

impl From<Known> for EventKind {
    fn from(known: Known) -> Self {
        Self::Known(known)
    }
}

const KNOWN: &[&str] = &[
    "requested",
    "provisioning",
    "backend_failed",
    "ready",
    "stop_requested",
    "stopped",
    "start_requested",
    "started",
    "paused",
    "resumed",
    "snapshot_requested",
    "snapshotted",
    "snapshot_delete_requested",
    "snapshot_deleted",
    "rewind_requested",
    "rewound",
    "forked",
    "process_started",
    "process_exited",
    "file_operation",
    "port_forwarded",
    "egress_allowed",
    "egress_denied",
    "ttl_extended",
    "expired",
    "lost",
    "recovered",
    "destroying",
    "attaching",
    "attached",
    "detached",
    "destroyed",
    "failed",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind) -> SandboxEvent {
        SandboxEvent {
            id: EventId::new(),
            sandbox_id: SandboxId::new(),
            seq: 1,
            at: Timestamp::now(),
            turn: Some(TurnId::new("t1")),
            consumer: Consumer::agent("p"),
            kind,
        }
    }

    #[test]
    fn a_record_is_one_flat_object() {
        let destroyed = event(Known::Destroyed.into());
        let json = serde_json::to_value(&destroyed).unwrap();
        assert_eq!(json["kind"], "destroyed");
        assert_eq!(json["turn"], "t1");
        assert_eq!(json["consumer"]["actor"], "agt");
        assert_eq!(serde_json::from_value::<SandboxEvent>(json).unwrap(), destroyed);
        assert_eq!(destroyed.name(), "destroyed");
    }

    #[test]
    fn an_unknown_kind_is_kept_as_it_is() {
        let mut json = serde_json::to_value(event(Known::Destroyed.into())).unwrap();
        json["kind"] = "teleported".into();
        json["to"] = "mars".into();
        let read: SandboxEvent = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(read.name(), "teleported");
        assert!(read.known().is_none());
        assert_eq!(serde_json::to_value(&read).unwrap(), json);
    }

    #[test]
    fn a_known_kind_that_does_not_fit_is_an_error() {
        let mut json = serde_json::to_value(event(Known::Destroyed.into())).unwrap();
        json["kind"] = "provisioning".into();
        assert!(serde_json::from_value::<SandboxEvent>(json).is_err());
    }
}
