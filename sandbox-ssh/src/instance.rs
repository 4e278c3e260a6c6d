//! What the history keeps of an instance on a host.

use std::path::PathBuf;

use sandbox_core::{BackendId, Error, ErrorKind, Instance, ReachabilityHints, Result};
use sandbox_host::message::Isolation;
use serde::{Deserialize, Serialize};

/// What is needed to find it again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The host, as it was named.
    pub(crate) host: String,
    pub(crate) isolation: Isolation,
    /// The workspace that was brought to the host, or stays there.
    pub(crate) workspace: Option<PathBuf>,
    /// How it is reached, as its spec says.
    #[serde(default)]
    pub(crate) hints: ReachabilityHints,
    /// The host's own data.
    pub(crate) inner: serde_json::Value,
}

/// Where an instance is; `None` if only its id is known.
pub(crate) fn place(operation: &'static str, instance: &Instance) -> Result<Option<Place>> {
    read(operation, &instance.data)
}

pub(crate) fn read(operation: &'static str, data: &serde_json::Value) -> Result<Option<Place>> {
    if data.is_null() {
        return Ok(None);
    }
    serde_json::from_value(data.clone()).map(Some).map_err(|error| {
        Error::new(ErrorKind::Backend, operation, "the instance's data").with_source(error)
    })
}

/// The instance as the host knows it.
pub(crate) fn inner(instance: &Instance, place: &Place) -> Instance {
    Instance {
        id: instance.id.clone(),
        sandbox: instance.sandbox.clone(),
        backend: BackendId::new(place.isolation.to_string()),
        data: place.inner.clone(),
    }
}

/// The host's instance as the history keeps it.
pub(crate) fn outer(backend: &BackendId, inner: Instance, at: &Place) -> Result<Instance> {
    let place = Place { inner: inner.data, ..at.clone() };
    let data = serde_json::to_value(place).map_err(|error| {
        Error::new(ErrorKind::Backend, "describe", "the instance's data").with_source(error)
    })?;
    Ok(Instance { id: inner.id, sandbox: inner.sandbox, backend: backend.clone(), data })
}
