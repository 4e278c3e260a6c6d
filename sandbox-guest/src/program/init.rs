//! The guest's start: what it is told is done in order, and then it serves.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::Path,
    sync::Arc,
};

use rustix::{fs::Mode, process};
use sandbox_guest::Setup;
use tokio::{io::Interest, net::unix::pipe};

use super::{
    base::{errno_text, lock},
    deadline,
    guest::Guest,
    harden::{self, Hardening},
    mounts, oom, serve, sys,
};

/// Four for each of the processes that may run at once, and some.
const MAX_OPEN_FILES: u64 = 32 * 1024;

/// The set-up is read from a trusted backend; this is for a mistake.
const MAX_SETUP: u64 = 16 * 1024 * 1024;

/// Reads the set-up from an inherited descriptor.
pub(crate) fn from_fd(number: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(number);
    let fd = text.parse().map_err(|_| format!("{text:?} is no descriptor's number"))?;
    let fd = sys::take_fd(fd).map_err(|error| name(&format!("the descriptor {fd}"), &error))?;
    run(&mut File::from(fd))
}

/// Reads the set-up from a file.
pub(crate) fn from_path(path: &Path) -> Result<(), String> {
    let what = path.display().to_string();
    run(&mut File::open(path).map_err(|error| name(&what, &error))?)
}

/// Reads the set-up from standard input, which then is a connection together with standard output. That
/// it ends before it has said anything means that nobody wants a guest any more.
pub(crate) fn from_stdin() -> Result<(), String> {
    let mut stdin = File::from(take_over(0).map_err(|error| name("standard input", &error))?);
    let stdout = take_over(1).map_err(|error| name("standard output", &error))?;
    let mut length = [0; 4];
    match stdin.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        read => read.map_err(|error| name("the set-up", &error))?,
    }
    let length = u64::from(u32::from_be_bytes(length));
    if length > MAX_SETUP {
        return Err(format!("a set-up of {length} bytes"));
    }
    let mut text = vec![0; length as usize];
    stdin.read_exact(&mut text).map_err(|error| name("the set-up", &error))?;
    start(&mut &text[..], Some((stdin.into(), stdout)))
}

/// A standard descriptor under another number; its own is free for `/dev/null`.
fn take_over(fd: i32) -> io::Result<OwnedFd> {
    let old = sys::take_fd(fd)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(&old, 3)?)
}

fn run(setup: &mut File) -> Result<(), String> {
    start(setup, None)
}

fn start(setup: &mut dyn Read, pipes: Option<(OwnedFd, OwnedFd)>) -> Result<(), String> {
    sys::tame_allocator();
    sys::block_signals();
    open_stdio().map_err(|error| name("/dev/null", &error))?;
    // Before anything else runs here: no other process may trace this one or read its memory.
    process::set_dumpable_behavior(process::DumpableBehavior::NotDumpable)
        .map_err(|error| name("PR_SET_DUMPABLE", &error.into()))?;
    process::umask(Mode::WGRP | Mode::WOTH);
    let open_files = raise_limits();
    process::set_child_subreaper(Some(process::getpid()))
        .map_err(|error| name("PR_SET_CHILD_SUBREAPER", &error.into()))?;

    let mut text = Vec::new();
    setup.take(MAX_SETUP).read_to_end(&mut text).map_err(|error| name("the set-up", &error))?;
    let setup: Setup =
        serde_json::from_slice(&text).map_err(|error| format!("the set-up: {error}"))?;
    drop(text);

    let oom = match setup.oom_fd {
        Some(fd) => Some(sys::take_fd(fd).map_err(|error| name("the oom descriptor", &error))?),
        None => oom::find(),
    };
    mounts::run(&setup.mounts)?;
    let listener = listener(&setup)?;
    let _ = std::env::set_current_dir("/");
    harden::apply(Hardening {
        drop_capabilities: setup.drop_capabilities,
        filter_syscalls: setup.filter_syscalls,
    })?;
    let guest = Arc::new(Guest::new(setup, oom.map(File::from), open_files));
    serve(guest, listener, pipes).map_err(|error| name("the runtime", &error))
}

