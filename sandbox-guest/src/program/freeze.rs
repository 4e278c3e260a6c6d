//! Stopping everything for a snapshot, and letting it go on.

use std::{
    collections::HashSet,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_guest::{Done, Failure, FailureKind, Response};

use super::{
    base::{failure, lock, system},
    guest::{Frozen, Guest},
    procfs::{self, Entry},
    sys::Pid,
};

/// A freeze gives up after this: something starts processes faster than they can be stopped.
const PATIENCE: Duration = Duration::from_secs(5);

/// Stops every process and waits until all are.
pub(crate) async fn freeze(guest: &Arc<Guest>, connection: u64) -> Result<Response, Failure> {
    {
        let mut frozen = lock(&guest.frozen);
        if frozen.is_some() {
            return Err(failure(FailureKind::Frozen, "the sandbox is frozen already"));
        }
        // From here on nothing is started.
        *frozen = Some(Frozen { connection, stopped: Vec::new() });
    }
    match stop_all(guest).await {
        Ok(idle) => Ok(Response::Frozen { idle }),
        Err(error) => {
            let _ = thaw(guest);
            Err(system("cannot stop the sandbox's processes", &error))
        }
    }
}

/// Whether the guest is idle then: what it keeps of processes that have ended counts as well.
async fn stop_all(guest: &Guest) -> io::Result<bool> {
    let begin = Instant::now();
    let mut known: HashSet<(Pid, u64)> = HashSet::new();
    loop {
        let all = others(guest)?;
        let new: Vec<Entry> =
            all.iter().filter(|entry| known.insert((entry.pid, entry.start))).copied().collect();
        for entry in &new {
            // What was stopped before stays stopped afterwards.
            if !entry.is_stopped() && entry.signal(libc::SIGSTOP).is_ok() {
                let mut frozen = lock(&guest.frozen);
                let Some(frozen) = frozen.as_mut() else {
                    let _ = entry.signal(libc::SIGCONT);
                    return Err(io::Error::other("it was thawed meanwhile"));
                };
                frozen.stopped.push(*entry);
            }
        }
        if new.is_empty() && all.iter().all(|entry| is_still(entry, &all)) {
            return Ok(known.is_empty() && !lock(&guest.table).keeps_output());
        }
        if begin.elapsed() > PATIENCE {
            return Err(io::Error::other("some do not stop"));
        }
        if new.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        } else {
            tokio::task::yield_now().await;
        }
    }
}

/// Whether a process is stopped, or waits (as after vfork) for a child that is.
fn is_still(entry: &Entry, all: &[Entry]) -> bool {
    let stopped = |entry: &Entry| matches!(entry.state, b'T' | b't');
    stopped(entry)
        || (entry.state == b'D' && all.iter().any(|e| e.parent == entry.pid && stopped(e)))
}

/// All processes but the guest's own, parents before children.
fn others(guest: &Guest) -> io::Result<Vec<Entry>> {
    let entries = procfs::scan()?;
    let supervisors = lock(&guest.supervisors);
    let bridges = lock(&guest.bridges);
    let own = std::process::id() as Pid;
    let roots: Vec<Pid> = if guest.alone {
        // 0 is the parent of those that entered from outside.
        vec![0]
    } else {
        supervisors.keys().copied().collect()
    };
    let mut found = procfs::descendants(&entries, &roots);
    found.retain(|e| {
        let ours = e.pid == own || supervisors.contains_key(&e.pid) || bridges.contains(&e.pid);
        e.is_alive() && !ours
    });
    Ok(found)
}

/// Lets everything go on, children before parents.
pub(crate) fn thaw(guest: &Guest) -> Result<Response, Failure> {
    let frozen = lock(&guest.frozen).take();
    let Some(frozen) = frozen else {
        return Err(failure(FailureKind::Invalid, "the sandbox is not frozen"));
    };
    for entry in frozen.stopped.iter().rev() {
        let _ = entry.signal(libc::SIGCONT);
    }
    Ok(Response::Done(Done::default()))
}

/// Lets everything go on if this connection froze it.
pub(crate) fn thaw_of(guest: &Guest, connection: u64) {
    let mine = lock(&guest.frozen).as_ref().is_some_and(|frozen| frozen.connection == connection);
    if mine {
        let _ = thaw(guest);
    }
}
