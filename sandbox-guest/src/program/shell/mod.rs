//! The keeper of a shell for a session: the parent of one shell, in which command after command is run.
//!
//! It stands between the harness and the shell because a shell cannot be given new pipes while it runs,
//! but can open those of a process that it may look at. It is an ordinary process of the sandbox, with no
//! more rights than the shell, and believes nothing that it hears from there but what the shell could do
//! as well.

mod pipes;
mod script;

use std::{
    collections::VecDeque,
    ffi::OsString,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    process::{Child, Command, ExitCode, Stdio},
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{PidfdFlags, pidfd_open},
};
use sandbox_guest::{
    ExitStatus, Failure, FailureKind, SHELL_INPUT_WINDOW, ShellDone, ShellEvent, ShellRequest,
    frame::{self, Channel, Decoder, Frame},
};

use self::{
    pipes::{CHUNK, Source, Target},
    script::{Control, Places},
};
use super::{FAILED, base::errno_text, sys, usage};

/// The outputs of so many commands that left something running are emptied; what writes to an older
/// one's finds it closed.
const MAX_LEFT: usize = 128;

/// So much of what the shell says outside of commands is kept.
const MAX_WORDS: usize = 2048;

/// Standard input is left alone while so much of it waits for a command.
const MAX_INPUT: usize = 2 * SHELL_INPUT_WINDOW as usize;

/// Runs a shell, told by standard input, until it ends, and then ends as it did.
pub(crate) fn main(command: &[OsString]) -> ExitCode {
    // This is what the process is called in lists.
    let _ = rustix::thread::set_name(c"shell-keeper");
    let keeper = match Keeper::start(command) {
        Ok(keeper) => keeper,
        Err(failure) => {
            let _ = emit(&ShellEvent::Failed(failure));
            return ExitCode::from(FAILED);
        }
    };
    match keeper.run() {
        Ok(status) => end_like(status),
        // Nobody listens, or nobody can be understood.
        Err(_) => ExitCode::from(FAILED),
    }
}

/// Ends this process as the shell ended.
fn end_like(status: ExitStatus) -> ExitCode {
    match status {
        ExitStatus::Exited(code) => ExitCode::from(code as u8),
        ExitStatus::Signaled(signal) => {
            sys::default_signals();
            let _ = sys::kill(std::process::id() as sys::Pid, signal);
            ExitCode::from((128 + signal) as u8)
        }
        _ => ExitCode::from(FAILED),
    }
}

struct Keeper {
    shell: Child,
    /// Readable when the shell has ended.
    ended: OwnedFd,
    input: Decoder,
    input_open: bool,
    script: Target,
    control: Source,
    heard: Control,
    /// What the shell says outside of commands.
    words: Source,
    last_words: VecDeque<u8>,
    current: Option<Current>,
    /// Outputs of commands that have ended, which something still writes to.
    left: VecDeque<Source>,
    buffer: Vec<u8>,
}

/// The command that runs.
struct Current {
    number: u64,
    nonce: String,
    stdin: Option<Target>,
    /// How much of its input was said to be taken.
    told: u64,
    stdout: Source,
    stderr: Source,
    begun: Instant,
    ticks: u64,
}

/// What can be waited for.
#[derive(Debug, Clone, Copy)]
enum Ready {
    Input,
    Script,
    Control,
    Words,
    Ended,
    Stdin,
    Stdout,
    Stderr,
    Left,
}

