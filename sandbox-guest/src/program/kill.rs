//! Ending processes, with all that descends from them.

use std::{
    collections::HashSet,
    ffi::c_int,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_guest::ExitStatus;

use super::{
    base::lock,
    guest::Guest,
    process::Process,
    procfs::{self, Entry},
    sys::{self, Pid},
};

/// A kill gives up after this; nothing is known that resists so long, save a process in a disk wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often everything is told to stop before it is killed. Once is enough but for what forks right
/// then, and for what waits in the kernel, which will not start anything.
const STOP_ROUNDS: usize = 10;

/// What a kill is aimed at.
#[derive(Clone, Copy)]
enum Target {
    /// All that a supervisor started.
    Supervised(Pid),
    /// Children of the guest that it did not start: orphans of a supervisor that was killed.
    Strays,
}

/// Kills all that the process started; returns when nothing is left, or says that something is.
pub(crate) async fn tree(guest: &Guest, process: &Arc<Process>) -> io::Result<()> {
    process.state().killers += 1;
    let result = kill_target(guest, Target::Supervised(process.supervisor)).await;
    process.state().killers -= 1;
    process.wake.notify_one();
    result
}

/// As [`tree`], and this is the process's outcome unless it has one.
pub(crate) async fn because(
    guest: &Guest,
    process: &Arc<Process>,
    verdict: ExitStatus,
) -> io::Result<()> {
    {
        let mut state = process.state();
        if state.exit.is_none() {
            state.verdict.get_or_insert(verdict);
        }
    }
    tree(guest, process).await
}

/// Kills all that any supervisor started.
pub(crate) async fn all(guest: &Guest) {
    let supervisors: Vec<Pid> = lock(&guest.supervisors).keys().copied().collect();
    for supervisor in supervisors {
        let _ = kill_target(guest, Target::Supervised(supervisor)).await;
    }
    let _ = kill_strays(guest).await;
}

/// Kills what a killed supervisor left to the guest, once it is gone: only then is it the guest's.
pub(crate) async fn orphans_of(guest: &Guest, supervisor: Pid) -> io::Result<()> {
    let begin = Instant::now();
    while lock(&guest.supervisors).contains_key(&supervisor) && begin.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    kill_strays(guest).await
}

async fn kill_strays(guest: &Guest) -> io::Result<()> {
    kill_target(guest, Target::Strays).await
}

/// The processes that a target names now, and whose process groups may be signalled as a whole.
fn members(guest: &Guest, target: Target) -> io::Result<Vec<Entry>> {
    let entries = procfs::scan()?;
    let supervisors = lock(&guest.supervisors);
    let own = std::process::id() as Pid;
    let found = match target {
        Target::Supervised(root) if supervisors.contains_key(&root) => {
            procfs::descendants(&entries, &[root])
        }
        // Reaped: its number may be another's by now.
        Target::Supervised(_) => Vec::new(),
        Target::Strays => {
            let strays: Vec<Entry> = entries
                .iter()
                .filter(|entry| entry.parent == own && !supervisors.contains_key(&entry.pid))
                .copied()
                .collect();
            let roots: Vec<Pid> = strays.iter().map(|entry| entry.pid).collect();
            let mut all = strays;
            all.extend(procfs::descendants(&entries, &roots));
            all
        }
    };
    Ok(found.into_iter().filter(Entry::is_alive).collect())
}

async fn kill_target(guest: &Guest, target: Target) -> io::Result<()> {
    let begin = Instant::now();
    let mut killed: HashSet<(Pid, u64)> = HashSet::new();
    let mut pause = Duration::from_micros(200);
    loop {
        let mut found = members(guest, target)?;
        if found.is_empty() {
            return Ok(());
        }
        if begin.elapsed() > PATIENCE {
            let left = found.len();
            return Err(io::Error::other(format!("{left} processes cannot be killed")));
        }
        // The killed take a moment to die; only others are news.
        if found.iter().any(|entry| !killed.contains(&(entry.pid, entry.start))) {
            // Everything is stopped first, so that nothing can start more of it meanwhile.
            for _ in 0..STOP_ROUNDS {
                let moving: Vec<Entry> =
                    found.iter().filter(|entry| !entry.is_stopped()).copied().collect();
                if moving.is_empty() {
                    break;
                }
                signal_all(&moving, libc::SIGSTOP);
                tokio::task::yield_now().await;
                found = members(guest, target)?;
            }
            signal_all(&found, libc::SIGKILL);
            killed.extend(found.iter().map(|entry| (entry.pid, entry.start)));
        }
        if let Target::Supervised(supervisor) = target
            && lock(&guest.supervisors).contains_key(&supervisor)
        {
            // It may have been stopped by one of those it has to reap.
            let _ = sys::kill(supervisor, libc::SIGCONT);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Signals each process group as a whole: that is one step for the kernel, which no fork in the group
/// can slip through. A group never spans two trees, since each command begins a session.
fn signal_all(members: &[Entry], signal: c_int) {
    let own = sys::own_group();
    let mut groups = HashSet::new();
    for entry in members {
        // A command that has not left the guest's session yet is still in the guest's group.
        if entry.group <= 1 || entry.group == own {
            let _ = entry.signal(signal);
        } else if groups.insert(entry.group) {
            let _ = sys::kill(-entry.group, signal);
        }
    }
}
