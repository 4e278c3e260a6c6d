//! Telling a kill for want of memory from any other: by the count that the kernel keeps for the control group.

use std::{
    fs::{self, File},
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// A process that the kernel killed ends, and is looked at here, within this time.
const SOON: Duration = Duration::from_secs(5);

/// The kernel's count, and which of its kills have found their process.
pub(crate) struct Oom {
    events: Option<File>,
    seen: u64,
    /// Kills of which no process is known yet.
    unclaimed: u64,
    /// When the last of them was seen.
    since: Instant,
}

impl Oom {
    /// Counts from what this file says now; without one no kill is for want of memory.
    pub(crate) fn new(events: Option<File>) -> Self {
        let seen = events.as_ref().map_or(0, kills);
        Self { events, seen, unclaimed: 0, since: Instant::now() }
    }

    /// Whether a process that ended was killed for want of memory. `killed` says whether SIGKILL ended it,
    /// `alone` whether no other one runs.
    pub(crate) fn was_it(&mut self, killed: bool, alone: bool) -> bool {
        let count = self.events.as_ref().map_or(0, kills);
        self.judge(count, Instant::now(), killed, alone)
    }

    fn judge(&mut self, count: u64, now: Instant, killed: bool, alone: bool) -> bool {
        if now.saturating_duration_since(self.since) > SOON {
            // They were of descendants, which have no outcome.
            self.unclaimed = 0;
        }
        if count > self.seen {
            self.unclaimed += count - self.seen;
            self.seen = count;
            self.since = now;
        }
        let was = killed && self.unclaimed > 0;
        self.unclaimed = if alone { 0 } else { self.unclaimed - u64::from(was) };
        was
    }
}

/// The file of this process's own control group, for a guest whose backend names none: `memory.events`, or
/// in version 1 `memory.oom_control`. Looked for before anything hostile runs.
pub(crate) fn find() -> Option<OwnedFd> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let files = candidates(&own);
    files.iter().find_map(|path| {
        let file = File::open(path).ok()?;
        is_count(&file).then(|| file.into())
    })
}

/// Where the file may be, the likeliest first: with a control group namespace the group is the mount's root.
fn candidates(own: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let mut found = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, file) = if controllers.is_empty() {
            (root.to_owned(), "memory.events")
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), "memory.oom_control")
        } else {
            continue;
        };
        let relative = path.trim_start_matches('/');
        found.push(mount.join(relative).join(file));
        if !relative.is_empty() {
            found.push(mount.join(file));
        }
    }
    found
}

fn read(file: &File) -> String {
    let mut text = [0; 1024];
    let length = file.read_at(&mut text, 0).unwrap_or(0);
    String::from_utf8_lossy(&text[..length]).into_owned()
}

fn is_count(file: &File) -> bool {
    parse(&read(file)).is_some()
}

fn kills(file: &File) -> u64 {
    parse(&read(file)).unwrap_or(0)
}

/// The `oom_kill` line, which both versions have.
fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_read_in_both_formats() {
        assert_eq!(parse("low 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"), Some(5));
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_file_is_looked_for_in_the_own_group_first() {
        let paths = |own: &str| -> Vec<String> {
            candidates(own).iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(paths("0::/\n"), ["/sys/fs/cgroup/memory.events"]);
        assert_eq!(
            paths("0::/user.slice/a\n"),
            ["/sys/fs/cgroup/user.slice/a/memory.events", "/sys/fs/cgroup/memory.events"]
        );
        assert_eq!(
            paths("4:cpu,cpuacct:/x\n3:memory:/docker/1\n"),
            [
                "/sys/fs/cgroup/memory/docker/1/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control"
            ]
        );
        assert!(paths("garbage\n1:\n").is_empty());
    }

    #[test]
    fn a_kill_is_one_processs() {
        let start = Instant::now();
        let mut oom = Oom::new(None);
        assert!(!oom.judge(0, start, true, true), "nothing was counted");
        // Two at once, and a third that somebody else killed.
        assert!(oom.judge(2, start, true, false));
        assert!(oom.judge(2, start, true, false));
        assert!(!oom.judge(2, start, true, false));
    }

    #[test]
    fn a_descendants_kill_is_nobodys() {
        let start = Instant::now();
        let mut oom = Oom::new(None);
        assert!(!oom.judge(1, start, false, true), "its parent exited");
        assert!(!oom.judge(1, start, true, true), "and the next was killed by somebody");
        // While others run, only time tells.
        assert!(!oom.judge(2, start, false, false));
        assert!(!oom.judge(2, start + SOON * 2, true, false));
        assert!(oom.judge(3, start + SOON * 2, true, false));
    }
}
