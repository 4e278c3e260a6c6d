//! What to run: a mirror of [`std::process::Command`].

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_guest::{Bytes, Output, PtySize, Start};

use crate::{Error, ErrorKind, ProcessId, Result};

/// How much of each output stream a [`Run`](crate::Run) keeps if nobody says otherwise, in bytes.
pub const DEFAULT_OUTPUT_LIMIT: usize = 1024 * 1024;

/// A program to run in a sandbox, with its arguments and surroundings.
///
/// ```
/// use std::time::Duration;
/// use sandbox_core::Command;
///
/// let command = Command::new("cargo").args(["test", "--workspace"]).timeout(Duration::from_secs(300));
/// ```
///
/// There is no shell between you and the program; [`Command::shell`] is the marked way to have one.
#[derive(Debug, Clone)]
pub struct Command {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    env_clear: bool,
    cwd: Option<PathBuf>,
    user: Option<String>,
    stdin: Stdin,
    pty: Option<TerminalSize>,
    timeout: Option<Duration>,
    output_limit: usize,
    is_shell: bool,
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// What a process reads from.
#[derive(Debug, Clone, Default)]
pub(crate) enum Stdin {
    #[default]
    Null,
    Bytes(Vec<u8>),
    Piped,
}

impl Command {
    /// This program: a path, or a name to be found in the sandbox's `PATH`.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            env_clear: false,
            cwd: None,
            user: None,
            stdin: Stdin::Null,
            pty: None,
            timeout: None,
            output_limit: DEFAULT_OUTPUT_LIMIT,
            is_shell: false,
        }
    }

    /// A shell that runs this text: `/bin/sh -c`. Whoever puts other people's words into the text lets
    /// them run what they like, inside.
    pub fn shell(text: impl AsRef<OsStr>) -> Self {
        Self::new("/bin/sh").arg("-c").arg(text)
    }

    /// One argument more, passed as it is.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Set an environment variable. It is passed to this process alone and is not in the history.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Begin with an empty environment instead of the sandbox's.
    #[must_use]
    pub fn env_clear(mut self) -> Self {
        self.env.clear();
        self.env_clear = true;
        self
    }

    /// Run in this directory; relative ones begin at the workspace, which is also the default.
    #[must_use]
    pub fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.cwd = Some(dir.as_ref().to_owned());
        self
    }

    /// Run as this user of the sandbox: a name or number, and after a colon a group's. Backends whose
    /// sandboxes have one user only refuse others.
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Give it these bytes to read. Without this it reads from `/dev/null`.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Stdin::Bytes(bytes.into());
        self
    }

    /// Give it a pipe to read from, to be written to through [`Process::write_stdin`].
    ///
    /// [`Process::write_stdin`]: crate::Process::write_stdin
    #[must_use]
    pub fn stdin_piped(mut self) -> Self {
        self.stdin = Stdin::Piped;
        self
    }

    /// Run it on a terminal of this size. Its output, errors too, is then standard output.
    #[must_use]
    pub fn pty(mut self, size: TerminalSize) -> Self {
        self.pty = Some(size);
        self
    }

    /// Kill its whole tree after this time. The outcome is then
    /// [`TimedOut`](crate::Outcome::TimedOut), with what it had said until then.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Keep so many bytes of each output stream in the [`Run`](crate::Run): the first and the last half
    /// of them. The process is not held up or killed for saying more.
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output_limit = bytes;
        self
    }

    /// The program is a shell, to be kept for a session.
    pub(crate) fn into_shell(mut self) -> Self {
        self.is_shell = true;
        self
    }

    pub(crate) fn capture_limit(&self) -> usize {
        self.output_limit
    }

    pub(crate) fn take_stdin(&mut self) -> Stdin {
        std::mem::take(&mut self.stdin)
    }

    /// Program and arguments as the history has them.
    pub(crate) fn argv(&self) -> Vec<String> {
        std::iter::once(&self.program)
            .chain(&self.args)
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    pub(crate) fn to_start(&self, id: &ProcessId) -> Result<Start> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidSpec, "exec", message);
        if self.program.is_empty() {
            return Err(invalid("the program's name is empty".into()));
        }
        let words = std::iter::once(&self.program).chain(&self.args);
        let pairs = self.env.iter().flat_map(|(key, value)| [key, value]);
        if let Some(bad) = words.chain(pairs).find(|word| word.as_bytes().contains(&0)) {
            return Err(invalid(format!("{bad:?} has a NUL byte, which no argument can")));
        }
        if let Some((bad, _)) =
            self.env.iter().find(|(key, _)| key.is_empty() || key.as_bytes().contains(&b'='))
        {
            return Err(invalid(format!("{bad:?} cannot be an environment variable")));
        }
        if self.pty.is_some_and(|size| size.rows == 0 || size.cols == 0) {
            return Err(invalid("a terminal has at least one row and one column".into()));
        }
        let bytes = |text: &OsString| Bytes::from(text.as_bytes().to_vec());
        Ok(Start {
            id: id.to_string(),
            program: bytes(&self.program),
            args: self.args.iter().map(bytes).collect(),
            env: self.env.iter().map(|(key, value)| (bytes(key), bytes(value))).collect(),
            env_clear: self.env_clear,
            cwd: self.cwd.as_ref().map(|cwd| bytes(&cwd.clone().into_os_string())),
            user: self.user.clone(),
            stdin: !matches!(self.stdin, Stdin::Null),
            pty: self.pty.map(|size| PtySize { rows: size.rows, cols: size.cols }),
            output: Output::Stream,
            shell: self.is_shell,
            timeout_ms: self
                .timeout
                .map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
            ..Start::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_run_is_refused_with_the_reason() {
        let id = ProcessId::new();
        for (command, says) in [
            (Command::new(""), "name is empty"),
            (Command::new("x").arg("a\0b"), "NUL byte"),
            (Command::new("x").env("A=B", "c"), "environment variable"),
            (Command::new("x").pty(TerminalSize { rows: 0, cols: 80 }), "at least one row"),
        ] {
            let error = command.to_start(&id).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn arguments_are_passed_as_they_are() {
        let start =
            Command::new("-x").args(["", "a b", "$HOME", "'\n\""]).to_start(&ProcessId::new());
        let args: Vec<Vec<u8>> = start.unwrap().args.into_iter().map(Bytes::into_vec).collect();
        assert_eq!(args, [&b""[..], b"a b", b"$HOME", b"'\n\""]);
    }
}
