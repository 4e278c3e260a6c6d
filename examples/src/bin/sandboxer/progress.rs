//! What goes on, told on standard error: a line that changes on a terminal, plain lines otherwise.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use indicatif::{ProgressBar, ProgressStyle};
use sandbox_core::{Known, Progress, SandboxEvent, SinkError, TurnEventSink, TurnId};
use sandbox_docker::PullProgress;
use sandbox_ssh::UploadProgress;

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
        Known::Attaching { external, .. } => format!("bringing the guest into {external}"),
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

/// Bytes on their way: a bar on a terminal, a line at the end otherwise.
#[derive(Debug)]
pub(crate) struct Bar {
    tell: bool,
    bar: Option<ProgressBar>,
}

impl Bar {
    pub(crate) fn new(tell: bool, terminal: bool) -> Self {
        let bar = (tell && terminal).then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { tell, bar }
    }

    /// So far.
    pub(crate) fn set(&self, so_far: &Progress) {
        let Some(bar) = &self.bar else { return };
        if let Some(total) = so_far.total.filter(|_| bar.length().is_none()) {
            bar.set_length(total);
            let template = "{spinner} {msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
        }
        bar.set_position(so_far.bytes);
        bar.set_message(format!("{} files, {} bytes", so_far.files, so_far.bytes));
    }

    /// That was all.
    pub(crate) fn end(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.finish_and_clear(),
            None if self.tell => eprintln!("sandboxer: {text}"),
            None => {}
        }
    }
}

/// Images on their way: a bar on a terminal, a line for each layer that is done otherwise.
#[derive(Debug)]
pub(crate) struct Pulls {
    tell: bool,
    bar: Option<ProgressBar>,
    layers: Mutex<HashMap<String, (u64, u64)>>,
}

impl Pulls {
    pub(crate) fn new(tell: bool, terminal: bool) -> Self {
        let bar = (tell && terminal).then(ProgressBar::hidden);
        Self { tell, bar, layers: Mutex::default() }
    }

    pub(crate) fn tell(&self, progress: &PullProgress) {
        let PullProgress { image, layer, status, done, total, .. } = progress;
        let text = format!("{image}: {} {status}", layer.as_deref().unwrap_or_default());
        let Some(bar) = &self.bar else {
            // Not each step of each layer.
            if self.tell && done.is_none() {
                eprintln!("sandboxer: {text}");
            }
            return;
        };
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(layer), Some(done), Some(total)) = (layer, done, total) {
            layers.insert(layer.clone(), (*done, *total));
        }
        let sum = |of: fn(&(u64, u64)) -> u64| layers.values().map(of).sum::<u64>();
        bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        bar.set_length(sum(|layer| layer.1));
        bar.set_position(sum(|layer| layer.0));
        bar.set_message(text);
    }
}

impl Drop for Pulls {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Workspaces on their way to other hosts: a bar on a terminal, a line for each otherwise.
#[derive(Debug)]
pub(crate) struct Uploads {
    tell: bool,
    bar: Option<ProgressBar>,
}

impl Uploads {
    pub(crate) fn new(tell: bool, terminal: bool) -> Self {
        let bar = (tell && terminal).then(ProgressBar::hidden);
        Self { tell, bar }
    }

    pub(crate) fn tell(&self, progress: &UploadProgress) {
        let UploadProgress { host, files, total_files, done, total, .. } = progress;
        // Not before the host has said what it does not have, nor if it has all.
        let (Some(total_files @ 1..), Some(total)) = (total_files, total) else { return };
        let Some(bar) = &self.bar else {
            // Not each piece of it.
            if self.tell && (*files, *done) == (0, 0) {
                eprintln!("sandboxer: bringing {total_files} files, {total} bytes, to {host}");
            }
            return;
        };
        bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        bar.set_length(*total);
        bar.set_position(*done);
        bar.set_message(format!("{host}: {files} of {total_files} files"));
        if files == total_files {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
