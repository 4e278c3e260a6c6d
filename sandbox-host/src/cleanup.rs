//! Removing what was left half made, in threads: there may be no runtime any more.

use std::{
    io,
    sync::{Condvar, Mutex, PoisonError},
};

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// Does this in a thread of its own.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let counted = Counted::new();
    let thread = std::thread::Builder::new().name("sandbox-removal".into());
    thread.spawn(move || {
        work();
        drop(counted);
    })?;
    Ok(())
}

/// Waits until all of it is done; for a process that is about to end.
#[cfg(feature = "program")]
pub(crate) fn wait() {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    drop(ENDED.wait_while(running, |running| *running > 0));
}

struct Counted;

impl Counted {
    fn new() -> Self {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_all();
    }
}
