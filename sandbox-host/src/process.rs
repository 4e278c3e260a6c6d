//! Processes of this host, told apart for certain although process ids are used again.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::Deserialize;

/// What bwrap writes to `--info-fd`. It does so before the guest runs, and whatever becomes of the
/// harness, so that no guest can be running that is not known.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BwrapInfo {
    /// The guest, as this host counts: PID 1 inside.
    pub(crate) child_pid: u32,
    /// The inode of its PID namespace, which tells it from a later process with its id.
    pub(crate) pid_namespace: u64,
}

impl BwrapInfo {
    /// What bwrap wrote; `None` if it has written nothing yet, or not all.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        match fs::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A guest that ran when it was looked for.
#[derive(Debug)]
pub(crate) struct Guest {
    /// Its process id.
    pub(crate) pid: u32,
    /// In clock ticks since the host's start.
    pub(crate) start_time: u64,
    handle: OwnedFd,
    namespace: PathBuf,
}

impl Guest {
    /// The guest that bwrap told of, if it still runs.
    pub(crate) fn find(info: &BwrapInfo) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(info.child_pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Only now that the handle stands for one process for good.
        let namespace = match fs::read_link(format!("/proc/{}/ns/pid", info.child_pid)) {
            Ok(link) => link,
            // Another user's process by now, or none.
            Err(_) => return Ok(None),
        };
        let start_time = start_time(info.child_pid)?;
        let expected = format!("pid:[{}]", info.pid_namespace);
        let same = namespace.as_os_str() == expected.as_str();
        Ok(start_time.filter(|_| same).map(|start_time| Self {
            pid: info.child_pid,
            start_time,
            handle,
            namespace,
        }))
    }

    /// All processes in its PID namespace, itself and whoever entered among them, as this host counts.
    pub(crate) fn all_inside(&self) -> io::Result<Vec<u32>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            // Another user's cannot be looked at, and are none of ours.
            if fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns == self.namespace) {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// Kills it and with it everything in its PID namespace.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.handle, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for its end; says whether it came. The last process of its namespace ends before it does.
    pub(crate) fn wait(&self, bound: Duration) -> io::Result<bool> {
        let deadline = std::time::Instant::now() + bound;
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut polled = [PollFd::new(&self.handle, PollFlags::IN)];
            match poll(&mut polled, Some(&timeout)) {
                Ok(ended) => return Ok(ended > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// When a process started, in clock ticks since the host's start; `None` if it does not run any more.
pub(crate) fn start_time(pid: u32) -> io::Result<Option<u64>> {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(parse_start_time(&stat)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // ESRCH: it ended while it was read.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse_start_time(stat: &str) -> Option<u64> {
    // The name, in brackets, may hold anything, brackets and spaces too.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// A harness's process that works on something, to tell a crash from work in progress.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Worker {
    pid: u32,
    start_time: u64,
    boot_id: String,
}

impl Worker {
    /// This process.
    pub(crate) fn this() -> io::Result<Self> {
        let pid = std::process::id();
        let start_time = start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { pid, start_time, boot_id: boot_id()? })
    }

    /// Whether it still runs.
    pub(crate) fn runs(&self) -> bool {
        boot_id().is_ok_and(|boot_id| boot_id == self.boot_id)
            && start_time(self.pid).is_ok_and(|start| start == Some(self.start_time))
    }
}

/// This start of the host: process ids of an earlier one mean nothing.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_disturb() {
        let stat = "42 (a) Z 1 (b)) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987 1 2";
        assert_eq!(parse_start_time(stat), Some(987));
        let zombie = "42 (a) Z 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987 1 2";
        assert_eq!(parse_start_time(zombie), None);
    }

    #[test]
    fn bwraps_report_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("info");
        assert_eq!(BwrapInfo::read(&path).unwrap(), None);
        fs::write(&path, "{\n    \"child-pid\": 7").unwrap();
        assert_eq!(BwrapInfo::read(&path).unwrap(), None);
        let whole =
            "{\n    \"child-pid\": 7,\n    \"mnt-namespace\": 1,\n    \"pid-namespace\": 4026\n}\n";
        fs::write(&path, whole).unwrap();
        let info = BwrapInfo::read(&path).unwrap().unwrap();
        assert_eq!(info, BwrapInfo { child_pid: 7, pid_namespace: 4026 });
    }

    #[test]
    fn a_later_process_with_its_id_is_another() {
        let pid = std::process::id();
        let wrong = BwrapInfo { child_pid: pid, pid_namespace: 1 };
        assert!(Guest::find(&wrong).unwrap().is_none());
        assert!(Worker::this().unwrap().runs());
        assert!(!Worker { start_time: 1, ..Worker::this().unwrap() }.runs());
    }
}
