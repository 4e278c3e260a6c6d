//! What all of the guest's tasks share.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use sandbox_guest::Setup;
use tokio::sync::{Semaphore, watch};

use super::{
    base::lock, egress::Egress, oom::Oom, process::Table, procfs::Entry, supervisor::Supervising,
    sys::Pid, work::Pool,
};

/// How many connections may be carried at once: more than a client takes through one of its ports, so that
/// one that takes the place of another finds one.
pub(crate) const MAX_FORWARDS: usize = 512;

/// How many watches there may be at once: each takes one of the few that the system gives a user.
pub(crate) const MAX_WATCHES: usize = 16;

/// The guest.
pub(crate) struct Guest {
    pub(crate) instance: String,
    pub(crate) workspace: String,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) max_processes: Option<u64>,
    pub(crate) max_address_space: Option<u64>,
    /// The limits of open files that processes begin with.
    pub(crate) open_files: (u64, u64),
    /// Whether every process that is seen belongs to this sandbox: the guest is the first of a process
    /// id namespace.
    pub(crate) alone: bool,
    pub(crate) listen_path: Option<String>,
    pub(crate) listen_peer: Option<u32>,
    /// Processes that carry a connection in from outside: no part of the sandbox.
    pub(crate) bridges: Mutex<HashSet<Pid>>,
    pub(crate) table: Mutex<Table>,
    /// The children of the guest that it started and that are not reaped yet.
    pub(crate) supervisors: Mutex<HashMap<Pid, Supervising>>,
    pub(crate) frozen: Mutex<Option<Frozen>>,
    pub(crate) deadlines: watch::Sender<Deadlines>,
    pub(crate) idle_limit: Option<Duration>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) oom: Mutex<Oom>,
    pub(crate) egress: Arc<Egress>,
    cpu: Mutex<Cpu>,
    /// A place for each watch of files.
    pub(crate) watches: Semaphore,
    /// A place for each connection that is carried in.
    pub(crate) forwards: Arc<Semaphore>,
    last_activity: Mutex<Instant>,
}

/// When the guest ends by itself, in milliseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Deadlines {
    pub(crate) expires_at: Option<u64>,
    pub(crate) lease_until: Option<u64>,
}

impl Deadlines {
    /// Sets those that are given.
    pub(crate) fn set(&mut self, expires_at: Option<u64>, lease_until: Option<u64>) {
        self.expires_at = expires_at.or(self.expires_at);
        self.lease_until = lease_until.or(self.lease_until);
    }
}

/// What was stopped, parents before children, and for which connection.
pub(crate) struct Frozen {
    pub(crate) connection: u64,
    pub(crate) stopped: Vec<Entry>,
}

/// CPU time in the sandbox, in microseconds.
#[derive(Default)]
struct Cpu {
    /// Of what has ended.
    ended: u64,
    /// As it was told last.
    told: u64,
}

impl Guest {
    pub(crate) fn new(setup: Setup, oom: Option<std::fs::File>, open_files: (u64, u64)) -> Self {
        let deadlines = Deadlines { expires_at: setup.expires_at, lease_until: setup.lease_until };
        Self {
            instance: setup.instance,
            workspace: if setup.workspace.is_empty() { "/".to_owned() } else { setup.workspace },
            env: setup.env,
            max_processes: setup.max_processes,
            max_address_space: setup.max_address_space,
            open_files,
            alone: std::process::id() == 1,
            listen_path: setup.listen_path,
            listen_peer: setup.listen_peer,
            bridges: Mutex::default(),
            table: Mutex::default(),
            supervisors: Mutex::default(),
            frozen: Mutex::default(),
            deadlines: watch::Sender::new(deadlines),
            idle_limit: setup.idle_ms.map(Duration::from_millis),
            pool: Arc::default(),
            cpu: Mutex::default(),
            oom: Mutex::new(Oom::new(oom)),
            egress: Arc::default(),
            watches: Semaphore::new(MAX_WATCHES),
            forwards: Arc::new(Semaphore::new(MAX_FORWARDS)),
            last_activity: Mutex::new(Instant::now()),
        }
    }

    /// Notes that the guest was of use.
    pub(crate) fn touch(&self) {
        *lock(&self.last_activity) = Instant::now();
    }

    /// How long it has not been of use.
    pub(crate) fn idle(&self) -> Duration {
        lock(&self.last_activity).elapsed()
    }

    /// How long it may still be of no use; `None` without a limit. While something runs, all of it.
    pub(crate) fn idle_left(&self) -> Option<Duration> {
        let limit = self.idle_limit?;
        if lock(&self.supervisors).is_empty() {
            Some(limit.saturating_sub(self.idle()))
        } else {
            self.touch();
            Some(limit)
        }
    }

    /// Notes that a child was reaped that had used so much CPU time, with all that it had waited for.
    pub(crate) fn reaped(&self, cpu_us: u64) {
        lock(&self.cpu).ended += cpu_us;
    }

    /// CPU time of what has ended.
    pub(crate) fn ended_cpu_us(&self) -> u64 {
        lock(&self.cpu).ended
    }

    /// CPU time as it may be told: it never goes back.
    pub(crate) fn note_cpu_us(&self, counted: u64) -> u64 {
        let mut cpu = lock(&self.cpu);
        cpu.told = cpu.told.max(counted);
        cpu.told
    }
}
