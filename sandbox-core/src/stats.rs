//! What a sandbox uses.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use sandbox_guest::{Request, Response, Status};
use serde::{Deserialize, Serialize};

use crate::{
    Network, Result, guest,
    manager::{Inner, Shared, running_instance},
};

/// How long a backend may take to look at an instance's files; then what it would tell is missing.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a sandbox uses, and may use at most. What cannot be told here is `None`, never 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Usage {
    /// CPU time of all its processes since its instance started, of those that have ended too.
    pub cpu: Option<Duration>,
    /// Memory of its processes now, in bytes; what several share counts once.
    pub memory: Option<u64>,
    /// The most memory that it ever used, in bytes, as its memory limit counts it: with the files that
    /// the kernel keeps in memory for it.
    pub memory_peak: Option<u64>,
    /// How much memory it may use as a whole, in bytes.
    pub memory_limit: Option<u64>,
    /// Its processes now, without the guest's own.
    pub pids: Option<u64>,
    /// How many processes and threads it may have.
    pub pids_limit: Option<u64>,
    /// What it has written since it was made, or since its last snapshot, as far as that is still there:
    /// in bytes on disk.
    pub disk: Option<u64>,
    /// Bytes that it received from outside, its own loopback not counted.
    pub network_received: Option<u64>,
    /// Bytes that it sent, likewise.
    pub network_sent: Option<u64>,
}

impl Usage {
    /// These figures, and where one is missing, the other's.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            cpu: self.cpu.or(other.cpu),
            memory: self.memory.or(other.memory),
            memory_peak: self.memory_peak.or(other.memory_peak),
            memory_limit: self.memory_limit.or(other.memory_limit),
            pids: self.pids.or(other.pids),
            pids_limit: self.pids_limit.or(other.pids_limit),
            disk: self.disk.or(other.disk),
            network_received: self.network_received.or(other.network_received),
            network_sent: self.network_sent.or(other.network_sent),
        }
    }
}

/// How a sandbox is doing; see [`Sandbox::stats`](crate::Sandbox::stats).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// When it was looked at.
    pub at: Timestamp,
    /// What it uses.
    pub usage: Usage,
    /// How long nothing has run in it and nothing been asked of it; zero while a command runs.
    pub idle: Duration,
}

/// See [`crate::Sandbox::stats`].
pub(crate) async fn stats(inner: &Arc<Inner>, shared: &Arc<Shared>) -> Result<Stats> {
    // A loss is noticed, and the record says so.
    shared.link(inner).await?;
    let record = shared.record(inner).await?;
    let instance = running_instance(&record)?;
    let backend = inner.backend(&instance.backend)?;
    let known = tokio::time::timeout(PATIENCE, backend.usage(instance));
    let (told, known) = tokio::join!(shared.ask(inner, Request::Status), known);
    let named = |error: crate::Error| error.with_sandbox(&shared.id);
    let status = match told.map_err(named)? {
        Response::Status(status) => status,
        other => return Err(named(guest::unexpected(&other))),
    };
    let known = match known {
        Ok(usage) => usage.map_err(|error| named(error).with_backend(&backend.id()))?,
        Err(_) => Usage::default(),
    };
    let idle = Duration::from_millis(status.idle_ms);
    let mut told = told_usage(&status);
    if record.spec.network == Network::Host {
        // The guest sees the host's interfaces.
        (told.network_received, told.network_sent) = (None, None);
    }
    Ok(Stats { at: Timestamp::now(), usage: told.or(known), idle })
}

fn told_usage(status: &Status) -> Usage {
    Usage {
        cpu: status.cpu_us.map(Duration::from_micros),
        memory: status.memory,
        pids: Some(status.processes.into()),
        network_received: status.network_received,
        network_sent: status.network_sent,
        ..Usage::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_know_is_the_first_ones() {
        let first = Usage { memory: Some(1), pids: Some(2), ..Usage::default() };
        let second = Usage { memory: Some(3), disk: Some(4), ..Usage::default() };
        let expected = Usage { memory: Some(1), pids: Some(2), disk: Some(4), ..Usage::default() };
        assert_eq!(first.or(second), expected);
    }

    #[test]
    fn figures_are_plain_data() {
        let usage = Usage { disk: Some(1), ..Usage::default() };
        let stats = Stats { at: Timestamp::UNIX_EPOCH, usage, idle: Duration::from_secs(2) };
        let text = serde_json::to_string(&stats).unwrap();
        assert_eq!(serde_json::from_str::<Stats>(&text).unwrap(), stats);
        assert!(text.contains(r#""disk":1"#) && text.contains(r#""cpu":null"#), "{text}");
    }
}
