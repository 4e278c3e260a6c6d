//! What can be told about a sandbox.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    BackendId, Consumer, Name, Period, ProfileRef, SandboxId, SandboxState, SnapshotId,
    record::Record,
};

/// Where the workspace is, inside.
pub const WORKSPACE: &str = "/workspace";

/// How a sandbox is, as its history says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SandboxInfo {
    /// Its id.
    pub sandbox_id: SandboxId,
    /// Its name.
    pub name: Option<Name>,
    /// How many instances it has had by creation, rewind and recreation.
    pub generation: u32,
    /// The fingerprint of what was asked for.
    pub spec_hash: String,
    /// The profile that it was made by.
    pub profile: Option<ProfileRef>,
    /// The backend that made its instance.
    pub backend: Option<BackendId>,
    /// How it is.
    pub state: SandboxState,
    /// Who asked for it.
    pub consumer: Consumer,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When something last happened to it.
    pub updated_at: Timestamp,
    /// When it could first be used.
    pub ready_at: Option<Timestamp>,
    /// How long it lives, as asked for, from then on.
    pub ttl: Option<Period>,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
    /// Where the workspace is, inside.
    pub workspace: PathBuf,
    /// The snapshot that was taken last.
    pub latest_snapshot: Option<SnapshotId>,
}

pub(crate) fn info(record: &Record) -> SandboxInfo {
    SandboxInfo {
        sandbox_id: record.id.clone(),
        name: record.name.clone(),
        generation: record.generation,
        spec_hash: record.spec.fingerprint(),
        profile: record.spec.profile.clone(),
        backend: record.backend.clone(),
        state: record.state,
        consumer: record.consumer.clone(),
        created_at: record.created_at,
        updated_at: record.updated_at,
        ready_at: record.ready_at,
        ttl: record.spec.lifetime.ttl_seconds.map(Period::from_seconds),
        expires_at: record.expires_at,
        workspace: WORKSPACE.into(),
        latest_snapshot: record.snapshots.last().map(|snapshot| snapshot.id.clone()),
    }
}
