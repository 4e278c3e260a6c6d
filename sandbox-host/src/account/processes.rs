//! An instance's processes, found among those of the host: what descends from its guest; and, once that
//! is gone, what carries its mark.

use std::{
    collections::HashSet,
    fs, io,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};

use super::process::start_time;

/// In the environment of all that an instance's guest starts.
pub(crate) const MARK: &str = "SANDBOX_INSTANCE";
/// How long processes may take to be gone.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often nothing must be found.
const LOOKS: u32 = 3;

/// A guest, told from a later process with its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GuestId {
    pub(super) pid: u32,
    start_time: u64,
}

impl GuestId {
    /// A child of this process.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let start_time = start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { pid, start_time })
    }

    /// A handle on it, if it still runs.
    pub(super) fn find(self) -> io::Result<Option<OwnedFd>> {
        let handle = match handle(self.pid) {
            Ok(handle) => handle,
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Only now that the handle stands for one process for good.
        Ok((start_time(self.pid)? == Some(self.start_time)).then_some(handle))
    }

    /// Waits until it has ended.
    #[cfg(feature = "program")]
    pub(super) fn wait(self) -> io::Result<()> {
        let Some(handle) = self.find()? else { return Ok(()) };
        loop {
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn handle(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    pidfd_open(pid, PidfdFlags::empty())
}

/// Ends a guest, if there is one, and everything that it started.
///
/// The guest is held still first: it gathers what its processes leave behind, and must neither start more
/// nor tell of ends that are not theirs.
pub(super) fn end(guest: Option<GuestId>, mark: &str) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let running = match guest {
        Some(guest) => guest.find()?.map(|handle| (guest, handle)),
        None => None,
    };
    if let Some((guest, handle)) = &running {
        signal(handle, Signal::STOP)?;
        until_none(deadline, || {
            let all = all()?;
            Ok(descendants(&all, &HashSet::from([guest.pid])))
        })?;
        signal(handle, Signal::KILL)?;
        until_gone(handle, deadline)?;
    }
    let variable = format!("{MARK}={mark}");
    until_none(deadline, || {
        let all = all()?;
        let marked: HashSet<u32> =
            all.iter().map(|entry| entry.pid).filter(|pid| has(*pid, &variable)).collect();
        let mut found = descendants(&all, &marked);
        found.extend(marked);
        Ok(found)
    })
}

/// Kills what is found until nothing is, several times in a row: what starts another and ends while it is
/// looked for can be missed, once.
fn until_none(deadline: Instant, find: impl Fn() -> io::Result<HashSet<u32>>) -> io::Result<()> {
    let mut looks = 0;
    loop {
        let found = find()?;
        looks = if found.is_empty() { looks + 1 } else { 0 };
        if looks == LOOKS {
            return Ok(());
        }
        if Instant::now() > deadline {
            let message = format!("processes do not end: {found:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        for pid in found {
            // What ends meanwhile is fine; nothing else gets its number so soon.
            if let Ok(handle) = handle(pid) {
                let _ = pidfd_send_signal(&handle, Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(handle: &OwnedFd, signal: Signal) -> io::Result<()> {
    match pidfd_send_signal(handle, signal) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn until_gone(handle: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    pid: u32,
    parent: u32,
}

/// All processes that have not ended.
fn all() -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        found.extend(parse(pid, &stat));
    }
    Ok(found)
}

fn parse(pid: u32, stat: &str) -> Option<Entry> {
    // The name, in brackets, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(Entry { pid, parent })
}

/// Those below these.
fn descendants(all: &[Entry], roots: &HashSet<u32>) -> HashSet<u32> {
    let mut known = roots.clone();
    loop {
        let before = known.len();
        let children: Vec<u32> =
            all.iter().filter(|e| known.contains(&e.parent)).map(|e| e.pid).collect();
        known.extend(children);
        if known.len() == before {
            return known.difference(roots).copied().collect();
        }
    }
}

fn has(pid: u32, variable: &str) -> bool {
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environ.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn a_tree_is_ended_and_nothing_else() {
        let mark = format!("test-{}", std::process::id());
        let mut bystander = Command::new("sleep").arg("600").spawn().unwrap();
        // The child of a child in a session of its own, whose parent has ended: by its mark.
        let mut tree = Command::new("sh")
            .args(["-c", "setsid sleep 600 & sleep 600 & wait"])
            .env(MARK, &mark)
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let guest = GuestId::of(tree.id()).unwrap();
        end(Some(guest), &mark).unwrap();
        tree.wait().unwrap();
        assert!(guest.find().unwrap().is_none());
        assert!(bystander.try_wait().unwrap().is_none());
        end(Some(guest), &mark).unwrap();
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }

    #[test]
    fn a_name_cannot_disturb() {
        let entry = parse(42, "42 (a) Z 1 (b)) S 7 42 42 0").unwrap();
        assert_eq!(entry, Entry { pid: 42, parent: 7 });
        assert_eq!(parse(42, "42 (a) Z 1 42 42 0"), None);
    }
}
