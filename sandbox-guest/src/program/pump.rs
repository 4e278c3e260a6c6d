//! One task for each process: moves its bytes, enforces its time, and settles its outcome.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::io::{Errno, ioctl_fionread, read, write};
use sandbox_guest::{ExitStatus, Output, ProcessExit, Start};
use tokio::{io::Interest, io::unix::AsyncFd, time::Instant};

use super::{
    base::{failure, lock},
    guest::Guest,
    kill,
    process::Process,
    spawn::{self, Ends, explain},
    supervisor::{Begun, Ended, Stage},
    sys,
};

/// How much is read at once.
const CHUNK: usize = 64 * 1024;

/// How much a terminal may have to say after its process's end.
const TERMINAL_REST: usize = 1024 * 1024;

/// A process's pipes, and what was heard from its supervisor.
struct Pump {
    guest: Arc<Guest>,
    process: Arc<Process>,
    status: AsyncFd<OwnedFd>,
    stdin: Option<AsyncFd<OwnedFd>>,
    stdout: Option<AsyncFd<OwnedFd>>,
    stderr: Option<AsyncFd<OwnedFd>>,
    terminal: bool,
    /// What the supervisor said of the end; the error is that it cannot say any more.
    ended: Option<Result<Ended, ()>>,
    words: Vec<u8>,
    buffer: Vec<u8>,
    /// When its time is over.
    deadline: Option<Instant>,
}

/// Runs a process to its end, and its descendants' output after it.
pub(crate) async fn run(guest: Arc<Guest>, process: Arc<Process>, ends: Ends, start: Box<Start>) {
    let mut pump = match Pump::new(Arc::clone(&guest), Arc::clone(&process), ends, &start) {
        Ok(pump) => pump,
        Err(error) => {
            let _ = kill::tree(&guest, &process).await;
            let failure = super::base::system("cannot watch a process", &error);
            return refuse(&guest, &process, failure);
        }
    };
    match pump.begin().await {
        Some(begun) if begun.stage == Stage::Started => {
            process.state().begun = Some(Ok(begun.pid));
            process.announce();
        }
        Some(begun) => return refuse(&guest, &process, explain(&guest, &start, begun)),
        None => {
            let message = "its supervisor was killed before it began";
            let kind = sandbox_guest::FailureKind::System;
            // By what it had started already, perhaps.
            let _ = kill::tree(&guest, &process).await;
            let _ = kill::orphans_of(&guest, process.supervisor).await;
            return refuse(&guest, &process, failure(kind, message));
        }
    }
    let is_session = start.shell;
    drop(start);
    pump.until_end().await;
    if is_session {
        // What its commands left running is the session's.
        let _ = kill::tree(&guest, &process).await;
    }
    pump.settle().await;
    pump.buffer = Vec::new();
    pump.after_end().await;
}

fn refuse(guest: &Guest, process: &Arc<Process>, failure: sandbox_guest::Failure) {
    lock(&guest.table).discard(process);
    process.state().begun = Some(Err(failure));
    process.announce();
}

impl Pump {
    fn new(
        guest: Arc<Guest>,
        process: Arc<Process>,
        ends: Ends,
        start: &Start,
    ) -> io::Result<Self> {
        let deadline = start.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        Ok(Self {
            guest,
            process,
            status: watch(ends.status, Interest::READABLE)?,
            stdin: ends.stdin.map(|fd| watch(fd, Interest::WRITABLE)).transpose()?,
            stdout: Some(watch(ends.stdout, Interest::READABLE)?),
            stderr: ends.stderr.map(|fd| watch(fd, Interest::READABLE)).transpose()?,
            terminal: ends.terminal,
            ended: None,
            words: Vec::new(),
            buffer: Vec::new(),
            deadline,
        })
    }

    /// What the supervisor says first.
    async fn begin(&mut self) -> Option<Begun> {
        loop {
            if let Some(words) = self.words.first_chunk() {
                let begun = Begun::decode(words);
                self.words.drain(..Begun::SIZE);
                self.hear();
                return Some(begun);
            }
            let more = listen(&self.status, &mut self.words).await;
            if !matches!(more, Ok(1..)) {
                return None;
            }
        }
    }

    /// Understands what the supervisor said of the end, if it did.
    fn hear(&mut self) {
        if let Some(words) = self.words.first_chunk() {
            self.ended = Some(Ok(Ended::decode(words)));
        }
    }

