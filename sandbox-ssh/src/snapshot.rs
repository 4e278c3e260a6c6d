//! What the history keeps of a snapshot on a host.

use sandbox_core::{BackendId, Error, ErrorKind, Result, SnapshotData};

use crate::instance::{self, Place};

/// Where a snapshot is, and how the host knows it.
pub(crate) fn place(
    operation: &'static str,
    backend: &BackendId,
    snapshot: &SnapshotData,
) -> Result<(Place, SnapshotData)> {
    if snapshot.backend != *backend {
        let message = format!("{} is a snapshot of the backend {}", snapshot.id, snapshot.backend);
        return Err(Error::unsupported(operation, message));
    }
    let place = instance::read(operation, &snapshot.data)?.ok_or_else(|| {
        let message = format!("{} does not say on which host it is", snapshot.id);
        Error::new(ErrorKind::Backend, operation, message)
    })?;
    let inner = SnapshotData {
        id: snapshot.id.clone(),
        backend: BackendId::new(place.isolation.to_string()),
        size: snapshot.size,
        data: place.inner.clone(),
    };
    Ok((place, inner))
}

/// The host's snapshot as the history keeps it.
pub(crate) fn outer(backend: &BackendId, inner: SnapshotData, at: &Place) -> Result<SnapshotData> {
    let place = Place { inner: inner.data, ..at.clone() };
    let data = serde_json::to_value(place).map_err(|error| {
        Error::new(ErrorKind::Backend, "describe", "the snapshot's data").with_source(error)
    })?;
    Ok(SnapshotData { id: inner.id, backend: backend.clone(), size: inner.size, data })
}
