//! A list of files for a harness to compare with another: of one filesystem, without what is mounted.

use std::{
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{self, BufWriter, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use sandbox_guest::ContentHash;

use super::base::errno_text;

/// Writes one line for each file below `root`, which is not told itself: its kind, mode, size, time and,
/// if it was changed at `since` or later, a hash of its contents; its path; a zero byte. What lies in
/// `without` is left out.
pub(crate) fn main(since: &[u8], root: &Path, without: &[OsString]) -> Result<(), String> {
    let since = std::str::from_utf8(since).ok().and_then(|text| text.parse().ok());
    let since: i64 = since.ok_or("the time is no number")?;
    let without: Vec<&Path> = without.iter().map(Path::new).collect();
    let mut out = BufWriter::with_capacity(64 * 1024, io::stdout().lock());
    let top = fs::symlink_metadata(root).map_err(|error| about(root, &error))?;
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => return Err(about(&directory, &error)),
        };
        for entry in entries {
            let path = entry.map_err(|error| about(&directory, &error))?.path();
            if without.contains(&path.as_path()) {
                continue;
            }
            let metadata = fs::symlink_metadata(&path).map_err(|error| about(&path, &error))?;
            if metadata.dev() != top.dev() {
                continue;
            }
            line(&path, &metadata, since, &mut out).map_err(|error| about(&path, &error))?;
            if metadata.is_dir() {
                left.push(path);
            }
        }
    }
    out.flush().map_err(|error| about(Path::new("standard output"), &error))
}

fn line(path: &Path, metadata: &Metadata, since: i64, out: &mut impl Write) -> io::Result<()> {
    let kind = metadata.file_type();
    let (letter, size) = if kind.is_dir() {
        ('d', 0)
    } else if kind.is_file() {
        ('f', metadata.len())
    } else if kind.is_symlink() {
        ('l', metadata.len())
    } else {
        ('o', metadata.len())
    };
    write!(out, "{letter} {:o} {size} {} ", metadata.mode() & 0o7777, metadata.mtime())?;
    if kind.is_file() && metadata.mtime() >= since {
        write!(out, "{:x} ", hash(path)?)?;
    } else if kind.is_symlink() && metadata.mtime() >= since {
        let mut hash = ContentHash::default();
        hash.write(fs::read_link(path)?.as_os_str().as_bytes());
        write!(out, "{:x} ", hash.finish())?;
    } else {
        out.write_all(b"- ")?;
    }
    out.write_all(path.as_os_str().as_bytes())?;
    out.write_all(&[0])
}

fn hash(path: &Path) -> io::Result<u64> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = File::options().read(true).custom_flags(flags).open(path)?;
    let mut hash = ContentHash::default();
    let mut buffer = vec![0; 128 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finish()),
            count => hash.write(&buffer[..count]),
        }
    }
}

fn about(path: &Path, error: &io::Error) -> String {
    format!("{}: {}", path.display(), errno_text(error))
}

/// What a program that is started in a place finds there, for a harness that probes it: words and values.
pub(crate) fn report() -> Result<(), String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let mut lines: Vec<(String, String)> = Vec::new();
    for key in ["NoNewPrivs", "Seccomp", "CapEff", "CapBnd"] {
        let found = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        lines.extend(found.map(|value| (key.to_owned(), value.trim().to_owned())));
    }
    let interfaces: Vec<String> = read("/proc/net/dev")
        .lines()
        .skip(2)
        .filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()))
        .filter(|name| !is_placeholder(name))
        .collect();
    let first = |paths: &[&str]| {
        let texts = paths.iter().filter_map(|path| fs::read_to_string(path).ok());
        texts.map(|text| text.trim().to_owned()).next().unwrap_or_default()
    };
    let cpu = match fs::read_to_string("/sys/fs/cgroup/cpu.max") {
        Ok(text) => text.split_whitespace().map(str::to_owned).collect::<Vec<_>>(),
        Err(_) => vec![
            first(&["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"]),
            first(&["/sys/fs/cgroup/cpu/cpu.cfs_period_us"]),
        ],
    };
    let numbers: Vec<u64> = cpu.iter().filter_map(|word| word.parse().ok()).collect();
    if let [quota, period] = numbers[..] {
        lines.push(("cpu_millis".into(), (quota * 1000 / period.max(1)).to_string()));
    }
    let freezer = ["/sys/fs/cgroup/cgroup.freeze", "/sys/fs/cgroup/freezer"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    let is_process =
        |entry: &fs::DirEntry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit);
    let processes = fs::read_dir("/proc")
        .map_or(0, |all| all.filter(|e| e.as_ref().is_ok_and(is_process)).count());
    let ptmx = File::options().read(true).write(true).open("/dev/ptmx").is_ok();
    lines.extend([
        ("interfaces".to_owned(), interfaces.join(",")),
        ("pids".to_owned(), first(&["/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"])),
        (
            "memory".to_owned(),
            first(&["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]),
        ),
        ("freezer".to_owned(), freezer.unwrap_or_default().to_owned()),
        ("pid".to_owned(), std::process::id().to_string()),
        ("processes".to_owned(), processes.to_string()),
        ("ptmx".to_owned(), if ptmx { "yes" } else { "no" }.to_owned()),
    ]);
    let text: String = lines.iter().map(|(key, value)| format!("{key} {value}\n")).collect();
    io::stdout().write_all(text.as_bytes()).map_err(|error| error.to_string())
}

/// Interfaces that the kernel puts into every network namespace, and that lead nowhere.
fn is_placeholder(name: &str) -> bool {
    let prefixes =
        ["tunl", "gre", "gretap", "erspan", "ip_vti", "ip6_vti", "sit", "ip6tnl", "ip6gre"];
    name.strip_suffix('0').is_some_and(|name| prefixes.contains(&name))
}

/// Ends the guest that listens below a directory, with all that it started, and removes the directory.
pub(crate) fn leave(directory: &Path) -> Result<(), String> {
    use std::{
        os::unix::net::UnixStream,
        time::{Duration, Instant},
    };
    const PATIENCE: Duration = Duration::from_secs(30);
    let socket: PathBuf = directory.join("run/socket");
    if let Ok(stream) = UnixStream::connect(&socket) {
        let peer = rustix::net::sockopt::socket_peercred(&stream)
            .map_err(|error| about(&socket, &error.into()))?;
        let handle = rustix::process::pidfd_open(peer.pid, rustix::process::PidfdFlags::empty())
            .map_err(|error| about(&socket, &error.into()))?;
        rustix::process::pidfd_send_signal(&handle, rustix::process::Signal::TERM)
            .map_err(|error| about(&socket, &error.into()))?;
        let begin = Instant::now();
        // It takes its socket away when it ends.
        while socket.exists() {
            if begin.elapsed() > PATIENCE {
                return Err("the guest does not end".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    super::tree_remove::remove(directory)
}
