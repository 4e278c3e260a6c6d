//! What a sandbox is: the fold of its history, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    BackendId, Consumer, Instance, InstanceId, Known, Name, Outcome, ProcessId, SandboxEvent,
    SandboxId, SandboxSpec, SnapshotData, SnapshotId,
};

/// How a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SandboxState {
    /// It was asked for; nothing has been made.
    Requested,
    /// Its first instance is being made.
    Provisioning,
    /// It can be used.
    Ready,
    /// It is used: something runs in it. Its [status](crate::SandboxStatus) tells; its history does not, as
    /// processes come and go on their own.
    Active,
    /// Its execution is held up.
    Paused,
    /// Its processes have ended; its files are there.
    Stopped,
    /// Its time was over, and it has ended by itself.
    Expired,
    /// Its instance is gone, and nobody asked for that.
    Lost,
    /// It could not be made.
    Failed,
    /// It is being removed.
    Destroying,
    /// It was removed.
    Destroyed,
}

impl SandboxState {
    /// Whether there is, or may yet be, a sandbox: as long as this holds, the name is its own.
    #[must_use]
    pub fn is_live(self) -> bool {
        !matches!(self, Self::Failed | Self::Destroyed)
    }
}

/// What the history says about a sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) id: SandboxId,
    pub(crate) seq: u64,
    pub(crate) name: Option<Name>,
    pub(crate) spec: SandboxSpec,
    pub(crate) consumer: Consumer,
    pub(crate) state: SandboxState,
    pub(crate) generation: u32,
    pub(crate) backend: Option<BackendId>,
    pub(crate) instance: Option<Instance>,
    pub(crate) snapshots: Vec<Snapshot>,
    /// The snapshot that the present filesystem came from.
    pub(crate) based_on: Option<SnapshotId>,
    pub(crate) created_at: Timestamp,
    pub(crate) updated_at: Timestamp,
    pub(crate) ready_at: Option<Timestamp>,
    pub(crate) expires_at: Option<Timestamp>,
    /// Its place is somebody else's: see [`Known::Attached`].
    pub(crate) borrowed: bool,
    /// What was begun and is not known to have ended.
    pub(crate) open: Option<Intent>,
    /// The `seq` of the record since which the present guest runs: those before have no processes left.
    pub(crate) since: u64,
    /// The detached processes: those that have not ended, and the latest that have.
    pub(crate) detached: BTreeMap<ProcessId, Detached>,
    /// Where its processes wanted to connect to.
    pub(crate) egress: Destinations,
}

/// Hosts and ports outside that processes wanted to connect to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Destinations {
    pub(crate) allowed: BTreeSet<(String, u16)>,
    pub(crate) denied: BTreeSet<(String, u16)>,
}

/// What the history says about a detached process.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Detached {
    /// Of its program and arguments.
    pub(crate) hash: [u8; 32],
    /// [`Record::since`] when it was started.
    pub(crate) since: u64,
    pub(crate) started_at: Timestamp,
    pub(crate) outcome: Option<Outcome>,
}

/// How many detached processes that have ended are remembered.
const MAX_ENDED: usize = 1024;

/// A snapshot of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Of this sandbox.
    pub sandbox: SandboxId,
    /// Why, in the words of whoever took it.
    pub label: String,
    /// The snapshot that the sandbox's filesystem came from, if it came from one.
    pub parent: Option<SnapshotId>,
    /// When.
    pub taken_at: Timestamp,
    /// What the backend knows of it.
    pub data: SnapshotData,
}

/// What was begun.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Intent {
    Create,
    Provision { backend: BackendId, instance: InstanceId },
    Attach { backend: BackendId, external: String, instance: InstanceId },
    Stop,
    Start,
    Snapshot { snapshot: SnapshotId, label: String, successor: InstanceId },
    Rewind { snapshot: SnapshotId, instance: InstanceId },
    DeleteSnapshot { snapshot: SnapshotId },
    Destroy,
}

