//! The way to a guest, for what goes on over another connection when one is cut.

use std::sync::Arc;

use crate::{
    Error, ErrorKind, Result, SandboxState,
    guest::Link,
    manager::{Fresh, Recorder},
};

/// How a guest is reached, again and again.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// The guest of whatever instance the sandbox has now.
    Sandbox(Recorder),
    /// That of an instance which is being set up.
    Fresh(Arc<Fresh>),
}

impl Way {
    /// A connection that stands.
    pub(crate) async fn link(&self) -> Result<Arc<Link>> {
        match self {
            Self::Sandbox(recorder) => recorder.shared.link(&recorder.inner).await,
            Self::Fresh(fresh) => fresh.link().await,
        }
    }

    /// Lets go of this connection, if it is still the one in use.
    pub(crate) async fn unlink_from(&self, link: &Arc<Link>) {
        match self {
            Self::Sandbox(recorder) => recorder.shared.unlink_from(link).await,
            Self::Fresh(fresh) => fresh.unlink_from(link).await,
        }
    }

    /// Whether the sandbox is paused, so that its guest does not answer.
    pub(crate) async fn is_paused(&self) -> bool {
        let Self::Sandbox(recorder) = self else { return false };
        let record = recorder.shared.record(&recorder.inner).await;
        record.is_ok_and(|record| record.state == SandboxState::Paused)
    }

    /// Makes sure that the present guest is still the one that was meant: see
    /// [`Record::since`](crate::record::Record).
    pub(crate) async fn check_since(&self, since: Option<u64>) -> Result<()> {
        let (Self::Sandbox(recorder), Some(since)) = (self, since) else { return Ok(()) };
        if recorder.shared.record(&recorder.inner).await?.since == since {
            return Ok(());
        }
        let message = "the sandbox got a new instance before the process was started";
        Err(Error::new(ErrorKind::Lost, "spawn", message))
    }
}

impl From<Recorder> for Way {
    fn from(recorder: Recorder) -> Self {
        Self::Sandbox(recorder)
    }
}