    /// Moves bytes until the process has ended, and no kill of its tree is under way.
    async fn until_end(&mut self) {
        loop {
            let (out_room, err_room, killing) = {
                let state = self.process.state();
                (state.stdout.room(), state.stderr.room(), state.killers > 0)
            };
            if self.ended.is_some() && !killing {
                return;
            }
            self.feed();
            let feeding = !self.process.state().stdin.next().is_empty();
            let most = |room: u64| room.min(CHUNK as u64) as usize;
            let (one, two) = (most(out_room), most(err_room));
            tokio::select! {
                more = listen(&self.status, &mut self.words), if self.ended.is_none() => {
                    if matches!(more, Ok(1..)) {
                        self.hear();
                    } else {
                        self.ended = Some(Err(()));
                    }
                }
                () = ready(self.stdout.as_ref(), Interest::READABLE), if one > 0 => {
                    self.take(false, one);
                }
                () = ready(self.stderr.as_ref(), Interest::READABLE), if two > 0 => {
                    self.take(true, two);
                }
                () = ready(self.stdin.as_ref(), Interest::WRITABLE), if feeding => {}
                () = self.process.wake.notified() => {}
                () = sleep_until(self.deadline) => {
                    self.deadline = None;
                    self.time_out();
                }
            }
        }
    }

    fn time_out(&self) {
        let (guest, process) = (Arc::clone(&self.guest), Arc::clone(&self.process));
        // Counted here, so that the end is not settled before the kill has begun.
        process.state().killers += 1;
        tokio::spawn(async move {
            let _ = kill::because(&guest, &process, ExitStatus::TimedOut).await;
            process.state().killers -= 1;
            process.wake.notify_one();
        });
    }

    /// Reads once from a channel, if the runtime thinks that something is there.
    fn take(&mut self, err: bool, most: usize) {
        // Many processes say nothing.
        self.buffer.resize(CHUNK, 0);
        let Some(fd) = (if err { &self.stderr } else { &self.stdout }) else { return };
        let count = fd.try_io(Interest::READABLE, |fd| read_some(fd, &mut self.buffer[..most]));
        self.took(err, &count);
    }

    /// Notes what a read gave: how much, 0 at the channel's end, or `None` if nothing was there.
    fn took(&mut self, err: bool, count: &io::Result<usize>) -> Option<usize> {
        let source = if err { &mut self.stderr } else { &mut self.stdout };
        match *count {
            Ok(0) => {
                *source = None;
                Some(0)
            }
            Ok(count) => {
                let mut state = self.process.state();
                let log = if err { &mut state.stderr } else { &mut state.stdout };
                log.push(&self.buffer[..count]);
                drop(state);
                self.process.announce();
                Some(count)
            }
            Err(_) => None,
        }
    }

    /// Gives the process what waits for it.
    fn feed(&mut self) {
        let mut state = self.process.state();
        if let (Some(size), Some(stdin)) = (state.resize.take(), &self.stdin)
            && self.terminal
        {
            let _ = spawn::resize(stdin, size);
        }
        let before = state.stdin.taken();
        while let Some(stdin) = &self.stdin {
            if state.stdin.next().is_empty() {
                break;
            }
            let written = stdin.try_io(Interest::WRITABLE, |fd| Ok(write(fd, state.stdin.next())?));
            match written {
                Ok(count) => state.stdin.written(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    state.stdin.close();
                    self.stdin = None;
                }
            }
        }
        if state.stdin.is_done() {
            if self.terminal {
                if let Some(stdin) = &self.stdin
                    && state.stdin.needs_end_character()
                {
                    end_of_file(stdin);
                }
            } else {
                self.stdin = None;
            }
        }
        let moved = state.stdin.taken() != before;
        drop(state);
        if moved {
            self.process.announce();
        }
    }

