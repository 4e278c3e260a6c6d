//! The process table, as `/proc` shows it: who descends from whom.

use std::{
    collections::{HashMap, HashSet},
    ffi::c_int,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{CWD, Mode, OFlags, RawDir, openat},
    process::{PidfdFlags, pidfd_open},
};

use super::sys::{self, Pid};

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
