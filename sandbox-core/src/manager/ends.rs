//! The ends of detached processes: recorded once each, by whichever manager sees them.
//!
//! A manager that starts one, or uses a sandbox that has some, waits for their ends. Where none did, the next
//! one that asks for processes hears of them. What went with its instance is recorded as lost, by whoever
//! replaced the instance or, if that one ended in the middle, by `reconcile`.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use sandbox_guest::{ProcessInfo, ProcessState, Request, Response};
use tokio::time::Instant;

use super::{Inner, Recorder, Shared};
use crate::{
    Error, ErrorKind, Known, Outcome, ProcessEnd, ProcessId, Result,
    guest::{self, Link, RECONNECT},
    record::Record,
};

/// How long whoever recorded a start may take to ask the guest for it.
const STARTING: SignedDuration = SignedDuration::from_secs(180);

/// How long a guest that is about to be ended may take to tell what has ended.
const LAST_WORD: Duration = Duration::from_secs(2);

/// Records that a detached process has ended, unless that is recorded.
pub(crate) async fn record(
    recorder: &Recorder,
    process: &ProcessId,
    end: std::result::Result<Outcome, String>,
) -> Result<()> {
    let _lock = recorder.inner.journal.lock(&recorder.shared.id).await?;
    record_locked(recorder, process, end).await
}

async fn record_locked(
    recorder: &Recorder,
    process: &ProcessId,
    end: std::result::Result<Outcome, String>,
) -> Result<()> {
    let record = recorder.shared.record(&recorder.inner).await?;
    if !record.open_processes().any(|(open, _)| open == process) {
        return Ok(());
    }
    let (outcome, error) = match end {
        Ok(outcome) => (Some(outcome), None),
        Err(error) => (None, Some(error)),
    };
    let process = process.clone();
    recorder.record(Known::ProcessExited { process, outcome, error }).await.map(drop)
}

/// Records as lost what cannot run any more. The lock is held.
pub(super) async fn lose(recorder: &Recorder) -> Result<()> {
    let record = recorder.shared.record(&recorder.inner).await?;
    let lost: Vec<ProcessId> = record.lost_processes().cloned().collect();
    for process in lost {
        let outcome = Outcome::Lost("the sandbox's instance ended, and the process with it".into());
        record_locked(recorder, &process, Ok(outcome)).await?;
    }
    Ok(())
}

/// Records what has ended, before the guest that knows it is ended. The lock is held; a guest that does not
/// answer holds nobody up.
pub(super) async fn collect(recorder: &Recorder, record: &Record) {
    if record.open_processes().next().is_none() {
        return;
    }
    let collected = async {
        let link = recorder.shared.link_locked(&recorder.inner).await?;
        for info in list(link.call(Request::Processes).await?)? {
            if let Some((process, outcome)) = ended(&info) {
                record_locked(recorder, &process, Ok(outcome)).await?;
            }
        }
        Ok::<_, Error>(())
    };
    if let Ok(Err(error)) = tokio::time::timeout(LAST_WORD, collected).await {
        tracing::debug!(%error, "a guest did not tell what had ended");
    }
}

/// Records which of these have ended, and which of the recorded ones there are not.
pub(crate) async fn settle(recorder: &Recorder, all: &[ProcessInfo]) -> Result<()> {
    let record = recorder.shared.record(&recorder.inner).await?;
    for (process, known) in record.open_processes() {
        let info = all.iter().find(|info| info.process == process.as_str());
        match info.map(ended) {
            Some(Some((_, outcome))) => self::record(recorder, process, Ok(outcome)).await?,
            Some(None) => watch(&recorder.inner, &recorder.shared, process),
            None if Timestamp::now().duration_since(known.started_at) > STARTING => {
                never_started(recorder, process).await?;
            }
            None => {}
        }
    }
    Ok(())
}

async fn never_started(recorder: &Recorder, process: &ProcessId) -> Result<()> {
    let why = "it was never started: the harness ended before that".to_owned();
    record(recorder, process, Err(why)).await
}

/// The process and its outcome, if it has ended.
fn ended(info: &ProcessInfo) -> Option<(ProcessId, Outcome)> {
    match &info.state {
        ProcessState::Exited(exit) => {
            Some((info.process.parse().ok()?, ProcessEnd::exited(exit).outcome))
        }
        _ => None,
    }
}

/// The processes that a guest lists.
pub(crate) fn list(response: Response) -> Result<Vec<ProcessInfo>> {
    match response {
        Response::Processes(all) => Ok(all),
        other => Err(guest::unexpected(&other)),
    }
}