impl Keeper {
    fn start(command: &[OsString]) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            let program = command[0].to_string_lossy();
            let kind = match error.kind() {
                io::ErrorKind::NotFound => FailureKind::NotFound,
                io::ErrorKind::PermissionDenied => FailureKind::PermissionDenied,
                _ => FailureKind::System,
            };
            let message = format!("cannot start the shell {program:?}: {}", errno_text(&error));
            Failure { kind, message, errno: error.raw_os_error() }
        };
        Self::try_start(command).map_err(failed)
    }

    fn try_start(command: &[OsString]) -> io::Result<Self> {
        let (script, script_there) = Target::new()?;
        let words = Source::new()?;
        let shell = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::from(script_there))
            .stdout(Stdio::from(words.writer()?))
            .stderr(Stdio::from(words.writer()?))
            .spawn()?;
        let pid = rustix::process::Pid::from_child(&shell);
        Ok(Self {
            ended: pidfd_open(pid, PidfdFlags::empty())?,
            shell,
            input: Decoder::default(),
            input_open: true,
            script,
            control: Source::new()?,
            heard: Control::default(),
            words,
            last_words: VecDeque::new(),
            current: None,
            left: VecDeque::new(),
            buffer: vec![0; CHUNK],
        })
    }

    /// Serves until the shell has ended; returns how.
    fn run(mut self) -> io::Result<ExitStatus> {
        loop {
            for ready in self.wait()? {
                match ready {
                    Ready::Stdout => self.forward(Channel::Out, CHUNK)?,
                    Ready::Stderr => self.forward(Channel::Err, CHUNK)?,
                    Ready::Stdin => self.feed()?,
                    Ready::Script => self.script.flush(),
                    Ready::Words => self.listen(),
                    Ready::Left => self.empty_left(),
                    Ready::Input => self.take_input()?,
                    Ready::Control => self.hear()?,
                    Ready::Ended => return self.shell_ended(),
                }
            }
        }
    }

    /// Waits until something can be done. What was written comes before what tells of an end.
    fn wait(&self) -> io::Result<Vec<Ready>> {
        let mut wanted: Vec<(Ready, BorrowedFd<'_>, PollFlags)> = Vec::new();
        let mut want = |ready, fd, flags| wanted.push((ready, fd, flags));
        if let Some(current) = &self.current {
            want(Ready::Stdout, current.stdout.reader().as_fd(), PollFlags::IN);
            want(Ready::Stderr, current.stderr.reader().as_fd(), PollFlags::IN);
            if let Some(writer) = current.stdin.as_ref().and_then(Target::waits) {
                want(Ready::Stdin, writer.as_fd(), PollFlags::OUT);
            }
        }
        if let Some(writer) = self.script.waits() {
            want(Ready::Script, writer.as_fd(), PollFlags::OUT);
        }
        want(Ready::Words, self.words.reader().as_fd(), PollFlags::IN);
        for left in &self.left {
            want(Ready::Left, left.reader().as_fd(), PollFlags::IN);
        }
        let pending = self.current.as_ref().and_then(|current| current.stdin.as_ref());
        if self.input_open && pending.is_none_or(|stdin| stdin.pending() < MAX_INPUT) {
            want(Ready::Input, rustix::stdio::stdin(), PollFlags::IN);
        }
        want(Ready::Control, self.control.reader().as_fd(), PollFlags::IN);
        want(Ready::Ended, self.ended.as_fd(), PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> =
            wanted.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        match poll(&mut fds, None) {
            // Then nothing is ready.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = wanted.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|((ready, ..), _)| *ready).collect())
    }

    /// Sends what the command wrote, at most so much.
    fn forward(&mut self, channel: Channel, most: usize) -> io::Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let source = if channel == Channel::Err { &current.stderr } else { &current.stdout };
        let mut rest = most;
        while rest > 0 {
            let Some(count @ 1..) = source.read(&mut self.buffer[..rest.min(CHUNK)]) else { break };
            write_all(&frame::data_head(channel, count))?;
            write_all(&self.buffer[..count])?;
            rest -= count;
        }
        Ok(())
    }

    /// Gives the command what waits for it, and says so.
    fn feed(&mut self) -> io::Result<()> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let Some(stdin) = &mut current.stdin else { return Ok(()) };
        stdin.flush();
        if stdin.taken() > current.told {
            current.told = stdin.taken();
            emit(&ShellEvent::Took { stdin: current.told })?;
        }
        Ok(())
    }

    /// Keeps the last of what the shell says outside of commands.
    fn listen(&mut self) {
        let Some(count) = self.words.read(&mut self.buffer) else { return };
        self.last_words.extend(&self.buffer[..count]);
        let old = self.last_words.len().saturating_sub(MAX_WORDS);
        self.last_words.drain(..old);
    }

    /// Empties the outputs of earlier commands.
    fn empty_left(&mut self) {
        let buffer = &mut self.buffer;
        self.left.retain(|source| source.read(buffer) != Some(0));
    }

    /// Takes what the harness says.
    fn take_input(&mut self) -> io::Result<()> {
        let count = rustix::io::read(rustix::stdio::stdin(), &mut self.buffer)?;
        if count == 0 {
            // The shell ends when it has read its script.
            self.input_open = false;
            self.script.end();
            return Ok(());
        }
        self.input.push(&self.buffer[..count]);
        while let Some(frame) = self.input.next_frame()? {
            match frame {
                Frame::Data(Channel::In, bytes) => {
                    let stdin = self.current.as_mut().and_then(|current| current.stdin.as_mut());
                    if let Some(stdin) = stdin {
                        stdin.push(&bytes);
                        self.feed()?;
                    }
                }
                Frame::Data(..) => return Err(io::ErrorKind::InvalidData.into()),
                Frame::Message(message) => match frame::decode(&message)? {
                    ShellRequest::Run { number, text, stdin } => {
                        self.begin(number, &text, stdin)?;
                    }
                    ShellRequest::End => self.end_stdin(),
                    ShellRequest::Stop => self.shell.kill()?,
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                },
            }
        }
        Ok(())
    }

    fn begin(&mut self, number: u64, text: &[u8], stdin: bool) -> io::Result<()> {
        if self.current.is_some() || text.contains(&0) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let stdin = if stdin { Some(Target::named()?) } else { None };
        let (stdout, stderr, nonce) = (Source::new()?, Source::new()?, nonce()?);
        let places = Places {
            process: std::process::id(),
            stdin: stdin.as_ref().and_then(Target::number),
            stdout: stdout.number(),
            stderr: stderr.number(),
            control: self.control.number(),
        };
        self.script.push(&script::script(text, &nonce, places));
        let (begun, ticks) = (Instant::now(), self.ticks());
        self.current =
            Some(Current { number, nonce, stdin, told: 0, stdout, stderr, begun, ticks });
        Ok(())
    }

    fn end_stdin(&mut self) {
        if let Some(stdin) = self.current.as_mut().and_then(|current| current.stdin.as_mut()) {
            stdin.end();
        }
    }

    /// Takes what the shell says of a command's end.
    fn hear(&mut self) -> io::Result<()> {
        let Some(count) = self.control.read(&mut self.buffer) else { return Ok(()) };
        let Some(current) = &self.current else { return Ok(()) };
        match self.heard.hear(&self.buffer[..count], &current.nonce) {
            Some(status) => match self.settle(status)? {
                Some(done) => emit(&ShellEvent::Done(done)),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Sends what the command that has ended had written, and lets go of it.
    fn settle(&mut self, status: i32) -> io::Result<Option<ShellDone>> {
        let Some(current) = &mut self.current else { return Ok(None) };
        let duration_us = current.begun.elapsed().as_micros() as u64;
        current.stdout.close();
        current.stderr.close();
        // What is there now: others may go on writing for ever.
        let waiting = (current.stdout.waiting(), current.stderr.waiting());
        self.forward(Channel::Out, waiting.0)?;
        self.forward(Channel::Err, waiting.1)?;
        let ticks = self.ticks();
        let Some(current) = self.current.take() else { return Ok(None) };
        let mut output_open = false;
        for source in [current.stdout, current.stderr] {
            // The end comes when nobody holds it open any more.
            if source.read(&mut self.buffer) != Some(0) {
                output_open = true;
                self.left.push_back(source);
            }
        }
        while self.left.len() > MAX_LEFT {
            self.left.pop_front();
        }
        let cpu_us = ticks.saturating_sub(current.ticks) * usage::TICK_US;
        Ok(Some(ShellDone { number: current.number, status, output_open, duration_us, cpu_us }))
    }

    fn shell_ended(&mut self) -> io::Result<ExitStatus> {
        // It may have said how its last command went just before.
        self.hear()?;
        self.listen();
        let command = self.settle(0)?;
        let status = self.shell.wait()?;
        let status = match (status.code(), status.signal()) {
            (Some(code), _) => ExitStatus::Exited(code),
            (None, Some(signal)) => ExitStatus::Signaled(signal),
            (None, None) => ExitStatus::Unknown,
        };
        let words = Vec::from(std::mem::take(&mut self.last_words)).into();
        emit(&ShellEvent::Ended { command, status, words })?;
        Ok(status)
    }

    /// CPU time of the shell and of what it waited for.
    fn ticks(&self) -> u64 {
        usage::times(&self.shell.id().to_string()).unwrap_or(0)
    }
}

/// A word that nobody can guess.
fn nonce() -> io::Result<String> {
    let mut bytes = [0; script::NONCE / 2];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn emit(event: &ShellEvent) -> io::Result<()> {
    write_all(&frame::encode(event)?)
}

/// Writes to standard output, waiting for room.
fn write_all(mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
