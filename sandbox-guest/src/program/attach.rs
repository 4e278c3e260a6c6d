//! A client and a process: output goes out as far as the client's window, input comes in always.

use std::{io, sync::Arc, time::Duration};

use sandbox_guest::{
    DEFAULT_WINDOW, ExitStatus, Failure, FailureKind, Input, Output, Response, Started,
    frame::{self, Channel, Frame},
    mux::{Alive, Stream},
};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};

use super::{
    base::{failure, lock},
    guest::Guest,
    kill,
    process::{Process, State},
    spawn,
};

/// How long a process goes on after its client's connection was cut.
const GRACE: Duration = Duration::from_secs(60);

/// How long a client may take to let go of a stream that is over.
const FAREWELL: Duration = Duration::from_secs(10);

/// One write to the stream: frame headers included, it fits one packet of the connection.
const BATCH: usize = 64 * 1024;

/// The first write; each is twice the one before. A frame that is cut in its middle is lost: over a
/// connection that never lasts long, small ones arrive.
const FIRST_BATCH: usize = 4 * 1024;

/// The client is told of taken input once it amounts to this.
const ACCEPT_STEP: u64 = DEFAULT_WINDOW / 4;

/// One channel, as far as it has been sent and may be.
struct Cursor {
    channel: Channel,
    sent: u64,
    /// What the client says it took.
    taken: u64,
    /// Whether the process ran when the client attached: then output is sent up to its end, and else
    /// also what others wrote since.
    live: bool,
}

/// What both directions of an attachment know.
struct Link {
    guest: Arc<Guest>,
    process: Arc<Process>,
    number: u64,
    pid: u32,
    /// Where the client was told that its input is to begin.
    input_from: u64,
    taken: std::sync::Mutex<(u64, u64)>,
}

/// How the client went.
enum Farewell {
    Detached,
    Gone,
}

/// Serves a client that attached to a process (or started it) until the stream is over.
pub(crate) async fn serve(
    guest: &Arc<Guest>,
    process: Arc<Process>,
    stream: Stream,
    offsets: (u64, u64),
    alive: &Alive,
) -> io::Result<()> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let started = match begin(&process, offsets).await {
        Ok(started) => started,
        Err(failure) => {
            frame::write_message(&mut writer, &Response::Failed(failure)).await?;
            return writer.shutdown().await;
        }
    };
    let live = process.state().exit.is_none();
    let number = enter(&process);
    let link = Link {
        guest: Arc::clone(guest),
        process,
        number,
        pid: started.pid,
        input_from: started.stdin,
        taken: std::sync::Mutex::new((started.stdout, started.stderr)),
    };
    let cursor = |channel, sent| Cursor { channel, sent, taken: sent, live };
    let cursors = [cursor(Channel::Out, started.stdout), cursor(Channel::Err, started.stderr)];
    let farewell = {
        let input = link.input(&mut reader);
        let output = link.output(&mut writer, cursors, started);
        tokio::pin!(input, output);
        tokio::select! {
            farewell = &mut input => farewell,
            result = &mut output => match result {
                // All is said: wait for the client's last word.
                Ok(()) => tokio::time::timeout(FAREWELL, input).await.unwrap_or(Farewell::Gone),
                Err(_) => Farewell::Gone,
            }
        }
    };
    link.leave(&farewell, alive);
    Ok(())
}

/// Waits until the process runs, and settles where its output is to begin.
async fn begin(process: &Process, offsets: (u64, u64)) -> Result<Started, Failure> {
    loop {
        let changed = process.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let begun = process.state().begun.clone();
        if let Some(begun) = begun {
            let pid = begun?;
            let mut state = process.state();
            for (name, offset, end) in [
                ("standard output", offsets.0, state.stdout.end()),
                ("standard error", offsets.1, state.stderr.end()),
            ] {
                if offset > end {
                    let message = format!("byte {offset} of the {name}, which has {end} so far");
                    return Err(failure(FailureKind::Invalid, message));
                }
            }
            state.stdout.taken(offsets.0);
            state.stderr.taken(offsets.1);
            // It may have waited for room.
            process.wake.notify_one();
            return Ok(Started {
                process: process.id.clone(),
                pid: pid as u32,
                stdout: offsets.0.max(state.stdout.begin()),
                stderr: offsets.1.max(state.stderr.begin()),
                stdin: state.stdin.received(),
                taken: state.stdin.taken(),
            });
        }
        changed.await;
    }
}

