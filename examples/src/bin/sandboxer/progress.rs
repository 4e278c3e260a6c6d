//! What goes on, told on standard error: a line that changes on a terminal, plain lines otherwise.

use std::time::Duration;

use async_trait::async_trait;
use indicatif::ProgressBar;
use sandbox_core::{Known, SandboxEvent, SinkError, TurnEventSink, TurnId};

/// A sink that tells what a call does to a sandbox.
#[derive(Debug)]
pub(crate) struct ProgressSink {
    turn: TurnId,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Silent,
    Lines,
    Spinner(ProgressBar),
}

impl ProgressSink {
    pub(crate) fn new(tell: bool, terminal: bool) -> Self {
        let way = match (tell, terminal) {
            (false, _) => Way::Silent,
            (true, false) => Way::Lines,
            (true, true) => Way::Spinner(ProgressBar::new_spinner()),
        };
        // Each call is a turn of its own.
        let turn = TurnId::new(format!("sandboxer-{}", std::process::id()));
        Self { turn, way }
    }

    /// Tells nothing, for calls whose output is the point.
    pub(crate) fn silent() -> Self {
        Self::new(false, false)
    }

    fn tell(&self, text: String) {
        match &self.way {
            Way::Silent => {}
            Way::Lines => eprintln!("sandboxer: {text}"),
            Way::Spinner(bar) => {
                bar.enable_steady_tick(Duration::from_millis(100));
                bar.set_message(text);
            }
        }
    }
}

impl Drop for ProgressSink {
    fn drop(&mut self) {
        if let Way::Spinner(bar) = &self.way {
            bar.finish_and_clear();
        }
    }
}

#[async_trait]
impl TurnEventSink for ProgressSink {
    fn turn(&self) -> Option<TurnId> {
        Some(self.turn.clone())
    }

    async fn emit(&self, event: &SandboxEvent) -> Result<(), SinkError> {
        if let Some(text) = event.known().and_then(words) {
            self.tell(text);
        }
        Ok(())
    }
}

/// What is worth telling of an event.
fn words(event: &Known) -> Option<String> {
    Some(match event {
        Known::Provisioning { backend, .. } => format!("making an instance on {backend}"),
        Known::BackendFailed { backend, error } => format!("{backend} could not: {error}"),
        Known::ProcessStarted { argv, .. } => format!("running {}", argv.join(" ")),
        Known::SnapshotRequested { .. } => "taking a snapshot".into(),
        Known::RewindRequested { snapshot, .. } => format!("rewinding to {snapshot}"),
        Known::SnapshotDeleteRequested { snapshot } => format!("removing {snapshot}"),
        Known::StopRequested => "stopping".into(),
        Known::StartRequested => "starting".into(),
        Known::Destroying => "removing the sandbox".into(),
        Known::Expired { reason } => format!("expired: {reason}"),
        Known::Lost { reason } => format!("lost: {reason}"),
        Known::Recovered { what, .. } => format!("recovered: {what}"),
        _ => return None,
    })
}
