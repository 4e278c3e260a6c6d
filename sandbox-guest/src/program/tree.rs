//! The process table, as `/proc` shows it: who descends from whom, and how to end all of them.

use std::{
    collections::{HashMap, HashSet},
    ffi::c_int,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, Mode, OFlags, RawDir, openat},
    process::{PidfdFlags, pidfd_open},
};
use sandbox_guest::ExitStatus;

use super::{
    guest::{Guest, lock},
    process::Process,
    sys::{self, Pid},
};

/// A kill gives up after this; nothing is known that resists so long, save a process in a disk wait.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often everything is told to stop before it is killed. Once is enough but for what forks right
/// then, and for what waits in the kernel, which will not start anything.
const STOP_ROUNDS: usize = 10;

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) pid: Pid,
    pub(crate) parent: Pid,
    pub(crate) group: Pid,
    pub(crate) state: u8,
    pub(crate) start: u64,
}

impl Entry {
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, b'Z' | b'X')
    }

    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self.state, b'T')
    }

    /// Signals it, and surely no later owner of its number.
    pub(crate) fn signal(&self, signal: c_int) -> io::Result<()> {
        let gone = || io::Error::from_raw_os_error(libc::ESRCH);
        let pid = rustix::process::Pid::from_raw(self.pid).ok_or_else(gone)?;
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        if read_entry(&open_proc()?, self.pid).map(|now| now.start) != Some(self.start) {
            return Err(gone());
        }
        sys::pidfd_signal(handle.as_fd(), signal)
    }
}

fn open_proc() -> io::Result<OwnedFd> {
    Ok(openat(CWD, "/proc", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// All processes that can be seen.
pub(crate) fn scan() -> io::Result<Vec<Entry>> {
    let proc = open_proc()?;
    let mut entries = Vec::new();
    let mut buffer = [MaybeUninit::uninit(); 8 * 1024];
    let mut directory = RawDir::new(proc.as_fd(), &mut buffer);
    while let Some(entry) = directory.next() {
        let entry = entry?;
        let pid = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
        if let Some(pid) = pid {
            entries.extend(read_entry(&proc, pid));
        }
    }
    Ok(entries)
}

/// One process, if it is there.
pub(crate) fn look(pid: Pid) -> Option<Entry> {
    read_entry(&open_proc().ok()?, pid)
}

fn read_entry(proc: &OwnedFd, pid: Pid) -> Option<Entry> {
    let path = format!("{pid}/stat");
    let file = openat(proc, path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 1024];
    let length = rustix::io::read(&file, &mut text[..]).ok()?;
    parse_stat(pid, &text[..length])
}

fn parse_stat(pid: Pid, text: &[u8]) -> Option<Entry> {
    // The name before this is the process's own choice, brackets and spaces included.
    let after = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&text[after..]).ok()?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let parent = fields.next()?.parse().ok()?;
    let group = fields.next()?.parse().ok()?;
    let start = fields.nth(16)?.parse().ok()?;
    Some(Entry { pid, parent, group, state, start })
}

/// Those that descend from the roots, parents before children, with their depth; the roots are not
/// among them.
pub(crate) fn descendants(entries: &[Entry], roots: &[Pid]) -> Vec<Entry> {
    let mut children: HashMap<Pid, Vec<Entry>> = HashMap::new();
    for entry in entries {
        children.entry(entry.parent).or_default().push(*entry);
    }
    let mut found = Vec::new();
    let mut seen: HashSet<Pid> = roots.iter().copied().collect();
    let mut next: Vec<Pid> = roots.to_vec();
    while !next.is_empty() {
        let mut below = Vec::new();
        for parent in next {
            for child in children.get(&parent).map(Vec::as_slice).unwrap_or_default() {
                if seen.insert(child.pid) {
                    found.push(*child);
                    below.push(child.pid);
                }
            }
        }
        next = below;
    }
    found
}

/// What a kill is aimed at.
#[derive(Clone, Copy)]
enum Target {
    /// All that a supervisor started.
    Supervised(Pid),
    /// Children of the guest that it did not start: orphans of a supervisor that was killed.
    Strays,
}

/// Kills all that the process started; returns when nothing is left, or says that something is.
pub(crate) async fn kill(guest: &Guest, process: &Arc<Process>) -> io::Result<()> {
    process.state().killers += 1;
    let result = kill_target(guest, Target::Supervised(process.supervisor)).await;
    process.state().killers -= 1;
    process.wake.notify_one();
    result
}

/// As [`kill`], and this is the process's outcome unless it has one.
pub(crate) async fn kill_because(
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
    kill(guest, process).await
}

/// Kills all that any supervisor started.
pub(crate) async fn kill_all(guest: &Guest) {
    let supervisors: Vec<Pid> = lock(&guest.supervisors).keys().copied().collect();
    for supervisor in supervisors {
        let _ = kill_target(guest, Target::Supervised(supervisor)).await;
    }
    let _ = kill_strays(guest).await;
}

/// Kills what a killed supervisor left to the guest, once it is gone: only then is it the guest's.
pub(crate) async fn kill_orphans_of(guest: &Guest, supervisor: Pid) -> io::Result<()> {
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
    let entries = scan()?;
    let supervisors = lock(&guest.supervisors);
    let own = std::process::id() as Pid;
    let found = match target {
        Target::Supervised(root) if supervisors.contains_key(&root) => {
            descendants(&entries, &[root])
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
            all.extend(descendants(&entries, &roots));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_name() {
        let line = b"42 (a) S (b c) T 7 40 40 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987 1 1 1\n";
        let entry = parse_stat(42, line).unwrap();
        let expected = Entry { pid: 42, parent: 7, group: 40, state: b'T', start: 987 };
        assert_eq!(entry, expected);
        assert_eq!(parse_stat(1, b"garbage"), None);
        assert_eq!(parse_stat(1, b"1 (x) S 1"), None);
    }

    #[test]
    fn this_process_is_seen() {
        let own = std::process::id() as Pid;
        let entry = scan().unwrap().into_iter().find(|entry| entry.pid == own).unwrap();
        assert!(entry.is_alive());
        assert_eq!(look(own).unwrap().start, entry.start);
    }

    #[test]
    fn descendants_come_parents_first() {
        let entry = |pid, parent| Entry { pid, parent, group: 1, state: b'S', start: 0 };
        let table = [entry(5, 3), entry(3, 2), entry(4, 9), entry(2, 1), entry(6, 5)];
        let pids: Vec<Pid> = descendants(&table, &[2]).iter().map(|entry| entry.pid).collect();
        assert_eq!(pids, [3, 5, 6]);
    }
}
