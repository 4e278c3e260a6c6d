//! Places that somebody else made, and that are only borrowed.

use std::sync::Arc;

use super::{
    Call, Recorder, SandboxManager, ends,
    life::finish_destroying,
    shared::{Shared, connect},
};
use crate::{
    BackendId, Consumer, Error, ErrorKind, Known, Result, Sandbox, SandboxId, SandboxSpec,
    TurnEventSink,
};

impl SandboxManager {
    /// A sandbox that is a place which somebody else made, such as a running container: commands and files
    /// are those of that place. It is borrowed: it is never stopped, paused, snapshotted, rewound or
    /// destroyed, and [`Sandbox::detach`] leaves it as it was. What runs in it is not isolated any further
    /// than the place is.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the backend has no such places, `NotFound` if it has none of this name; otherwise
    /// what the backend says, and then nothing is left in it.
    pub async fn attach(
        &self,
        backend: &BackendId,
        external: &str,
        consumer: Consumer,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let shared = self.inner.shared(&SandboxId::new());
        let handle = self.handle(&shared);
        let (backend, external) = (backend.clone(), external.to_owned());
        let call = Call::new(&self.inner, &shared, consumer, sink);
        call.drive(|recorder| bring_in(recorder, backend, external)).await?;
        Ok(handle)
    }
}

async fn bring_in(recorder: Recorder, id: BackendId, external: String) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let backend = inner.backend(&id)?;
    let _lock = inner.journal.lock(&shared.id).await?;
    let spec = SandboxSpec { backend: Some(id.clone()), ..SandboxSpec::default() };
    recorder.record(Known::Requested { name: None, spec: spec.clone(), from: None }).await?;
    let request = inner.provision(&shared, spec, 1, None);
    let instance = request.instance.clone();
    let place = external.clone();
    recorder.record(Known::Attaching { backend: id, external: place, instance }).await?;
    let made = async {
        let instance = backend.attach(&external, &request).await?;
        let linked = async {
            let link = connect(&*backend, &instance).await?;
            shared.put_to_use(&inner, link, &request.spec).await
        };
        match linked.await {
            Ok(link) => Ok((instance, link)),
            Err(error) => {
                backend.teardown(&instance).await?;
                Err(error)
            }
        }
    };
    match made.await {
        Ok((instance, link)) => {
            let reachability = super::create::reachability(&*backend, &instance).await;
            shared.relink(Some(link)).await;
            recorder.record(Known::Attached { external, instance, reachability }).await?;
            Ok(())
        }
        Err(error) => {
            recorder.failed("attach", &error).await?;
            inner.journal.retire(&shared.id).await?;
            Err(error)
        }
    }
}

/// Leaves a borrowed place.
pub(crate) async fn detach(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::<Shared>::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if !record.borrowed {
        let message = "it was made, not attached; destroy it instead";
        return Err(Error::new(ErrorKind::Conflict, "detach", message));
    }
    if !record.state.is_live() {
        return Ok(());
    }
    ends::collect(&recorder, &record).await;
    recorder.record(Known::Destroying).await?;
    finish_destroying(&inner, &shared, &record).await?;
    ends::lose(&recorder).await?;
    recorder.record(Known::Detached).await?;
    inner.journal.retire(&shared.id).await
}
