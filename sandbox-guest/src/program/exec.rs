//! Requests about processes.

use std::{io, sync::Arc};

use sandbox_guest::{
    DEFAULT_WINDOW, Done, ExitStatus, Failure, FailureKind, MAX_KEPT_OUTPUT, Output, Response,
    Start,
    mux::{Alive, Stream},
};

use super::{
    attach,
    base::{failure, lock, system},
    guest::Guest,
    kill,
    process::Process,
    procfs, pump, spawn,
    sys::Pid,
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

fn begin(guest: &Arc<Guest>, mut start: Start) -> Result<Arc<Process>, Failure> {
    if start.id.is_empty() || start.id.len() > MAX_ID {
        let message = format!("a process id has 1 to {MAX_ID} bytes, not {}", start.id.len());
        return Err(failure(FailureKind::Invalid, message));
    }
    if let Some(process) = lock(&guest.table).get(&start.id) {
        return Ok(process);
    }
    if let Output::Keep { limit } = start.output
        && limit > MAX_KEPT_OUTPUT
    {
        let message = format!("at most {MAX_KEPT_OUTPUT} bytes of output are kept, not {limit}");
        return Err(failure(FailureKind::Invalid, message));
    }
    if start.input.as_ref().is_some_and(|input| input.len() as u64 > DEFAULT_WINDOW) {
        let message = format!("a start brings at most {DEFAULT_WINDOW} bytes of input");
        return Err(failure(FailureKind::Invalid, message));
    }
    if lock(&guest.frozen).is_some() {
        let message = "the sandbox is frozen for a snapshot: nothing can be started now";
        return Err(failure(FailureKind::Frozen, message));
    }
    lock(&guest.table).check_room()?;
    start.stdin |= start.input.is_some();
    let (supervisor, ends) = spawn::spawn(guest, &start)?;
    let process = Arc::new(Process::new(&start, supervisor));
    if let Some(input) = start.input.take() {
        let mut state = process.state();
        // There is room: it was looked at before.
        let _ = state.stdin.push(0, &input);
        state.stdin.end();
    }
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
        let own = |entry: &procfs::Entry| entry.parent == process.supervisor && entry.is_alive();
        pid.and_then(procfs::look).filter(own).into_iter().collect()
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

fn members(guest: &Guest, supervisor: Pid) -> io::Result<Vec<procfs::Entry>> {
    if !lock(&guest.supervisors).contains_key(&supervisor) {
        return Ok(Vec::new());
    }
    let mut found = procfs::descendants(&procfs::scan()?, &[supervisor]);
    found.retain(procfs::Entry::is_alive);
    Ok(found)
}

/// Kills a process's tree.
pub(crate) async fn kill(guest: &Guest, id: &str) -> Result<Response, Failure> {
    let process = lock(&guest.table).find(id)?;
    kill::because(guest, &process, ExitStatus::Cancelled)
        .await
        .map_err(|error| system(&format!("cannot kill the process {id:?}"), &error))?;
    Ok(Response::Done(Done::default()))
}

/// Waits for a process's end.
pub(crate) async fn wait(guest: &Guest, id: &str) -> Result<Response, Failure> {
    let process = lock(&guest.table).find(id)?;
    loop {
        let changed = process.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        {
            let state = process.state();
            if let Some(exit) = &state.exit {
                return Ok(Response::Exited(exit.clone()));
            }
            if let Some(Err(failure)) = &state.begun {
                return Err(failure.clone());
            }
        }
        changed.await;
    }
}

/// Lets go of what is kept of a process that has ended.
pub(crate) fn forget(guest: &Guest, id: &str) -> Result<Response, Failure> {
    let mut table = lock(&guest.table);
    if let Some(process) = table.get(id) {
        if process.state().exit.is_none() {
            let message = format!("the process {id:?} runs: kill it first");
            return Err(failure(FailureKind::Invalid, message));
        }
        table.forget(&process);
    }
    Ok(Response::Done(Done::default()))
}
