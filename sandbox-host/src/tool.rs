//! Running a program of ours to its end.

use std::{
    io,
    process::{Command, Output, Stdio},
};

use rustix::fd::OwnedFd;
use sandbox_core::{Error, Result};

use crate::{
    error::blocking,
    sys::{ChildSetup, Stage},
};

/// Runs a program to its end, without this process's environment and descriptors. Dropping the future
/// kills it; so does the end of this process.
pub(crate) async fn run(
    operation: &'static str,
    name: &'static str,
    prepare: impl FnOnce() -> Result<(Command, Option<Stage>)> + Send + 'static,
) -> Result<Output> {
    let (started, mut running) = tokio::sync::oneshot::channel();
    let work = blocking(operation, move || {
        let (mut command, stage) = prepare()?;
        command.env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // This thread stays until the child has ended.
        ChildSetup { stage, die_with_thread: true, ..ChildSetup::default() }.apply(&mut command);
        let starting = |error| Error::io(operation, format!("starting {name}"), error);
        let child = command.spawn().map_err(starting)?;
        if let Ok(killer) = Killer::new(child.id()) {
            // Nobody waits any more if this fails: then the killer is dropped here and kills.
            let _ = started.send(killer);
        }
        child.wait_with_output().map_err(starting)
    });
    tokio::pin!(work);
    let mut killer = None;
    let output = loop {
        tokio::select! {
            biased;
            output = &mut work => break output,
            sent = &mut running, if killer.is_none() => match sent {
                Ok(sent) => killer = Some(sent),
                Err(_) => break work.await,
            },
        }
    };
    if let Some(killer) = killer {
        killer.ended();
    }
    output
}

/// Kills a process when it is dropped.
struct Killer(Option<OwnedFd>);

impl Killer {
    fn new(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        let flags = rustix::process::PidfdFlags::empty();
        Ok(Self(Some(rustix::process::pidfd_open(pid, flags)?)))
    }

    fn ended(mut self) {
        self.0 = None;
    }
}

impl Drop for Killer {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
        }
    }
}
