//! The parent of one command: a companion of the guest that adopts and reaps whatever the command leaves.
//!
//! It makes the command's tree a subtree of the process table, whatever session or parent its members
//! choose. It tells the guest of the start and of the end through a pipe, and lives until it has no
//! children. Its code runs beside the guest in the guest's memory: system calls only, nothing is
//! allocated, locked or dropped.

use std::{
    ffi::{CString, c_int},
    os::fd::RawFd,
};

use rustix::{process, stdio};

use super::{
    sys::{self, Companion, Pid, Resource, Running, Stack, StringArray, borrow},
    users::User,
};

/// All that is needed to start a command.
pub(crate) struct Plan {
    /// The files to try, in the order of `PATH`.
    pub(crate) candidates: Vec<CString>,
    pub(crate) argv: StringArray,
    pub(crate) envp: StringArray,
    pub(crate) cwd: CString,
    /// By number: the guest closes its own at once, the supervisor's table is another.
    pub(crate) stdin: RawFd,
    pub(crate) stdout: RawFd,
    pub(crate) stderr: RawFd,
    /// Whether the three are a terminal, to be the command's own.
    pub(crate) terminal: bool,
    pub(crate) limits: Vec<Limit>,
    pub(crate) user: Option<User>,
    pub(crate) status: RawFd,
}

/// One resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) resource: Resource,
    pub(crate) soft: u64,
    pub(crate) hard: u64,
}

/// What a start stopped at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Stage {
    Started = 0,
    Fork = 1,
    Stdio = 2,
    Limits = 3,
    User = 4,
    Cwd = 5,
    Exec = 6,
}

impl Stage {
    fn from_number(number: i32) -> Self {
        match number {
            0 => Self::Started,
            2 => Self::Stdio,
            3 => Self::Limits,
            4 => Self::User,
            5 => Self::Cwd,
            6 => Self::Exec,
            _ => Self::Fork,
        }
    }
}

/// The first thing a supervisor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Begun {
    pub(crate) stage: Stage,
    pub(crate) errno: i32,
    pub(crate) pid: Pid,
}

/// The second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) status: c_int,
    pub(crate) cpu_us: u64,
    pub(crate) max_memory: u64,
}

impl Begun {
    pub(crate) const SIZE: usize = 12;

    fn encode(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&(self.stage as i32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.errno.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.pid.to_ne_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |at: usize| {
            i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self { stage: Stage::from_number(word(0)), errno: word(4), pid: word(8) }
    }
}

impl Ended {
    pub(crate) const SIZE: usize = 20;

    fn encode(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&self.status.to_ne_bytes());
        bytes[4..12].copy_from_slice(&self.cpu_us.to_ne_bytes());
        bytes[12..].copy_from_slice(&self.max_memory.to_ne_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::SIZE]) -> Self {
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        let status = c_int::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Self { status, cpu_us: long(4), max_memory: long(12) }
    }
}

/// A supervisor, and what it needs as long as it runs.
pub(crate) struct Supervisor {
    plan: Plan,
    stack: Stack,
}

/// A supervisor that runs; to be kept until it is reaped.
pub(crate) type Supervising = Running<Supervisor>;

/// Starts a supervisor for the plan.
pub(crate) fn start(plan: Plan) -> std::io::Result<(Pid, Supervising)> {
    sys::companion(Supervisor { plan, stack: Stack::new() })
}

impl Companion for Supervisor {
    fn run(&mut self) -> c_int {
        supervise(&self.plan, &mut self.stack)
    }
}

/// The command before it is one.
struct Command<'a> {
    plan: &'a Plan,
    failed: (Stage, c_int),
}

impl Companion for Command<'_> {
    fn run(&mut self) -> c_int {
        self.failed = become_command(self.plan);
        127
    }
}

fn supervise(plan: &Plan, stack: &mut Stack) -> c_int {
    // The argument only says "on".
    let _ = process::set_child_subreaper(Some(process::getpid()));
    let _ = rustix::thread::set_name(c"supervisor");

    let mut command = Command { plan, failed: (Stage::Started, 0) };
    let child = sys::vfork(stack, &mut command);
    let failed = command.failed;
    let begun = match child {
        Ok(pid) => Begun { stage: failed.0, errno: failed.1, pid },
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
            Begun { stage: Stage::Fork, errno, pid: 0 }
        }
    };
    // Of the guest's descriptors only the status pipe stays: others are ends of other commands' pipes.
    let status = borrow(plan.status);
    if stdio::dup2_stdin(status).is_err() {
        return 1;
    }
    sys::close_from(1);
    let status = stdio::stdin();
    if rustix::io::write(status, &begun.encode()).is_err() {
        return 1;
    }
    while let Ok(Some(waited)) = sys::wait_any(true) {
        if waited.pid == begun.pid && begun.stage == Stage::Started {
            let ended = Ended {
                status: waited.status,
                cpu_us: waited.cpu_us,
                max_memory: waited.max_memory,
            };
            let _ = rustix::io::write(status, &ended.encode());
        }
    }
    0
}

/// Runs in the child; returns only if something failed.
fn become_command(plan: &Plan) -> (Stage, c_int) {
    let errno = |error: rustix::io::Errno| error.raw_os_error();
    if let Err(error) = process::setsid() {
        return (Stage::Stdio, errno(error));
    }
    let stdio = stdio::dup2_stdin(borrow(plan.stdin))
        .and_then(|()| stdio::dup2_stdout(borrow(plan.stdout)))
        .and_then(|()| stdio::dup2_stderr(borrow(plan.stderr)));
    if let Err(error) = stdio {
        return (Stage::Stdio, errno(error));
    }
    if plan.terminal
        && let Err(error) = process::ioctl_tiocsctty(stdio::stdin())
    {
        return (Stage::Stdio, errno(error));
    }
    for limit in &plan.limits {
        if let Err(errno) = sys::set_limit(limit.resource, limit.soft, limit.hard) {
            return (Stage::Limits, errno);
        }
    }
    if let Some(user) = &plan.user
        && let Err(errno) = sys::become_user(user.uid, user.gid, &user.groups)
    {
        return (Stage::User, errno);
    }
    if let Err(error) = process::chdir(plan.cwd.as_c_str()) {
        return (Stage::Cwd, errno(error));
    }
    sys::close_on_exec_from(3);
    sys::unblock_signals();

    // As a shell looks a program up: a file that may not be run matters only if no other can be.
    let mut worst = libc::ENOENT;
    for candidate in &plan.candidates {
        match sys::execve(candidate, &plan.argv, &plan.envp) {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => worst = libc::EACCES,
            other => return (Stage::Exec, other),
        }
    }
    (Stage::Exec, worst)
}