/// Many processes have many pipes; what is started gets its old limit back, which is returned, and
/// leaves no core dumps unless asked to.
fn raise_limits() -> (u64, u64) {
    let (soft, hard) = sys::limit(libc::RLIMIT_NOFILE);
    let _ = sys::set_limit(libc::RLIMIT_NOFILE, hard.min(MAX_OPEN_FILES).max(soft), hard);
    let _ = sys::set_limit(libc::RLIMIT_CORE, 0, sys::limit(libc::RLIMIT_CORE).1);
    (soft, hard)
}

/// Nothing else may get the numbers 0 to 2, or a command's pipe would be taken for them.
fn open_stdio() -> io::Result<()> {
    loop {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let fd = OwnedFd::from(null);
        if std::os::fd::AsRawFd::as_raw_fd(&fd) > 2 {
            return Ok(());
        }
        std::mem::forget(fd);
    }
}

fn listener(setup: &Setup) -> Result<UnixListener, String> {
    let listener = match (setup.listen_fd, &setup.listen_path) {
        (Some(fd), _) => {
            let fd = sys::take_fd(fd)
                .map_err(|error| name(&format!("the listening descriptor {fd}"), &error))?;
            UnixListener::from(fd)
        }
        (None, Some(path)) => {
            bind(path, setup.listen_peer.is_some()).map_err(|error| name(path, &error))?
        }
        (None, None) => return Err("the set-up names nothing to listen on".to_owned()),
    };
    listener.set_nonblocking(true).map_err(|error| name("the listening socket", &error))?;
    Ok(listener)
}

/// Makes the socket elsewhere first: where it has its name, it listens already. One that looks at who
/// connects may be connected to by everybody.
fn bind(path: &str, looks: bool) -> io::Result<UnixListener> {
    let unfinished = format!("{path}.new");
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Nobody else may connect, not even before the mode is set.
    let before = process::umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let bound = UnixListener::bind(&unfinished);
    process::umask(before);
    let listener = bound?;
    let mode = if looks { 0o666 } else { 0o600 };
    std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(mode))?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

fn serve(
    guest: Arc<Guest>,
    listener: UnixListener,
    pipes: Option<(OwnedFd, OwnedFd)>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let signals = sys::signal_fd(&[libc::SIGCHLD, libc::SIGTERM])?;
        let signals = sys::watch(signals, Interest::READABLE)?;
        tokio::spawn(deadline::watch(Arc::clone(&guest)));
        tokio::spawn(serve::listen(Arc::clone(&guest), listener));
        if let Some((from, to)) = pipes {
            let (from, to) =
                (pipe::Receiver::from_owned_fd(from)?, pipe::Sender::from_owned_fd(to)?);
            tokio::spawn(serve::pipes(Arc::clone(&guest), from, to));
        }
        loop {
            let read = |fd: &OwnedFd| sys::read_signal(fd.as_fd());
            match signals.async_io(Interest::READABLE, read).await? {
                // From inside, where everybody could send it, it means nothing.
                (libc::SIGTERM, sender) if sender == 0 || !guest.alone => {
                    deadline::shut_down(&guest).await;
                }
                _ => reap(&guest),
            }
        }
    })
}

/// Reaps all children that have ended: supervisors, and orphans where the guest is first.
fn reap(guest: &Guest) {
    while let Ok(Some(child)) = sys::wait_any(false) {
        guest.reaped(child.cpu_us);
        if lock(&guest.supervisors).remove(&child.pid).is_some() {
            guest.touch();
        }
    }
}

fn name(what: &str, error: &io::Error) -> String {
    format!("{what}: {}", errno_text(error))
}
