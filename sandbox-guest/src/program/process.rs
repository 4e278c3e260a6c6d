//! The processes that the guest started, and what is known of each.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use sandbox_guest::{
    Bytes, ExitStatus, Failure, FailureKind, MAX_KEPT_OUTPUT, Output, ProcessExit, ProcessInfo,
    ProcessState, PtySize, Start,
};
use tokio::sync::Notify;

use super::{
    base::{failure, lock, now_ms},
    log::Log,
    stdin::Stdin,
    sys::Pid,
};

/// How many processes may run at once.
const MAX_RUNNING: usize = 4096;

/// How many ended ones are remembered.
const MAX_ENDED: usize = 1024;

/// How much memory the output of ended ones may take.
const MAX_ENDED_MEMORY: u64 = 32 * 1024 * 1024;

/// How much of the sandbox's disk.
const MAX_ENDED_DISK: u64 = 4 * MAX_KEPT_OUTPUT;

/// A process that the guest started.
pub(crate) struct Process {
    pub(crate) id: String,
    pub(crate) supervisor: Pid,
    pub(crate) argv: Vec<Bytes>,
    pub(crate) started_at: u64,
    pub(crate) started: Instant,
    pub(crate) output: Output,
    state: Mutex<State>,
    /// Something happened that whoever is attached may want to know.
    pub(crate) changed: Notify,
    /// Something happened that its pump must act on.
    pub(crate) wake: Notify,
}

/// What changes about a process.
pub(crate) struct State {
    /// Whether it began, once that is known.
    pub(crate) begun: Option<Result<Pid, Failure>>,
    pub(crate) detached: bool,
    pub(crate) stdout: Log,
    pub(crate) stderr: Log,
    pub(crate) stdin: Stdin,
    pub(crate) resize: Option<PtySize>,
    /// Why it was killed, if the guest did it.
    pub(crate) verdict: Option<ExitStatus>,
    /// How many are killing its tree right now.
    pub(crate) killers: u32,
    pub(crate) exit: Option<ProcessExit>,
    /// The attachment whose end matters.
    pub(crate) owner: Option<u64>,
    pub(crate) attachments: u64,
}

impl Process {
    pub(crate) fn new(start: &Start, supervisor: Pid) -> Self {
        let mut argv = vec![start.program.clone()];
        argv.extend_from_slice(&start.args);
        Self {
            id: start.id.clone(),
            supervisor,
            argv,
            started_at: now_ms(),
            started: Instant::now(),
            output: start.output,
            state: Mutex::new(State {
                begun: None,
                detached: start.detached,
                stdout: Log::new(start.output),
                stderr: Log::new(start.output),
                stdin: Stdin::default(),
                resize: None,
                verdict: None,
                killers: 0,
                exit: None,
                owner: None,
                attachments: 0,
            }),
            changed: Notify::new(),
            wake: Notify::new(),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Tells all who are attached that something changed.
    pub(crate) fn announce(&self) {
        self.changed.notify_waiters();
    }

    fn info(&self) -> Option<ProcessInfo> {
        let state = self.state();
        let pid = *state.begun.as_ref()?.as_ref().ok()?;
        Some(ProcessInfo {
            process: self.id.clone(),
            pid: pid as u32,
            argv: self.argv.clone(),
            started_at: self.started_at,
            detached: state.detached,
            state: state.exit.clone().map_or(ProcessState::Running, ProcessState::Exited),
            stdout: state.stdout.kept(),
            stderr: state.stderr.kept(),
        })
    }
}

impl State {
    /// Whether it runs for nobody, since the attachment that was the last when its client went.
    pub(crate) fn is_abandoned(&self, last: u64) -> bool {
        let resumed = self.owner.is_some() || self.attachments != last;
        !resumed && !self.detached && self.exit.is_none()
    }
}

/// How much the output of processes takes, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    memory: u64,
    disk: u64,
}

impl Size {
    fn add(&mut self, other: Self) {
        self.memory += other.memory;
        self.disk += other.disk;
    }

    fn remove(&mut self, other: Self) {
        self.memory -= other.memory;
        self.disk -= other.disk;
    }

    fn is_too_much(self) -> bool {
        self.memory > MAX_ENDED_MEMORY || self.disk > MAX_ENDED_DISK
    }
}

/// All processes that are known.
#[derive(Default)]
pub(crate) struct Table {
    processes: HashMap<String, Arc<Process>>,
    /// With how much memory and disk each one's output took when it ended.
    ended: VecDeque<(Arc<Process>, Size)>,
    ended_size: Size,
    running: usize,
}

impl Table {
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Process>> {
        self.processes.get(id).cloned()
    }

    /// The process, or the failure that says that there is none.
    pub(crate) fn find(&self, id: &str) -> Result<Arc<Process>, Failure> {
        self.get(id)
            .ok_or_else(|| failure(FailureKind::NotFound, format!("there is no process {id:?}")))
    }

    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Refuses when there are too many.
    pub(crate) fn check_room(&self) -> Result<(), Failure> {
        if self.running >= MAX_RUNNING {
            let message = format!("{MAX_RUNNING} processes run already, the most the guest keeps");
            return Err(failure(FailureKind::LimitExceeded, message));
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, process: Arc<Process>) {
        self.running += 1;
        self.processes.insert(process.id.clone(), process);
    }

    /// It never began.
    pub(crate) fn discard(&mut self, process: &Arc<Process>) {
        self.running = self.running.saturating_sub(1);
        self.remove(process);
    }

    /// It ended; what is too old or too much is forgotten.
    pub(crate) fn ended(&mut self, process: &Arc<Process>) {
        let size = {
            let state = process.state();
            Size {
                memory: state.stdout.memory() + state.stderr.memory(),
                disk: state.stdout.disk() + state.stderr.disk(),
            }
        };
        self.running = self.running.saturating_sub(1);
        self.ended.push_back((Arc::clone(process), size));
        self.ended_size.add(size);
        while self.ended.len() > MAX_ENDED || self.ended_size.is_too_much() {
            let Some((oldest, size)) = self.ended.pop_front() else { return };
            self.ended_size.remove(size);
            self.remove(&oldest);
        }
    }

    /// Whether the output of one that has ended is kept for whoever asks.
    pub(crate) fn keeps_output(&self) -> bool {
        self.ended.iter().any(|(process, _)| matches!(process.output, Output::Keep { .. }))
    }

    /// Nobody will ask for it again.
    pub(crate) fn forget(&mut self, process: &Arc<Process>) {
        if let Some(at) = self.ended.iter().position(|(other, _)| Arc::ptr_eq(other, process))
            && let Some((_, size)) = self.ended.remove(at)
        {
            self.ended_size.remove(size);
        }
        self.remove(process);
    }

    pub(crate) fn list(&self) -> Vec<ProcessInfo> {
        self.processes.values().filter_map(|process| process.info()).collect()
    }

    fn remove(&mut self, process: &Arc<Process>) {
        if self.get(&process.id).is_some_and(|other| Arc::ptr_eq(&other, process)) {
            self.processes.remove(&process.id);
        }
    }
}
