//! How long a sandbox lives: TTL, idle limit, lease. The guest enforces them; here they are set.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use sandbox_guest::Request;

use super::{Inner, Recorder, Shared, shared::running_instance};
use crate::{
    Error, ErrorKind, Known, Provision, Result, SandboxSpec, SandboxState, SnapshotData,
    guest::Link, record::Record,
};

/// How long making an instance may take, in seconds: so much later than asked it ends by itself, should its
/// harness vanish meanwhile. Whoever gets its first answer sets its times right.
pub(super) const PROVISIONING: u64 = 600;

/// So many seconds from now.
pub(super) fn later(seconds: u64) -> Timestamp {
    let duration = SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX));
    Timestamp::now().saturating_add(duration).unwrap_or(Timestamp::MAX)
}

/// What tells a guest when to end; what is not given stays as it is.
pub(super) fn deadline(expires_at: Option<Timestamp>, lease_until: Option<Timestamp>) -> Request {
    let milliseconds = |at: Timestamp| u64::try_from(at.as_millisecond()).unwrap_or(0);
    Request::Deadline {
        expires_at: expires_at.map(milliseconds),
        lease_until: lease_until.map(milliseconds),
    }
}

impl Inner {
    /// What an instance of a sandbox is made with.
    pub(super) fn provision(
        &self,
        shared: &Shared,
        spec: SandboxSpec,
        generation: u32,
        from: Option<SnapshotData>,
    ) -> Provision {
        let lifetime = spec.lifetime;
        let mut provision = Provision::new(shared.id.clone(), self.journal.owner(), spec);
        provision.generation = generation;
        provision.from = from;
        let lease = lifetime.lease_seconds;
        provision.lease_until = lease.map(|lease| later(lease.saturating_add(PROVISIONING)));
        provision.idle_limit = lifetime.idle_seconds.map(Duration::from_secs);
        provision
    }

    /// The same for one that exists: it ends when it would have.
    pub(super) fn provision_again(
        &self,
        shared: &Shared,
        record: &Record,
        generation: u32,
        from: Option<SnapshotData>,
    ) -> Provision {
        let mut provision = self.provision(shared, record.spec.clone(), generation, from);
        provision.expires_at = record.expires_at;
        provision
    }
}

/// Lets it end later, never later than its maximum.
pub(crate) async fn extend_ttl(recorder: Recorder, by: Duration) -> Result<Timestamp> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    let refuse = |kind, message: &str| Err(Error::new(kind, "extend TTL", message));
    match record.state {
        SandboxState::Ready | SandboxState::Paused | SandboxState::Stopped => {}
        _ => {
            running_instance(&record)?;
        }
    }
    let (Some(expires_at), Some(ready_at)) = (record.expires_at, record.ready_at) else {
        return refuse(ErrorKind::Conflict, "it has no TTL: it does not end by itself");
    };
    let by = SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX);
    let extended = expires_at.saturating_add(by).unwrap_or(Timestamp::MAX);
    if let Some(max) = record.spec.lifetime.max_ttl_seconds {
        let max = SignedDuration::from_secs(i64::try_from(max).unwrap_or(i64::MAX));
        let latest = ready_at.saturating_add(max).unwrap_or(Timestamp::MAX);
        if extended > latest {
            let message = format!("its time cannot be extended past {latest}, its maximum");
            return refuse(ErrorKind::LimitExceeded, &message);
        }
    }
    recorder.record(Known::TtlExtended { expires_at: extended }).await?;
    // A guest that does not run now hears of it when it is started.
    if record.state == SandboxState::Ready {
        let link = shared.link(&inner).await?;
        link.call(deadline(Some(extended), None)).await?;
    }
    Ok(extended)
}

/// Renews the lease of a sandbox that has one.
pub(crate) async fn renew_lease(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Result<()> {
    let record = shared.record(inner).await?;
    let Some(lease) = record.spec.lifetime.lease_seconds else {
        let message = "it was made without a lease";
        return Err(
            Error::new(ErrorKind::Conflict, "renew the lease", message).with_sandbox(&shared.id)
        );
    };
    prolong(&*shared.link(inner).await?, lease).await
}

async fn prolong(link: &Link, lease: u64) -> Result<()> {
    link.call(deadline(None, Some(later(lease)))).await.map(drop)
}

/// Renews a lease, and goes on as long as the connection, and the manager that made it, live.
pub(super) async fn keep_lease(link: &Arc<Link>, lease: u64) -> Result<()> {
    prolong(link, lease).await?;
    let link: Weak<Link> = Arc::downgrade(link);
    let pause = Duration::from_millis(lease.saturating_mul(1000) / 3);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(pause).await;
            let Some(link) = link.upgrade() else { return };
            if link.is_closed() {
                return;
            }
            if let Err(error) = prolong(&link, lease).await {
                tracing::debug!(%error, "a lease was not renewed");
            }
        }
    });
    Ok(())
}

/// Which of its times was over, if its instance has ended for that: the guest ends a little early or
/// late by its own clock.
pub(super) fn is_over(record: &Record) -> Option<&'static str> {
    let soon = Timestamp::now().saturating_add(SignedDuration::from_secs(2)).ok()?;
    if record.expires_at.is_some_and(|at| at <= soon) {
        return Some("its TTL was over");
    }
    let quiet = Timestamp::now().duration_since(record.updated_at);
    let longer = |seconds: Option<u64>| {
        seconds.is_some_and(|seconds| quiet.as_secs().unsigned_abs() + 2 >= seconds)
    };
    if longer(record.spec.lifetime.idle_seconds) {
        return Some("its idle limit was reached");
    }
    if longer(record.spec.lifetime.lease_seconds) {
        return Some("its lease was not renewed");
    }
    None
}
