//! How the guest is, and what the sandbox uses, as `/proc` tells it.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_guest::Status;

use super::{
    base::lock,
    guest::Guest,
    procfs::{self, Entry},
    sys::Pid,
};

/// For so long each process's share of what is mapped by several is looked up, which makes the kernel
/// walk all that it has mapped; for those that are left, only what is theirs alone is counted.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a process's times are counted in; the same on every architecture that Linux has today.
const TICKS_PER_SECOND: u64 = 100;

/// A tick in microseconds.
pub(crate) const TICK_US: u64 = 1_000_000 / TICKS_PER_SECOND;

/// How the guest is. The looking is done on another thread.
pub(crate) async fn status(guest: &Arc<Guest>) -> Status {
    let (running, idle) = {
        let busy = !lock(&guest.supervisors).is_empty();
        let idle = if busy { Duration::ZERO } else { guest.idle() };
        (lock(&guest.table).running(), idle)
    };
    let here = Arc::clone(guest);
    let mut status = guest.pool.run(move || look(&here)).await.unwrap_or_default();
    status.running = running as u32;
    status.idle_ms = idle.as_millis() as u64;
    status
}

fn look(guest: &Guest) -> Status {
    // What ends while this looks moves up to its parent, and at last to this. Looked at from the top
    // down, it may be missed, and is there the next time; it never counts twice.
    let ended = guest.ended_cpu_us();
    let entries = procfs::scan().ok();
    let (received, sent) = network().unzip();
    let mut status = Status {
        guest_memory: resident("self").map_or(0, |resident| resident.all),
        network_received: received,
        network_sent: sent,
        ..Status::default()
    };
    let Some(entries) = entries else { return status };
    let (mut memory, mut ticks) = (0, 0);
    let begin = Instant::now();
    for (entry, is_supervisor) in members(guest, &entries) {
        let pid = entry.pid.to_string();
        ticks += times(&pid).unwrap_or(0);
        if is_supervisor || !entry.is_alive() {
            // A supervisor has no memory of its own.
            continue;
        }
        status.processes += 1;
        memory += share(&pid, begin).unwrap_or(0);
    }
    let live = ticks * TICK_US;
    status.cpu_us = Some(guest.note_cpu_us(ended + live));
    status.memory = Some(memory);
    status
}

/// All processes of the sandbox but the guest itself, parents before children, and whether each is one of
/// its supervisors.
fn members(guest: &Guest, entries: &[Entry]) -> Vec<(Entry, bool)> {
    let own = std::process::id() as Pid;
    let supervisors = lock(&guest.supervisors);
    let bridges = lock(&guest.bridges);
    // 0 is the parent of those that entered from outside.
    let roots = if guest.alone { vec![0, own] } else { vec![own] };
    procfs::descendants(entries, &roots)
        .into_iter()
        .filter(|entry| entry.pid != own && !bridges.contains(&entry.pid))
        .map(|entry| (entry, supervisors.contains_key(&entry.pid)))
        .collect()
}

/// CPU time of a process and of the children that it waited for, in ticks.
pub(crate) fn times(pid: &str) -> Option<u64> {
    parse_times(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_times(stat: &str) -> Option<u64> {
    // The name before this is the process's own choice.
    let (_, fields) = stat.rsplit_once(") ")?;
    let times = fields.split(' ').skip(11).take(4).map(|field| field.parse::<u64>().ok());
    times.collect::<Option<Vec<u64>>>().filter(|times| times.len() == 4).map(|t| t.iter().sum())
}

/// What a process adds to the memory that is in use, in bytes.
fn share(pid: &str, begin: Instant) -> Option<u64> {
    if begin.elapsed() < PATIENCE
        && let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        && let Some(share) = parse_share(&text)
    {
        return Some(share);
    }
    // It may not be looked into, as a program of another user.
    resident(pid).map(|resident| resident.all.saturating_sub(resident.shared))
}

fn parse_share(smaps: &str) -> Option<u64> {
    let line = smaps.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// What a process has in memory, in bytes.
struct Resident {
    all: u64,
    shared: u64,
}

fn resident(pid: &str) -> Option<Resident> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = text.split(' ').skip(1).map(|field| field.parse::<u64>().ok());
    let size = rustix::param::page_size() as u64;
    Some(Resident { all: pages.next()?? * size, shared: pages.next()?? * size })
}

/// Bytes received and sent by all interfaces but the loopback.
fn network() -> Option<(u64, u64)> {
    parse_network(&fs::read_to_string("/proc/self/net/dev").ok()?)
}

fn parse_network(text: &str) -> Option<(u64, u64)> {
    let (mut received, mut sent) = (0, 0);
    for line in text.lines().skip(2) {
        let (name, counters) = line.split_once(':')?;
        if name.trim() == "lo" {
            continue;
        }
        let counters: Vec<&str> = counters.split_ascii_whitespace().collect();
        received += counters.first()?.parse::<u64>().ok()?;
        sent += counters.get(8)?.parse::<u64>().ok()?;
    }
    Some((received, sent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_whatever_the_name() {
        let stat = "42 (a) S (b c) T 7 40 40 0 -1 4194560 1 0 0 0 3 4 50 600 20 0 1 0 987 1 1 1\n";
        assert_eq!(parse_times(stat), Some(657));
        assert_eq!(parse_times("42 (a) S 1 2 3"), None);
        assert!(times("self").is_some());
    }

    #[test]
    fn a_share_of_memory_is_read() {
        let text = "00400000-7ffff000 ---p 00000000 00:00 0    [rollup]\nRss:   884 kB\n\
                    Pss:                 385 kB\nPss_Dirty:  68 kB\n";
        assert_eq!(parse_share(text), Some(385 * 1024));
        assert_eq!(parse_share("Rss: 1 kB\n"), None);
        assert!(resident("self").unwrap().all > 0);
    }

    #[test]
    fn the_loopback_is_not_counted() {
        let text = "Inter-|   Receive      |  Transmit\n face |bytes packets |bytes packets\n    \
                    lo: 500 5 0 0 0 0 0 0 500 5 0 0 0 0 0 0\n  \
                    eth0:1000 5 0 0 0 0 0 0 70 5 0 0 0 0 0 0\n  \
                    eth1: 1 5 0 0 0 0 0 0 2 5 0 0 0 0 0 0\n";
        assert_eq!(parse_network(text), Some((1001, 72)));
        assert_eq!(parse_network("a\nb\n"), Some((0, 0)));
        assert_eq!(parse_network("a\nb\nnonsense\n"), None);
    }
}
