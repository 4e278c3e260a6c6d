//! What is told about a sandbox to whoever asks from outside: a documented, flat document.

use std::{path::PathBuf, sync::Arc, time::Duration};

use jiff::Timestamp;
use sandbox_guest::{Request, Response};
use serde::{Deserialize, Serialize};

use crate::{
    Consumer, Name, Period, Reachability, SandboxId, SandboxInfo, SandboxState, SnapshotId,
    manager::{Inner, Shared},
};

/// How long a guest may take to say whether something runs.
const PATIENCE: Duration = Duration::from_secs(3);

/// A sandbox as command lines and services show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SandboxStatus {
    /// Its id.
    pub sandbox_id: SandboxId,
    /// Its name.
    pub name: Option<Name>,
    /// How many instances it has had by creation, rewind and recreation.
    pub generation: u32,
    /// The profile that it was made by.
    pub profile_id: Option<String>,
    /// The backend that made its instance: `ext.bwrap`.
    pub extension_id: Option<String>,
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
    /// How long it lives from then on, as asked for.
    pub ttl: Option<Period>,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
    /// Where the workspace is, inside.
    pub workspace: PathBuf,
    /// The snapshot that was taken last.
    pub latest_snapshot: Option<SnapshotId>,
    /// How someone else gets in, while it runs.
    pub reachability: Option<Reachability>,
}

impl SandboxStatus {
    pub(crate) fn of(
        info: SandboxInfo,
        state: SandboxState,
        reachability: Option<Reachability>,
    ) -> Self {
        Self {
            sandbox_id: info.sandbox_id,
            name: info.name,
            generation: info.generation,
            profile_id: info.profile.map(|profile| profile.id),
            extension_id: info.backend.map(|backend| backend.extension()),
            state,
            consumer: info.consumer,
            created_at: info.created_at,
            updated_at: info.updated_at,
            ready_at: info.ready_at,
            ttl: info.ttl,
            expires_at: info.expires_at,
            workspace: info.workspace,
            latest_snapshot: info.latest_snapshot,
            reachability,
        }
    }
}

/// Whether something runs in it, as far as its guest tells.
pub(crate) async fn something_runs(inner: &Arc<Inner>, shared: &Arc<Shared>) -> bool {
    let asked = async { shared.link(inner).await?.call(Request::Status).await };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(Response::Status(status))) => status.running > 0,
        _ => false,
    }
}
