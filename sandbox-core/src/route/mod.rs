//! Which backends may serve a request, and in what order they are tried.

mod measure;
mod probes;
mod requirements;

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

pub(crate) use measure::Measurements;
pub(crate) use probes::Probes;

use crate::{
    BackendId, Capabilities, Error, ErrorKind, Isolation, Result, SandboxBackend, SandboxSpec,
};

/// How the backends that may serve a profile are ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Strategy {
    /// The profile's own, and no other.
    #[default]
    Explicit,
    /// Machines of one's own before a provider's.
    PreferSelfHosted,
    /// The cheapest first.
    LowestCost,
    /// The fastest first, as measured: what making a sandbox and fifty round trips to it take. What was
    /// never measured is tried before all others, so that it is.
    LowestLatency,
}

/// Which backends may serve a request, and what they must be able to do beyond its spec.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    pub(crate) strategy: Strategy,
    /// None for the manager's own.
    pub(crate) candidates: Vec<BackendId>,
    pub(crate) isolation: Isolation,
    pub(crate) max_micro_usd_per_hour: Option<u64>,
    /// A host that was asked for, not just preferred.
    pub(crate) host: Option<String>,
}

/// The backends that are left, in order, and why the others are not.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) order: Vec<Arc<dyn SandboxBackend>>,
    pub(crate) out: Vec<Out>,
}

/// A backend that was considered and is out.
#[derive(Debug, Clone)]
pub(crate) struct Out {
    pub(crate) backend: BackendId,
    pub(crate) why: String,
}

impl fmt::Display for Out {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.backend, self.why)
    }
}

/// Keeps what fits, and orders it.
pub(crate) async fn choose(
    plan: &Plan,
    spec: &SandboxSpec,
    backends: &[Arc<dyn SandboxBackend>],
    probes: &Probes,
    measurements: &Measurements,
) -> Chosen {
    let candidates: Vec<BackendId> = match &plan.candidates[..] {
        [] => backends.iter().map(|backend| backend.id()).collect(),
        named => named.to_vec(),
    };
    let mut fitting = Vec::new();
    let mut out = Vec::new();
    for id in candidates {
        match consider(plan, spec, backends, probes, &id).await {
            Ok(found) => fitting.push(found),
            Err(why) => out.push(Out { backend: id, why }),
        }
    }
    match plan.strategy {
        Strategy::Explicit => {}
        Strategy::PreferSelfHosted => {
            fitting.sort_by_key(|(_, capabilities)| !capabilities.hosting.self_hosted);
        }
        Strategy::LowestCost => {
            fitting.sort_by_key(|(_, capabilities)| capabilities.hosting.micro_usd_per_hour);
        }
        Strategy::LowestLatency => {
            fitting.sort_by_cached_key(|(backend, _)| measurements.rank(&backend.id()));
        }
    }
    Chosen { order: fitting.into_iter().map(|(backend, _)| backend).collect(), out }
}

/// One candidate; or why it is out.
async fn consider(
    plan: &Plan,
    spec: &SandboxSpec,
    backends: &[Arc<dyn SandboxBackend>],
    probes: &Probes,
    id: &BackendId,
) -> Result<(Arc<dyn SandboxBackend>, Capabilities), String> {
    let found = backends.iter().find(|backend| backend.id() == *id);
    let backend = found.ok_or("this manager has no such backend")?;
    let capabilities = probes.of(backend).await.map_err(|error| error.message().to_owned())?;
    if plan.candidates.is_empty() && capabilities.hosting.only_by_name {
        return Err("it is only for those who ask for it by its name".to_owned());
    }
    requirements::check(plan, spec, &capabilities)?;
    Ok((Arc::clone(backend), capabilities))
}

/// The error when no backend is left: what was considered, and why each is out.
pub(crate) fn nothing_left(out: &[Out], last: Option<&Error>) -> Error {
    let list: Vec<String> = out.iter().map(ToString::to_string).collect();
    let message = format!("no backend can make it. Considered: {}", list.join("; "));
    match last {
        // The last one that was tried tells what kind of failure it is.
        Some(last) => Error::new(last.kind(), "create", message)
            .retryable(last.is_retryable())
            .with_source(last.clone()),
        None => Error::new(ErrorKind::Unsupported, "create", message),
    }
}