impl Record {
    /// The record that a whole history makes; `None` for an empty one, or one that begins in a way that
    /// this release does not know.
    pub(crate) fn fold(events: &[SandboxEvent]) -> Option<Self> {
        let (first, rest) = events.split_first()?;
        let Some(Known::Requested { name, spec, from }) = first.known() else {
            return None;
        };
        let mut record = Self {
            id: first.sandbox_id.clone(),
            seq: first.seq,
            name: name.clone(),
            spec: spec.clone(),
            consumer: first.consumer.clone(),
            state: SandboxState::Requested,
            generation: 0,
            backend: None,
            instance: None,
            snapshots: Vec::new(),
            based_on: from.as_ref().map(|from| from.snapshot.clone()),
            created_at: first.at,
            updated_at: first.at,
            ready_at: None,
            expires_at: None,
            borrowed: false,
            open: Some(Intent::Create),
            since: 0,
            detached: BTreeMap::new(),
            egress: Destinations::default(),
        };
        record.apply_all(rest);
        Some(record)
    }

    pub(crate) fn apply_all(&mut self, events: &[SandboxEvent]) {
        for event in events {
            self.seq = event.seq;
            self.updated_at = event.at;
            if let Some(known) = event.known() {
                self.apply(event, known);
            }
        }
    }

    fn apply(&mut self, event: &SandboxEvent, known: &Known) {
        match known {
            Known::Requested { .. }
            | Known::BackendFailed { .. }
            | Known::Forked { .. }
            | Known::ProcessStarted { detached: false, .. }
            | Known::FileOperation { .. }
            | Known::PortForwarded { .. } => {}
            Known::EgressAllowed { host, port, .. } => {
                self.egress.allowed.insert((host.clone(), *port));
            }
            Known::EgressDenied { host, port, .. } => {
                self.egress.denied.insert((host.clone(), *port));
            }
            Known::ProcessStarted { process, argv, detached: true } => {
                let detached = Detached {
                    hash: hash_of(argv),
                    since: self.since,
                    started_at: event.at,
                    outcome: None,
                };
                self.detached.insert(process.clone(), detached);
            }
            Known::ProcessExited { process, outcome, .. } => self.exited(process, outcome.as_ref()),
            Known::Provisioning { backend, instance, .. } => {
                // A sandbox that is recreated goes on as it was until the new instance answers.
                if self.instance.is_none() {
                    self.state = SandboxState::Provisioning;
                    self.backend = Some(backend.clone());
                }
                self.open = Some(Intent::Provision {
                    backend: backend.clone(),
                    instance: instance.clone(),
                });
            }
            Known::Ready { instance, generation, expires_at, .. } => {
                self.runs(event, instance, *generation);
                // A first instance may come from another sandbox's snapshot; a later one is fresh.
                self.based_on = self.based_on.take().filter(|_| *generation == 1);
                self.ready_at.get_or_insert(event.at);
                self.expires_at = *expires_at;
            }
            Known::Attaching { backend, external, instance } => {
                self.state = SandboxState::Provisioning;
                self.backend = Some(backend.clone());
                self.open = Some(Intent::Attach {
                    backend: backend.clone(),
                    external: external.clone(),
                    instance: instance.clone(),
                });
            }
            Known::Attached { instance, .. } => {
                self.runs(event, instance, 1);
                self.borrowed = true;
                self.ready_at.get_or_insert(event.at);
            }
            Known::StopRequested => self.open = Some(Intent::Stop),
            Known::Stopped => {
                self.state = SandboxState::Stopped;
                self.open = None;
            }
            Known::StartRequested => self.open = Some(Intent::Start),
            Known::Started { instance } => self.runs(event, instance, self.generation),
            Known::Paused => self.state = SandboxState::Paused,
            Known::Resumed => self.state = SandboxState::Ready,
            Known::SnapshotRequested { snapshot, label, successor } => {
                self.open = Some(Intent::Snapshot {
                    snapshot: snapshot.clone(),
                    label: label.clone(),
                    successor: successor.clone(),
                });
            }
            Known::Snapshotted { snapshot, label, parent, data, instance } => {
                self.open = None;
                self.snapshots.push(Snapshot {
                    id: snapshot.clone(),
                    sandbox: self.id.clone(),
                    label: label.clone(),
                    parent: parent.clone(),
                    taken_at: event.at,
                    data: data.clone(),
                });
                self.based_on = Some(snapshot.clone());
                if let Some(instance) = instance {
                    self.instance = Some(instance.clone());
                    self.since = event.seq;
                }
            }
            Known::SnapshotDeleteRequested { snapshot } => {
                self.open = Some(Intent::DeleteSnapshot { snapshot: snapshot.clone() });
            }
            Known::SnapshotDeleted { snapshot } => {
                self.open = None;
                self.snapshots.retain(|kept| kept.id != *snapshot);
            }
            Known::RewindRequested { snapshot, instance, .. } => {
                self.open =
                    Some(Intent::Rewind { snapshot: snapshot.clone(), instance: instance.clone() });
            }
            Known::TtlExtended { expires_at } => self.expires_at = Some(*expires_at),
            Known::Expired { .. } => {
                self.state = SandboxState::Expired;
                self.open = None;
            }
            Known::Rewound { snapshot, instance, generation } => {
                self.runs(event, instance, *generation);
                self.based_on = Some(snapshot.clone());
            }
            Known::Lost { .. } => {
                self.state = SandboxState::Lost;
                self.open = None;
            }
            Known::Recovered { instance, snapshot, generation, .. } => {
                self.open = None;
                if let Some(instance) = instance {
                    self.runs(event, instance, *generation);
                    self.based_on = snapshot.clone();
                }
            }
            Known::Destroying => {
                self.state = SandboxState::Destroying;
                self.open = Some(Intent::Destroy);
            }
            Known::Destroyed | Known::Detached => {
                self.state = SandboxState::Destroyed;
                self.snapshots.clear();
                self.instance = None;
                self.open = None;
            }
            Known::Failed { .. } => {
                self.open = None;
                // A sandbox that never was usable is no sandbox; any other goes on as it was.
                if self.instance.is_none() {
                    self.state = SandboxState::Failed;
                }
            }
        }
    }

