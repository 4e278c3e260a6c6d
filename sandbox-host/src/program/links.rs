//! Which connection each run of the program was started through.
//!
//! When a link is cut, the host's side may not notice for hours, and what was started through it stays:
//! among it what carries a guest's stream, for which the guest still keeps its processes frozen, say. The
//! harness knows better: it names the connections that are gone, and this ends what they started.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sandbox_core::{Error, ErrorKind, Result};

use crate::{error::at, process::Worker};

/// How long they may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Notes that this process belongs to a link; forgotten when dropped.
#[derive(Debug)]
pub(super) struct Noted(PathBuf);

/// Notes that this process belongs to a link.
pub(super) fn note(state: &Path, link: &str) -> Result<Noted> {
    const OPERATION: &str = "note the connection";
    if link.is_empty() || !link.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        let message = "the connection's name is none";
        return Err(Error::new(ErrorKind::InvalidSpec, OPERATION, message));
    }
    let dir = state.join("links");
    let path = dir.join(format!("{link}.{}", std::process::id()));
    let note = || {
        fs::create_dir_all(&dir)?;
        // Read by its name only when it is whole.
        let new = dir.join(format!("new.{}", std::process::id()));
        fs::write(&new, serde_json::to_vec(&Worker::this()?)?)?;
        fs::rename(&new, &path)
    };
    let noted: io::Result<()> = note();
    noted.map_err(at(OPERATION, &path))?;
    Ok(Noted(path))
}

impl Drop for Noted {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Ends what was started through a link.
pub(super) fn forget(state: &Path, link: &str) -> Result<()> {
    const OPERATION: &str = "end what a broken connection left";
    let dir = state.join("links");
    let entries = match fs::read_dir(&dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(at(OPERATION, &dir))?,
    };
    for entry in entries {
        let path = entry.map_err(at(OPERATION, &dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.split_once('.'));
        let pid = name.filter(|(of, _)| *of == link).and_then(|(_, pid)| pid.parse().ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            end(pid, &path).map_err(at(OPERATION, &path))?;
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

fn end(pid: Pid, path: &Path) -> io::Result<()> {
    let Ok(bytes) = fs::read(path) else { return Ok(()) };
    let worker: Worker = serde_json::from_slice(&bytes)?;
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    // Only now that the handle stands for one process for good.
    if !worker.runs() || pidfd_send_signal(&handle, Signal::TERM).is_err() {
        return Ok(());
    }
    let begin = Instant::now();
    while worker.runs() {
        if begin.elapsed() > PATIENCE {
            let _ = pidfd_send_signal(&handle, Signal::KILL);
        }
        if begin.elapsed() > PATIENCE * 2 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
