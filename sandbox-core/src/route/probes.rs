//! Probes, kept for a while: they try things, which takes time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{BackendId, Capabilities, Error, ErrorKind, Result, SandboxBackend};

/// How long what a backend can do is believed.
const GOOD: Duration = Duration::from_secs(60);

/// How long it is believed that it can do nothing.
const BAD: Duration = Duration::from_secs(5);

/// How long a probe may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the backends can do, as it was last seen.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    seen: Mutex<HashMap<BackendId, (Instant, Result<Capabilities>)>>,
}

impl Probes {
    /// What a backend can do: as it was seen a short while ago, or now.
    pub(crate) async fn of(&self, backend: &Arc<dyn SandboxBackend>) -> Result<Capabilities> {
        if let Some((at, result)) = self.seen().get(&backend.id()) {
            let fresh = if result.is_ok() { GOOD } else { BAD };
            if at.elapsed() < fresh {
                return result.clone();
            }
        }
        self.now(backend).await
    }

    /// What a backend can do now.
    pub(crate) async fn now(&self, backend: &Arc<dyn SandboxBackend>) -> Result<Capabilities> {
        let result = match tokio::time::timeout(PATIENCE, backend.probe()).await {
            Ok(result) => result,
            Err(_) => {
                let message = format!("it was not done within {} s", PATIENCE.as_secs());
                Err(Error::new(ErrorKind::Timeout, "probe", message))
            }
        };
        let result = result.map_err(|error| error.with_backend(&backend.id()));
        self.seen().insert(backend.id(), (Instant::now(), result.clone()));
        result
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<BackendId, (Instant, Result<Capabilities>)>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
