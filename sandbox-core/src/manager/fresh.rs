//! An instance that was just made, and is no sandbox's yet.

use std::sync::Arc;

use sandbox_guest::{Request, Response};
use tokio::sync::Mutex;

use super::{
    Recorder,
    shared::{Repeats, connect},
};
use crate::{Instance, Result, SandboxBackend, SandboxSpec, guest::Link};

/// A fresh instance and the connection to its guest, which is made anew when it is cut: the journal does not
/// name the instance yet, so that nothing else would find it.
#[derive(Debug)]
pub(crate) struct Fresh {
    recorder: Recorder,
    backend: Arc<dyn SandboxBackend>,
    instance: Instance,
    spec: SandboxSpec,
    link: Mutex<Option<Arc<Link>>>,
}

impl Fresh {
    /// Connects to it for the first time.
    pub(super) async fn greet(
        recorder: &Recorder,
        backend: &Arc<dyn SandboxBackend>,
        instance: Instance,
        spec: SandboxSpec,
    ) -> Result<Self> {
        let (recorder, backend) = (recorder.clone(), Arc::clone(backend));
        let fresh = Self { recorder, backend, instance, spec, link: Mutex::default() };
        fresh.link().await?;
        Ok(fresh)
    }

    pub(super) fn instance(&self) -> &Instance {
        &self.instance
    }

    /// A connection that stands.
    pub(crate) async fn link(&self) -> Result<Arc<Link>> {
        let mut slot = self.link.lock().await;
        if let Some(link) = &*slot
            && !link.is_closed()
        {
            return Ok(Arc::clone(link));
        }
        let link = connect(&*self.backend, &self.instance).await?;
        let Recorder { inner, shared, .. } = &self.recorder;
        let link = shared.put_to_use(inner, link, &self.spec).await?;
        *slot = Some(Arc::clone(&link));
        Ok(link)
    }

    /// Lets go of this connection, if it is still the one in use.
    pub(crate) async fn unlink_from(&self, link: &Arc<Link>) {
        let mut slot = self.link.lock().await;
        if slot.as_ref().is_some_and(|used| Arc::ptr_eq(used, link)) {
            slot.take();
        }
    }

    /// Asks something that can be asked again: over a cut connection it is, for a bounded time.
    pub(super) async fn ask(&self, request: Request) -> Result<Response> {
        let mut repeats = Repeats::new();
        loop {
            let answer = async { self.link().await?.call(request.clone()).await };
            match answer.await {
                Err(error) if repeats.again(&error).await => {}
                answer => return answer,
            }
        }
    }

    /// The instance, and its connection if that stands, for whoever makes it a sandbox's.
    pub(super) async fn parts(&self) -> (Instance, Option<Arc<Link>>) {
        (self.instance.clone(), self.link.lock().await.clone())
    }
}
