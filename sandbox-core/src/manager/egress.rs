//! A sandbox's connections to the outside: who answers for them, and what its history says of them.
//!
//! Each destination is recorded once, before it is connected to for the first time. How often it was is not.

use std::sync::{Arc, Weak};

use async_trait::async_trait;

use super::{Inner, Recorder, Repeats, Shared};
use crate::{
    Error, ErrorKind, Known, Network, Result, SandboxSpec,
    egress::{Allowed, Rules, Told},
    guest::Link,
};

/// How many destinations a history may have that were allowed: beyond them, no more are.
const MAX_ALLOWED: usize = 1024;

/// How many that were denied; beyond them, no more are recorded.
const MAX_DENIED: usize = 256;

/// What a process may say of a destination is recorded up to this length.
const MAX_HOST: usize = 253;

/// Answers a guest that asks for connections, if its sandbox may have any.
pub(super) async fn serve(
    inner: &Arc<Inner>,
    shared: &Arc<Shared>,
    link: &Link,
    spec: &SandboxSpec,
) -> Result<()> {
    if spec.egress.is_empty() {
        return Ok(());
    }
    let rules = check(spec)?;
    let told = Teller { inner: Arc::downgrade(inner), shared: Arc::downgrade(shared) };
    link.serve_egress(rules, Arc::new(told)).await
}

/// The patterns of a spec, if they make sense.
pub(crate) fn check(spec: &SandboxSpec) -> Result<Rules> {
    let invalid = |why: String| Error::new(ErrorKind::InvalidSpec, "create", why);
    let rules = Rules::parse(&spec.egress).map_err(|why| invalid(format!("egress: {why}")))?;
    if !spec.egress.is_empty() && spec.network != Network::Deny {
        let why = "egress: single hosts are let through where the network is denied; this sandbox is to \
                   have a network";
        return Err(invalid(why.to_owned()));
    }
    Ok(rules)
}

/// Writes into a sandbox's history. It keeps no manager alive.
struct Teller {
    inner: Weak<Inner>,
    shared: Weak<Shared>,
}

impl Teller {
    async fn recorder(&self) -> Result<Recorder> {
        let (Some(inner), Some(shared)) = (self.inner.upgrade(), self.shared.upgrade()) else {
            return Err(Error::new(ErrorKind::Cancelled, "record", "the manager is gone"));
        };
        let consumer = shared.record(&inner).await?.consumer.clone();
        Ok(Recorder::of_nobody(&inner, &shared, consumer))
    }
}

#[async_trait]
impl Told for Teller {
    async fn allowed(&self, what: &Allowed) -> Result<()> {
        let Allowed { host, port, pattern, .. } = what.clone();
        let recorder = self.recorder().await?;
        let _one = recorder.shared.telling_egress.lock().await;
        let record = recorder.shared.record(&recorder.inner).await?;
        if record.egress.allowed.contains(&(host.clone(), port)) {
            return Ok(());
        }
        if record.egress.allowed.len() >= MAX_ALLOWED {
            let message =
                format!("the sandbox has connected to {MAX_ALLOWED} destinations already");
            return Err(Error::new(ErrorKind::LimitExceeded, "record", message));
        }
        recorder.record(Known::EgressAllowed { host, port, pattern }).await.map(drop)
    }

    async fn denied(&self, host: &str, port: u16, reason: &str) {
        let host: String = host.chars().take(MAX_HOST).collect();
        let recorded = async {
            let recorder = self.recorder().await?;
            let _one = recorder.shared.telling_egress.lock().await;
            let record = recorder.shared.record(&recorder.inner).await?;
            let before = record.egress.denied.len();
            if before >= MAX_DENIED || record.egress.denied.contains(&(host.clone(), port)) {
                return Ok(());
            }
            let (reason, last_told) = (reason.to_owned(), before + 1 == MAX_DENIED);
            recorder.record(Known::EgressDenied { host, port, reason, last_told }).await.map(drop)
        };
        let recorded: Result<()> = recorded.await;
        if let Err(error) = recorded {
            // Nothing was let through.
            tracing::debug!(%error, "a connection that was denied is not in the history");
        }
    }

    fn cut(&self) {
        let (inner, shared) = (self.inner.clone(), self.shared.clone());
        tokio::spawn(async move {
            if let Err(error) = connect_again(&inner, &shared).await {
                tracing::debug!(%error, "connections to the outside wait for the next call");
            }
        });
    }
}

/// Processes may go on while nobody calls: the connection to their guest is made again, as long as it may
/// be that it was only cut.
async fn connect_again(inner: &Weak<Inner>, shared: &Weak<Shared>) -> Result<()> {
    let mut repeats = Repeats::new();
    loop {
        let linked = {
            let (Some(inner), Some(shared)) = (inner.upgrade(), shared.upgrade()) else {
                return Ok(());
            };
            shared.link(&inner).await
        };
        match linked {
            Ok(_) => return Ok(()),
            Err(error) if repeats.again(&error).await => {}
            Err(error) => return Err(error),
        }
    }
}
