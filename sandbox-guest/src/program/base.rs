//! What every module of the guest stands on: locks, the clock, and the names of failures.

use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) use sandbox_guest::errno_text;
use sandbox_guest::{Failure, FailureKind};

/// Locks; a panic elsewhere ends the whole program, so there is no poison to mind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A failure that is not the system's.
pub(crate) fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure::new(kind, message)
}

/// The system's failure; `what` says what was tried, on what.
pub(crate) fn system(what: &str, error: &io::Error) -> Failure {
    Failure::system(what, error)
}