/// Counts the attachment. It is the one whose end matters if its output is a stream, which only one
/// can have, or if there is no other.
fn enter(process: &Process) -> u64 {
    let mut state = process.state();
    state.attachments += 1;
    let number = state.attachments;
    if state.owner.is_none() || matches!(process.output, Output::Stream) {
        state.owner = Some(number);
    }
    drop(state);
    process.announce();
    number
}

impl Link {
    /// Sends output until the process has ended and all of it is sent.
    async fn output(
        &self,
        writer: &mut WriteHalf<Stream>,
        mut cursors: [Cursor; 2],
        started: Started,
    ) -> io::Result<()> {
        let mut accepted = started.taken;
        let mut most = FIRST_BATCH;
        let mut batch = frame::encode(&Response::Started(started))?;
        loop {
            let changed = self.process.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let over = self.fill(&mut batch, &mut cursors, &mut accepted, most)?;
            if !batch.is_empty() {
                writer.write_all(&batch).await?;
                batch.clear();
                most = (most * 2).min(BATCH);
                if !over {
                    continue;
                }
            }
            writer.flush().await?;
            if over {
                return writer.shutdown().await;
            }
            batch = Vec::new();
            changed.await;
        }
    }

    /// Puts into the batch what may be sent now, some `most` bytes of it; whether that is the last.
    fn fill(
        &self,
        batch: &mut Vec<u8>,
        cursors: &mut [Cursor; 2],
        accepted: &mut u64,
        most: usize,
    ) -> io::Result<bool> {
        let state = self.process.state();
        let stream = matches!(self.process.output, Output::Stream);
        // The client attached once more, where one only can be attached.
        if stream && state.attachments > self.number {
            let failure = failure(FailureKind::Invalid, "another client attached to this process");
            batch.extend(frame::encode(&Response::Failed(failure))?);
            return Ok(true);
        }
        let taken = state.stdin.taken();
        if taken >= *accepted + ACCEPT_STEP {
            *accepted = taken;
            batch.extend(frame::encode(&Response::Accepted { stdin: taken })?);
        }
        {
            let taken = lock(&self.taken);
            cursors[0].taken = taken.0;
            cursors[1].taken = taken.1;
        }
        let oldest = (state.stdout.begin(), state.stderr.begin());
        if cursors[0].sent < oldest.0 || cursors[1].sent < oldest.1 {
            // Newer output took the place of some that was not sent yet.
            cursors[0].sent = cursors[0].sent.max(oldest.0);
            cursors[1].sent = cursors[1].sent.max(oldest.1);
            let again = Started {
                process: self.process.id.clone(),
                pid: self.pid,
                stdout: cursors[0].sent,
                stderr: cursors[1].sent,
                stdin: state.stdin.received(),
                taken: state.stdin.taken(),
            };
            batch.extend(frame::encode(&Response::Started(again))?);
        }
        let mut all_sent = true;
        for cursor in cursors {
            all_sent &= cursor.fill(batch, &state, stream, most)?;
        }
        match &state.exit {
            Some(exit) if all_sent => {
                batch.extend(frame::encode(&Response::Exited(exit.clone()))?);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Takes what the client sends until it lets go.
    async fn input(&self, reader: &mut ReadHalf<Stream>) -> Farewell {
        let mut at = self.input_from;
        loop {
            let message = match frame::read(reader).await {
                Ok(Some(Frame::Data(Channel::In, data))) => {
                    // What was on its way when the client attached again is sent once more there.
                    if self.process.state().stdin.push(at, &data).is_err() {
                        return Farewell::Gone;
                    }
                    at += data.len() as u64;
                    self.process.wake.notify_one();
                    continue;
                }
                Ok(Some(Frame::Message(message))) => message,
                _ => return Farewell::Gone,
            };
            match frame::decode(&message) {
                Ok(Input::End) => {
                    self.process.state().stdin.end();
                    self.process.wake.notify_one();
                }
                Ok(Input::Taken { stdout, stderr }) => self.taken(stdout, stderr),
                Ok(Input::Resize(size)) if spawn::check_size(size).is_ok() => {
                    self.process.state().resize = Some(size);
                    self.process.wake.notify_one();
                }
                Ok(Input::Detach) => return Farewell::Detached,
                // Of a later release, or a size that no terminal has.
                Ok(_) => {}
                Err(_) => return Farewell::Gone,
            }
        }
    }

    fn taken(&self, stdout: u64, stderr: u64) {
        {
            let mut taken = lock(&self.taken);
            *taken = (taken.0.max(stdout), taken.1.max(stderr));
        }
        let mut state = self.process.state();
        state.stdout.taken(stdout);
        state.stderr.taken(stderr);
        drop(state);
        self.process.wake.notify_one();
        self.process.announce();
    }

    /// Does what the client's going means for the process.
    fn leave(&self, farewell: &Farewell, alive: &Alive) {
        let mut state = self.process.state();
        if state.owner != Some(self.number) {
            return;
        }
        state.owner = None;
        if matches!(farewell, Farewell::Detached) {
            state.detached = true;
            return;
        }
        if state.detached {
            return;
        }
        let ended = state.exit.is_some();
        drop(state);
        let (guest, process) = (Arc::clone(&self.guest), Arc::clone(&self.process));
        match (alive.get(), ended) {
            (true, true) => lock(&guest.table).forget(&process),
            // Kept for a client whose connection was cut before it had all.
            (false, true) => {}
            (true, false) => {
                tokio::spawn(async move { abandon(&guest, &process).await });
            }
            (false, false) => {
                let number = process.state().attachments;
                tokio::spawn(async move {
                    tokio::time::sleep(GRACE).await;
                    if process.state().is_abandoned(number) {
                        abandon(&guest, &process).await;
                    }
                });
            }
        }
    }
}

/// Kills what nobody waits for, and forgets it.
async fn abandon(guest: &Guest, process: &Arc<Process>) {
    let _ = kill::because(guest, process, ExitStatus::Cancelled).await;
    lock(&guest.table).forget(process);
}

impl Cursor {
    /// Puts into the batch what fits and may be sent; whether all there is has been sent.
    fn fill(
        &mut self,
        batch: &mut Vec<u8>,
        state: &State,
        stream: bool,
        most: usize,
    ) -> io::Result<bool> {
        let err = self.channel == Channel::Err;
        let log = if err { &state.stderr } else { &state.stdout };
        let end = match &state.exit {
            Some(exit) if self.live => {
                if err {
                    exit.stderr
                } else {
                    exit.stdout
                }
            }
            _ => log.end(),
        };
        let window = (self.taken + DEFAULT_WINDOW).saturating_sub(self.sent);
        // What a process left in its pipe at its end may exceed the window; it is little.
        let window = if stream && state.exit.is_some() { u64::MAX } else { window };
        let room = (most - frame::HEAD).saturating_sub(batch.len()) as u64;
        let most = window.min(room).min(end.saturating_sub(self.sent)) as usize;
        if most > 0 {
            let start = batch.len();
            batch.extend_from_slice(&[0; frame::HEAD]);
            let count = log.copy(self.sent, most, batch)?;
            let head = frame::data_head(self.channel, count);
            batch[start..start + frame::HEAD].copy_from_slice(&head);
            self.sent += count as u64;
        }
        Ok(self.sent >= end)
    }
}