    /// Takes what the process had written at its end, and makes the outcome known.
    async fn settle(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = vec![0; CHUNK];
        }
        if matches!(self.ended, Some(Err(()))) {
            let _ = kill::orphans_of(&self.guest, self.process.supervisor).await;
        }
        let out_open = self.drain(false);
        let err_open = self.drain(true);
        let (status, cpu_us, max_memory) = match self.ended {
            Some(Ok(ended)) => (self.judge(ended.status), ended.cpu_us, ended.max_memory),
            _ => (ExitStatus::Unknown, 0, 0),
        };
        let mut state = self.process.state();
        state.exit = Some(ProcessExit {
            // What ended by itself before the kill reached it was not killed.
            status: match (state.verdict, status) {
                (Some(verdict), ExitStatus::Signaled(libc::SIGKILL) | ExitStatus::Unknown) => {
                    verdict
                }
                _ => status,
            },
            stdout: state.stdout.end(),
            stderr: state.stderr.end(),
            output_open: out_open || err_open,
            duration_us: self.process.started.elapsed().as_micros() as u64,
            cpu_us,
            max_memory,
        });
        state.stdin.close();
        drop(state);
        self.stdin = None;
        self.guest.touch();
        lock(&self.guest.table).ended(&self.process);
        self.process.announce();
    }

    fn judge(&self, status: i32) -> ExitStatus {
        let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
        let alone = lock(&self.guest.table).running() <= 1;
        let out_of_memory = lock(&self.guest.oom).was_it(killed, alone);
        if libc::WIFEXITED(status) {
            ExitStatus::Exited(libc::WEXITSTATUS(status))
        } else if out_of_memory {
            ExitStatus::OutOfMemory
        } else {
            ExitStatus::Signaled(libc::WTERMSIG(status))
        }
    }

    /// Reads what is there now, also beyond the window: a pipe holds little. Whether it is still open.
    fn drain(&mut self, err: bool) -> bool {
        let source = if err { &self.stderr } else { &self.stdout };
        let Some(fd) = source else { return false };
        let mut rest = if self.terminal {
            TERMINAL_REST
        } else {
            ioctl_fionread(fd).map_or(0, |count| count as usize)
        };
        // Reads once more than there is, to tell the end from a pause.
        loop {
            let Some(fd) = (if err { &self.stderr } else { &self.stdout }) else { return false };
            // Asks the kernel, not the runtime, which may not have heard yet.
            let count = read_some(fd.get_ref(), &mut self.buffer[..rest.clamp(1, CHUNK)]);
            match self.took(err, &count) {
                Some(0) => return false,
                Some(count) if count < rest => rest -= count,
                Some(_) if rest > 0 => rest = 0,
                Some(_) | None => return true,
            }
        }
    }

    /// Goes on emptying the pipes for what the process left behind, which must neither block nor die
    /// of a broken pipe. What is kept is kept.
    async fn after_end(&mut self) {
        let keep = matches!(self.process.output, Output::Keep { .. });
        while self.stdout.is_some() || self.stderr.is_some() {
            let err = tokio::select! {
                () = ready(self.stdout.as_ref(), Interest::READABLE) => false,
                () = ready(self.stderr.as_ref(), Interest::READABLE) => true,
            };
            if self.buffer.is_empty() {
                self.buffer = vec![0; 4096];
            }
            if keep {
                self.take(err, 4096);
                continue;
            }
            let source = if err { &mut self.stderr } else { &mut self.stdout };
            let Some(fd) = source else { continue };
            let count = fd.try_io(Interest::READABLE, |fd| read_some(fd, &mut self.buffer));
            if matches!(count, Ok(0)) {
                *source = None;
            }
        }
    }
}

fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    sys::watch(fd, interest)
}

/// Reads what is there; 0 is the end, which a terminal calls an error.
fn read_some(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    match read(fd, &mut *buffer) {
        Err(Errno::AGAIN) => Err(io::ErrorKind::WouldBlock.into()),
        Err(Errno::INTR) => Err(io::ErrorKind::Interrupted.into()),
        Err(_) => Ok(0),
        Ok(count) => Ok(count),
    }
}

/// Waits until something can be done; for ever if there is nothing to wait for.
async fn ready(fd: Option<&AsyncFd<OwnedFd>>, interest: Interest) {
    let Some(fd) = fd else { return std::future::pending().await };
    if let Ok(mut guard) = fd.ready(interest).await {
        guard.retain_ready();
    }
}

async fn listen(fd: &AsyncFd<OwnedFd>, words: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = [0; 64];
    let count = fd.async_io(Interest::READABLE, |fd| Ok(read(fd, &mut buffer)?)).await?;
    words.extend_from_slice(&buffer[..count]);
    Ok(count)
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Types the end-of-file character, where the terminal understands it.
fn end_of_file(master: impl AsFd) {
    use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
    let Ok(modes) = tcgetattr(&master) else { return };
    if modes.local_modes.contains(LocalModes::ICANON) {
        let _ = write(&master, &[modes.special_codes[SpecialCodeIndex::VEOF]]);
    }
}