/// Waits for a process's end in a task of its own, as long as the manager lives, and records it.
pub(crate) fn watch(inner: &Arc<Inner>, shared: &Arc<Shared>, process: &ProcessId) {
    if !shared.begin_watching(process) {
        return;
    }
    let (inner, shared) = (Arc::downgrade(inner), Arc::downgrade(shared));
    let process = process.clone();
    tokio::spawn(async move {
        if let Err(error) = until_end(&inner, &shared, &process).await {
            tracing::debug!(%error, %process, "a process's end was not waited for");
        }
        if let Some(shared) = shared.upgrade() {
            shared.end_watching(&process);
        }
    });
}

async fn until_end(inner: &Weak<Inner>, shared: &Weak<Shared>, process: &ProcessId) -> Result<()> {
    let mut deadline = Instant::now() + RECONNECT;
    loop {
        let Some(recorder) = recorder(inner, shared).await? else { return Ok(()) };
        let since = recorder.shared.record(&recorder.inner).await?.since;
        let asked = async {
            let link = recorder.shared.link(&recorder.inner).await?;
            ask(&link, process).await
        };
        let asked = asked.await;
        // Neither the manager nor its connection lives for this.
        drop(recorder);
        let answer = match asked {
            Ok(mut stream) => {
                deadline = Instant::now() + RECONNECT;
                guest::response(&mut stream).await
            }
            Err(error) => Err(error),
        };
        let Some(recorder) = self::recorder(inner, shared).await? else { return Ok(()) };
        match answer {
            Ok(Response::Exited(exit)) => {
                let outcome = ProcessEnd::exited(&exit).outcome;
                return record(&recorder, process, Ok(outcome)).await;
            }
            Ok(other) => return Err(guest::unexpected(&other)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let record = recorder.shared.record(&recorder.inner).await?;
                let known = record.detached.get(process).map(|known| known.started_at);
                let waited = known.map(|at| Timestamp::now().duration_since(at));
                match waited {
                    // Another one is about to start it.
                    Some(waited) if waited <= STARTING && record.since == since => {}
                    Some(_) if record.since == since => {
                        return never_started(&recorder, process).await;
                    }
                    // It went with its instance, and whoever replaced that records it.
                    _ => return Ok(()),
                }
                deadline = Instant::now() + RECONNECT;
            }
            Err(error) if error.is_retryable() && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
        drop(recorder);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn ask(link: &Link, process: &ProcessId) -> Result<sandbox_guest::mux::Stream> {
    link.open(Request::Wait { process: process.to_string() }).await
}

/// A recorder for what no call has caused, if the manager still lives.
async fn recorder(inner: &Weak<Inner>, shared: &Weak<Shared>) -> Result<Option<Recorder>> {
    let (Some(inner), Some(shared)) = (inner.upgrade(), shared.upgrade()) else {
        return Ok(None);
    };
    let consumer = shared.record(&inner).await?.consumer.clone();
    Ok(Some(Recorder::of_nobody(&inner, &shared, consumer)))
}

impl Recorder {
    /// Begins a detached process: the lock is held, so that of many with one key one records it.
    pub(crate) async fn begin_detached(
        &self,
        key: Option<&str>,
        argv: Vec<String>,
    ) -> Result<Begun> {
        let _lock = self.inner.journal.lock(&self.shared.id).await?;
        let record = self.shared.record(&self.inner).await?;
        super::running_instance(&record)?;
        let since = record.since;
        let id = match key {
            Some(key) => ProcessId::of_key(&self.shared.id, since, key),
            None => ProcessId::new(),
        };
        if let Some(known) = record.detached.get(&id) {
            if known.hash != crate::record::hash_of(&argv) {
                let message = "its key stands for a process that was started with another command";
                return Err(Error::new(ErrorKind::Conflict, "spawn", message));
            }
            return Ok(Begun { id, since, known: true, outcome: known.outcome.clone() });
        }
        let started = Known::ProcessStarted { process: id.clone(), argv, detached: true };
        self.record(started).await?;
        Ok(Begun { id, since, known: false, outcome: None })
    }
}

/// A detached process that is to be started, or was.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) id: ProcessId,
    /// The guest that it is to be started by.
    pub(crate) since: u64,
    /// Whether it was begun before.
    pub(crate) known: bool,
    /// How it ended, if it has.
    pub(crate) outcome: Option<Outcome>,
}
