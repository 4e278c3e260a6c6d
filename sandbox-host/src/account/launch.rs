//! Starting a guest as an ordinary process.

use std::{
    fs, io,
    io::{Seek, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::fs::{MemfdFlags, memfd_create};
use sandbox_core::{Error, ErrorKind, Provision, Result};
use sandbox_guest::{Setup, preamble};

use super::{
    error::{at, doing, failed},
    instance::InstanceDir,
    processes::{GuestId, MARK},
    sys::ChildSetup,
};

/// How long a guest may take to come up. It takes milliseconds; a machine that swaps takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts an instance's guest and waits until it answers.
pub(super) fn launch(dir: &InstanceDir, program: &Path, request: &Provision) -> Result<GuestId> {
    const OPERATION: &str = "provision";
    let (mut child, guest) = start(dir, program, request)?;
    let deadline = Instant::now() + PATIENCE;
    let why = loop {
        match greet(dir) {
            Ok(()) => return Ok(guest),
            Err(error) if Instant::now() > deadline => break error.to_string(),
            Err(_) => {}
        }
        if let Some(status) = child.try_wait().map_err(doing(OPERATION, "waiting for the guest"))? {
            break dir.last_words().unwrap_or_else(|| status.to_string());
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let _ = child.kill();
    let _ = child.wait();
    Err(failed(OPERATION, format!("the guest did not come up: {why}")))
}

/// Then its set-up has succeeded; the socket is there before it is.
fn greet(dir: &InstanceDir) -> io::Result<()> {
    let stream = dir.connect()?;
    stream.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stream = tokio::net::UnixStream::from_std(stream)?;
        let greeted = tokio::time::timeout(PATIENCE, preamble::exchange(&mut stream)).await;
        greeted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    })
}

fn start(dir: &InstanceDir, program: &Path, request: &Provision) -> Result<(Child, GuestId)> {
    const OPERATION: &str = "provision";
    let listener = dir.listen().map_err(doing(OPERATION, "making the guest's socket"))?;
    let log = dir.log();
    let mut words = fs::OpenOptions::new();
    words.create(true).write(true).truncate(true).mode(0o600);
    let words = words.open(&log).map_err(at(OPERATION, &log))?;
    let memory = memfd_create("sandbox-setup", MemfdFlags::CLOEXEC)
        .map_err(|error| doing(OPERATION, "making room for the guest's set-up")(error.into()))?;
    let mut memory = fs::File::from(memory);
    let setup = serde_json::to_vec(&setup(dir, request, listener.as_raw_fd())?)
        .map_err(|error| failed(OPERATION, "the guest's set-up").with_source(error))?;
    memory
        .write_all(&setup)
        .and_then(|()| memory.rewind())
        .map_err(doing(OPERATION, "writing the guest's set-up"))?;
    let mut command = Command::new(program);
    command.args(["init", "--setup-fd", &memory.as_raw_fd().to_string()]);
    command.env_clear().env(MARK, request.instance.as_str()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(words);
    let keep = vec![memory.into(), listener.into()];
    ChildSetup { keep, ..ChildSetup::default() }.apply(&mut command);
    let child = command.spawn().map_err(|error| {
        let what = format!("starting {}", program.display());
        Error::io(OPERATION, what, error)
    })?;
    let guest = GuestId::of(child.id()).map_err(doing(OPERATION, "the guest that was started"))?;
    dir.note(guest).map_err(at(OPERATION, dir.path()))?;
    Ok((child, guest))
}

fn setup(dir: &InstanceDir, request: &Provision, listen_fd: i32) -> Result<Setup> {
    let text = |path: std::path::PathBuf| {
        path.into_os_string().into_string().map_err(|path| {
            let message = format!("the path {path:?} is not UTF-8; name another state directory");
            Error::new(ErrorKind::InvalidSpec, "provision", message)
        })
    };
    let workspace = text(dir.workspace_of(&request.spec))?;
    let own = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let mut env = std::collections::BTreeMap::from([
        own("HOME", &text(dir.home())?),
        own("LANG", "C.UTF-8"),
        own("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        own("SHELL", "/bin/sh"),
        own(MARK, request.instance.as_str()),
    ]);
    env.extend(request.spec.env.clone());
    Ok(Setup {
        listen_fd: Some(listen_fd),
        workspace,
        env: env.into_iter().collect(),
        ..request.guest_setup()
    })
}