    fn runs(&mut self, event: &SandboxEvent, instance: &Instance, generation: u32) {
        self.since = event.seq;
        self.state = SandboxState::Ready;
        self.backend = Some(instance.backend.clone());
        self.instance = Some(instance.clone());
        self.generation = generation;
        self.open = None;
    }

    fn exited(&mut self, process: &ProcessId, outcome: Option<&Outcome>) {
        let Some(known) = self.detached.get_mut(process) else { return };
        let Some(outcome) = outcome else {
            // It was never started.
            self.detached.remove(process);
            return;
        };
        known.outcome = Some(outcome.clone());
        let ended = self.detached.iter().filter(|(_, known)| known.outcome.is_some());
        if ended.clone().count() > MAX_ENDED {
            let oldest = ended.min_by_key(|(_, known)| known.started_at).map(|(id, _)| id.clone());
            oldest.map(|id| self.detached.remove(&id));
        }
    }

    /// The detached processes that are not known to have ended.
    pub(crate) fn open_processes(&self) -> impl Iterator<Item = (&ProcessId, &Detached)> {
        self.detached.iter().filter(|(_, known)| known.outcome.is_none())
    }

    /// Those of them that cannot run any more, whatever became of them.
    pub(crate) fn lost_processes(&self) -> impl Iterator<Item = &ProcessId> {
        let runs = matches!(self.state, SandboxState::Ready | SandboxState::Paused);
        self.open_processes()
            .filter(move |(_, known)| !runs || known.since != self.since)
            .map(|(id, _)| id)
    }
}

/// Tells one command from another.
pub(crate) fn hash_of(argv: &[String]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for word in argv {
        hash.update((word.len() as u64).to_be_bytes());
        hash.update(word);
    }
    hash.finalize().into()
}
