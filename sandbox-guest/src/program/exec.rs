//! Requests about processes.

use std::{io, sync::Arc};

use sandbox_guest::{
    Done, ExitStatus, Failure, FailureKind, Response, Start, Status,
    mux::{Alive, Stream},
};

use super::{
    attach,
    guest::{Guest, failure, lock, system},
    process::Process,
    pump, spawn,
    sys::Pid,
    tree,
};

/// How long an id may be.
const MAX_ID: usize = 256;

/// Starts a process, or finds the one that this id started, and attaches the client to it.
pub(crate) async fn start(
    guest: &Arc<Guest>,
    start: Start,
    stream: Stream,
    alive: &Alive,
) -> Result<io::Result<()>, (Failure, Stream)> {
    match begin(guest, start) {
        Ok(process) => Ok(attach::serve(guest, process, stream, (0, 0), alive).await),
        Err(failure) => Err((failure, stream)),
    }
}

fn begin(guest: &Arc<Guest>, start: Start) -> Result<Arc<Process>, Failure> {
    if start.id.is_empty() || start.id.len() > MAX_ID {
        let message = format!("a process id has 1 to {MAX_ID} bytes, not {}", start.id.len());
        return Err(failure(FailureKind::Invalid, message));
    }
    if let Some(process) = lock(&guest.table).get(&start.id) {
        return Ok(process);
    }
    if lock(&guest.frozen).is_some() {
        let message = "the sandbox is frozen for a snapshot: nothing can be started now";
        return Err(failure(FailureKind::Frozen, message));
    }
    lock(&guest.table).check_room()?;
    let (supervisor, ends) = spawn::spawn(guest, &start)?;
    let process = Arc::new(Process::new(&start, supervisor));
    lock(&guest.table).insert(Arc::clone(&process));
    tokio::spawn(pump::run(Arc::clone(guest), Arc::clone(&process), ends, Box::new(start)));
    Ok(process)
}

/// Signals a process, or with `whole` all that descends from it too.
pub(crate) fn signal(
    guest: &Guest,
    id: &str,
    signal: i32,
    whole: bool,
) -> Result<Response, Failure> {
    if !(0..=64).contains(&signal) {
        return Err(failure(FailureKind::Invalid, format!("there is no signal {signal}")));
    }
    let process = lock(&guest.table).find(id)?;
    let begun = process.state().begun.clone();
    let pid = begun.and_then(Result::ok);
    let ended = || failure(FailureKind::NotFound, format!("the process {id:?} has ended"));
    let what = format!("signal {signal} to the process {id:?}");
    let targets = if whole {
        members(guest, process.supervisor).map_err(|error| system(&what, &error))?
    } else {
        let own = |entry: &tree::Entry| entry.parent == process.supervisor && entry.is_alive();
        pid.and_then(tree::look).filter(own).into_iter().collect()
    };
    if targets.is_empty() {
        return Err(ended());
    }
    for target in targets {
        match target.signal(signal) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
                return Err(system(&what, &error));
            }
            Ok(()) => {}
            Err(_) if whole => {}
            Err(_) => return Err(ended()),
        }
    }
    Ok(Response::Done(Done::default()))
}

fn members(guest: &Guest, supervisor: Pid) -> io::Result<Vec<tree::Entry>> {
    if !lock(&guest.supervisors).contains_key(&supervisor) {
        return Ok(Vec::new());
    }
    let mut found = tree::descendants(&tree::scan()?, &[supervisor]);
    found.retain(tree::Entry::is_alive);
    Ok(found)
}

/// Kills a process's tree.
pub(crate) async fn kill(guest: &Guest, id: &str) -> Result<Response, Failure> {
    let process = lock(&guest.table).find(id)?;
    tree::kill_because(guest, &process, ExitStatus::Cancelled)
        .await
        .map_err(|error| system(&format!("cannot kill the process {id:?}"), &error))?;
    Ok(Response::Done(Done::default()))
}

/// How the guest is.
pub(crate) fn status(guest: &Guest) -> Status {
    let running = lock(&guest.table).running();
    let own = std::process::id() as Pid;
    let supervisors = lock(&guest.supervisors);
    let bridges = lock(&guest.bridges);
    let roots: Vec<Pid> = supervisors.keys().copied().collect();
    let entries = tree::scan().unwrap_or_default();
    let processes = if guest.alone {
        entries
            .iter()
            .filter(|e| e.is_alive() && e.pid != own)
            .filter(|e| !supervisors.contains_key(&e.pid) && !bridges.contains(&e.pid))
            .count()
    } else {
        tree::descendants(&entries, &roots).iter().filter(|e| e.is_alive()).count()
    };
    let idle = if running > 0 { 0 } else { guest.idle().as_millis() as u64 };
    Status {
        running: running as u32,
        processes: processes as u32,
        idle_ms: idle,
        guest_memory: resident_memory(),
    }
}

fn resident_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
