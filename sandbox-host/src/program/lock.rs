//! One change of an instance at a time, also where one was asked for again through another connection.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use sandbox_core::{Error, ErrorKind, InstanceId, Result};

use crate::error::at;

/// How long to wait for a change that was begun before.
const PATIENCE: Duration = Duration::from_secs(120);

/// Held while an instance is changed.
#[derive(Debug)]
pub(super) struct Held {
    file: File,
    path: PathBuf,
}

/// Waits until nobody else changes the instance.
pub(super) fn hold(state: &Path, instance: &InstanceId) -> Result<Held> {
    const OPERATION: &str = "change the instance";
    let dir = state.join("locks");
    let path = dir.join(instance.as_str());
    let begin = Instant::now();
    fs::create_dir_all(&dir).map_err(at(OPERATION, &dir))?;
    loop {
        let file = File::create(&path).map_err(at(OPERATION, &path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is(&file, &path) => return Ok(Held { file, path }),
            // Removed by its holder meanwhile.
            Ok(()) => continue,
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(error) => return Err(at(OPERATION, &path)(error.into())),
        }
        if begin.elapsed() > PATIENCE {
            let message = format!("another change of {instance} goes on, for {PATIENCE:?} by now");
            return Err(Error::new(ErrorKind::Unavailable, OPERATION, message));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is(file: &File, path: &Path) -> bool {
    let of = |found: io::Result<fs::Metadata>| found.map(|found| (found.dev(), found.ino())).ok();
    of(file.metadata()) == of(fs::metadata(path))
}

impl Drop for Held {
    fn drop(&mut self) {
        // While it is held, so that whoever waits for it sees that it is gone.
        let _ = fs::remove_file(&self.path);
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}
