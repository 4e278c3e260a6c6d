//! The first process of a container, where the engine's containers are processes of this host.

use std::{
    fs::File,
    io::{self, Read},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

/// A process's control groups fill no more.
const MOST_GROUPS: u64 = 64 * 1024;

/// A container's id has so many digits.
const ID_LENGTH: usize = 64;

/// A process that is in a container, held so that no later one with its number is taken for it.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    handle: OwnedFd,
    /// Its directory in `/proc`.
    entry: OwnedFd,
}

impl Process {
    /// The process of this number, if this host has it in the container of this id. The engine may be
    /// elsewhere, or count otherwise: then the number is nobody's here, or somebody else's.
    pub(crate) fn of(container: &str, number: i64) -> io::Result<Self> {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other(format!("{number} is no process")))?;
        let process = Self::held(pid)?;
        let mut groups = String::new();
        let file = openat(&process.entry, "cgroup", OFlags::CLOEXEC, Mode::empty())?;
        File::from(file).take(MOST_GROUPS).read_to_string(&mut groups)?;
        if !is_of(&groups, container) {
            let message = format!("process {number} of this host is in no control group of it");
            return Err(io::Error::other(message));
        }
        Ok(process)
    }

    fn held(pid: Pid) -> io::Result<Self> {
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        let entry = format!("/proc/{}", pid.as_raw_nonzero());
        let entry = openat(CWD, entry, directory(), Mode::empty())?;
        // As long as this one has not ended, its number is nobody else's.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&now))? > 0 {
            return Err(io::Error::other("it has ended"));
        }
        Ok(Self { pid, handle, entry })
    }

    pub(crate) fn number(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// A socket by its path inside. Nothing that is inside leads to another place: not as a link on the
    /// way, and not as one that takes the socket's place before it is connected to.
    pub(crate) fn socket(&self, path: &str) -> io::Result<OwnedFd> {
        let root = openat(&self.entry, "root", directory(), Mode::empty())?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let path = path.trim_start_matches('/');
        let found = openat2(&root, path, flags, Mode::empty(), resolve)?;
        match FileType::from_raw_mode(fstat(&found)?.st_mode) {
            FileType::Socket => Ok(found),
            other => Err(io::Error::other(format!("there is no socket but a {other:?}"))),
        }
    }

    /// Waits for its end, and says whether it came within this time. The first process of a container ends
    /// after all others in it.
    pub(crate) async fn ends_within(self, bound: Duration) -> io::Result<bool> {
        let wait = move || {
            let bound = Timespec::try_from(bound).map_err(io::Error::other)?;
            loop {
                match poll(&mut [PollFd::new(&self.handle, PollFlags::IN)], Some(&bound)) {
                    Err(Errno::INTR) => {}
                    polled => return Ok(polled? > 0),
                }
            }
        };
        tokio::task::spawn_blocking(wait).await.map_err(io::Error::other)?
    }
}

fn directory() -> OFlags {
    OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC
}

/// Whether such control groups are a container's: engines name a group after the id.
fn is_of(groups: &str, container: &str) -> bool {
    let named = |line: &str| line.split('/').any(|part| part.contains(container));
    container.len() == ID_LENGTH && groups.lines().any(named)
}

#[cfg(test)]
impl Process {
    /// This very process.
    pub(crate) fn ourselves() -> Self {
        Self::held_by_number(std::process::id())
    }

    /// A process that is in no container.
    pub(crate) fn held_by_number(number: u32) -> Self {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw).unwrap();
        Self::held(pid).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    const ID: &str = "fcd7e76138d6225cf87fda8378c12bb0bf2cffc6ede1336c3065fadf002cc906";

    #[test]
    fn a_container_is_told_by_its_group() {
        for groups in [
            format!("9:name=systemd:/docker/{ID}\n0::/\n"),
            format!("0::/system.slice/docker-{ID}.scope\n"),
            format!("0::/machine.slice/libpod-{ID}.scope/container\n"),
            format!("0::/../../{ID}/init.scope\n"),
        ] {
            assert!(is_of(&groups, ID), "{groups}");
        }
        let other = ID.replace('f', "0");
        assert!(!is_of(&format!("0::/docker/{other}\n"), ID));
        assert!(!is_of("0::/docker/fcd7\n", "fcd7"), "what is no whole id tells nothing");
        let refused = Process::of(ID, std::process::id().into()).unwrap_err();
        assert!(refused.to_string().contains("no control group"), "{refused}");
        Process::of(ID, 0).unwrap_err();
    }

    #[test]
    fn no_link_leads_to_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("real")).unwrap();
        let _listener = UnixListener::bind(at("real/socket")).unwrap();
        symlink(at("real"), at("led")).unwrap();
        symlink(at("real/socket"), at("real/link")).unwrap();
        std::fs::write(at("real/file"), "").unwrap();
        let find = |name: &str| Process::ourselves().socket(at(name).to_str().unwrap());
        find("real/socket").unwrap();
        // The control: a path that follows links does lead there.
        assert!(at("led/link").canonicalize().unwrap().ends_with("real/socket"));
        let error = find("led/socket").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        assert!(find("real/link").unwrap_err().to_string().contains("but a Symlink"));
        find("real/../real/file").unwrap_err();
        assert!(find("real/file").unwrap_err().to_string().contains("no socket"));
    }

    #[tokio::test]
    async fn an_end_is_seen() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = Process::held_by_number(child.id());
        let pid = process.pid;
        assert!(!Process::held_by_number(child.id()).ends_within(Duration::ZERO).await.unwrap());
        drop(child.stdin.take());
        assert!(process.ends_within(Duration::from_secs(60)).await.unwrap());
        // Its number is still taken, until it is waited for.
        let again = Process::held(pid).unwrap_err();
        assert!(again.to_string().contains("ended"), "{again}");
        child.wait().unwrap();
    }
}
