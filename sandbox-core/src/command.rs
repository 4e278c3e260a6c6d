//! What to run: a mirror of [`std::process::Command`].

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_guest::{Bytes, DEFAULT_WINDOW, MAX_KEPT_OUTPUT, Output, PtySize, Start};
use serde::{Deserialize, Serialize};

use crate::{
    Error, ErrorKind, ProcessId, Result,
    secret::{self, Secret, Secrets},
};

/// How much of each output stream a [`Run`](crate::Run) keeps if nobody says otherwise, in bytes.
pub const DEFAULT_OUTPUT_LIMIT: usize = 1024 * 1024;

/// How much of each output stream of a detached command is kept in the sandbox if nobody says otherwise,
/// in bytes.
pub const DEFAULT_KEPT_OUTPUT: u64 = 16 * 1024 * 1024;

/// How much input a detached command can be given, in bytes.
const MAX_DETACHED_INPUT: usize = DEFAULT_WINDOW as usize;

/// How long a key may be, in bytes.
const MAX_KEY: usize = 256;

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
    secrets: Vec<EnvSecret>,
    env_clear: bool,
    cwd: Option<PathBuf>,
    user: Option<String>,
    stdin: Stdin,
    pty: Option<TerminalSize>,
    timeout: Option<Duration>,
    output_limit: usize,
    is_shell: bool,
    detached: bool,
    kept_output: u64,
    key: Option<String>,
    limits: ProcessLimits,
}

/// Limits of one process and, each for itself, of what it starts; on top of the sandbox's own, which hold
/// for all of it together. What is not given is not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessLimits {
    /// Address space, in bytes. What asks for more gets none.
    pub address_space: Option<u64>,
    /// CPU time, in seconds. What needs more is ended by SIGXCPU or, a second later, by SIGKILL.
    pub cpu_seconds: Option<u64>,
    /// How many files may be open at once.
    pub open_files: Option<u64>,
    /// The size of a file that it writes, in bytes. What writes more is ended by SIGXFSZ.
    pub file_size: Option<u64>,
    /// The size of a core dump, in bytes; 0 if it is not given.
    pub core_size: Option<u64>,
}

/// A secret that a process gets in its environment.
#[derive(Debug, Clone)]
struct EnvSecret {
    key: OsString,
    reference: String,
    /// Looked up when the process is about to start.
    value: Option<Secret>,
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
            secrets: Vec::new(),
            env_clear: false,
            cwd: None,
            user: None,
            stdin: Stdin::Null,
            pty: None,
            timeout: None,
            output_limit: DEFAULT_OUTPUT_LIMIT,
            is_shell: false,
            detached: false,
            kept_output: DEFAULT_KEPT_OUTPUT,
            key: None,
            limits: ProcessLimits::default(),
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

    /// Set an environment variable to the secret of this name, which the manager's
    /// [`Secrets`](crate::Secrets) look up just before the process starts. The value reaches this process
    /// and what it starts, and is in no history, event or argument.
    #[must_use]
    pub fn env_secret(mut self, key: impl AsRef<OsStr>, reference: impl Into<String>) -> Self {
        let (key, reference) = (key.as_ref().to_owned(), reference.into());
        self.secrets.push(EnvSecret { key, reference, value: None });
        self
    }

    /// Begin with an empty environment instead of the sandbox's.
    #[must_use]
    pub fn env_clear(mut self) -> Self {
        self.env.clear();
        self.secrets.clear();
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

    /// Let it go on when nobody holds it or is connected, this harness's end included; for
    /// [`Sandbox::spawn`](crate::Sandbox::spawn). [`Sandbox::process`](crate::Sandbox::process) finds it
    /// again, from any manager of this state directory.
    ///
    /// Its output is kept in the sandbox: the guest has it in a file without a name on the sandbox's disk
    /// (the first 256 KiB, and all of it where the filesystem has no such files, in its memory), which
    /// nothing else inside can open and no snapshot carries. It is never held up for want of a reader; the
    /// newest [`kept_output`](Self::kept_output) bytes of each stream stay. It ends with the sandbox's
    /// instance (a rewind, a stop), and its outcome is then `Lost`.
    ///
    /// Its input can be up to 1 MiB of bytes; more can be put into a file first.
    #[must_use]
    pub fn detached(mut self) -> Self {
        self.detached = true;
        self
    }

    /// Keep so many bytes of each of a detached command's output streams, the newest: 16 MiB if this is not
    /// called, 1 GiB at most.
    #[must_use]
    pub fn kept_output(mut self, bytes: u64) -> Self {
        self.kept_output = bytes;
        self
    }

    /// Start one process for this key, however often, and from however many managers, it is asked for: the
    /// others get that process, also once it has ended. For detached commands. A key stands for one process
    /// as long as the sandbox's processes live: after a rewind or a stop it is free again, and so it is if
    /// the command could not be started.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Limit what it may use.
    #[must_use]
    pub fn limits(mut self, limits: ProcessLimits) -> Self {
        self.limits = limits;
        self
    }

    pub(crate) fn is_detached(&self) -> bool {
        self.detached
    }

    pub(crate) fn get_key(&self) -> Option<&str> {
        self.key.as_deref()
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

    /// Looks its secrets up.
    pub(crate) async fn look_up(&mut self, secrets: &dyn Secrets) -> Result<()> {
        for wanted in &mut self.secrets {
            wanted.value = Some(secret::resolve(secrets, &wanted.reference).await?);
        }
        Ok(())
    }

    /// The same, with these secrets under their own names.
    #[must_use]
    pub(crate) fn secrets_resolved(mut self, secrets: &[(String, Secret)]) -> Self {
        self.secrets.extend(secrets.iter().map(|(reference, value)| EnvSecret {
            key: reference.into(),
            reference: reference.clone(),
            value: Some(value.clone()),
        }));
        self
    }

    /// The secrets as environment variables.
    fn secret_env(&self) -> Result<Vec<(Bytes, Bytes)>> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidSpec, "exec", message);
        let pair = |secret: &EnvSecret| {
            let EnvSecret { key, reference, value } = secret;
            if key.is_empty() || key.as_bytes().iter().any(|byte| matches!(byte, 0 | b'=')) {
                return Err(invalid(format!("{key:?} cannot be an environment variable")));
            }
            let Some(value) = value else {
                return Err(invalid(format!("the secret {reference} was not looked up")));
            };
            if value.expose().contains(&0) {
                let message =
                    format!("the secret {reference} has a NUL byte, which no variable can");
                return Err(invalid(message));
            }
            Ok((Bytes::from(key.as_bytes()), Bytes::from(value.expose())))
        };
        self.secrets.iter().map(pair).collect()
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
        self.check_detached().map_err(invalid)?;
        let limits = sandbox_guest::ProcessLimits {
            address_space: self.limits.address_space,
            cpu_seconds: self.limits.cpu_seconds,
            open_files: self.limits.open_files,
            file_size: self.limits.file_size,
            core_size: self.limits.core_size,
        };
        let bytes = |text: &OsString| Bytes::from(text.as_bytes().to_vec());
        let mut env: Vec<_> =
            self.env.iter().map(|(key, value)| (bytes(key), bytes(value))).collect();
        env.extend(self.secret_env()?);
        Ok(Start {
            id: id.to_string(),
            program: bytes(&self.program),
            args: self.args.iter().map(bytes).collect(),
            env,
            env_clear: self.env_clear,
            cwd: self.cwd.as_ref().map(|cwd| bytes(&cwd.clone().into_os_string())),
            user: self.user.clone(),
            stdin: !matches!(self.stdin, Stdin::Null),
            pty: self.pty.map(|size| PtySize { rows: size.rows, cols: size.cols }),
            output: if self.detached {
                Output::Keep { limit: self.kept_output }
            } else {
                Output::Stream
            },
            detached: self.detached,
            shell: self.is_shell,
            timeout_ms: self
                .timeout
                .map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
            limits,
            ..Start::default()
        })
    }

    fn check_detached(&self) -> Result<(), String> {
        if let Some(key) = &self.key {
            if !self.detached {
                return Err(
                    "a key is for detached commands: others are their caller's alone".into()
                );
            }
            if key.is_empty() || key.len() > MAX_KEY {
                return Err(format!("a key has 1 to {MAX_KEY} bytes, not {}", key.len()));
            }
        }
        if !self.detached {
            return Ok(());
        }
        if self.kept_output > MAX_KEPT_OUTPUT {
            let kept = self.kept_output;
            return Err(format!("at most {MAX_KEPT_OUTPUT} bytes of output are kept, not {kept}"));
        }
        match &self.stdin {
            Stdin::Piped => {
                Err("a detached command has no piped input, as its harness may go; give \
                                 it bytes or a file"
                    .into())
            }
            Stdin::Bytes(bytes) if bytes.len() > MAX_DETACHED_INPUT => Err(format!(
                "a detached command's input measures at most {MAX_DETACHED_INPUT} bytes; put more \
                 into a file"
            )),
            Stdin::Bytes(_) | Stdin::Null => Ok(()),
        }
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
            (Command::new("x").key("k"), "for detached commands"),
            (Command::new("x").detached().key(""), "1 to 256 bytes"),
            (Command::new("x").detached().kept_output(u64::MAX), "bytes of output are kept"),
            (Command::new("x").detached().stdin_piped(), "no piped input"),
            (Command::new("x").detached().stdin(vec![0; (1 << 20) + 1]), "into a file"),
        ] {
            let error = command.to_start(&id).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[tokio::test]
    async fn a_secret_is_looked_up_and_never_shown() {
        let id = ProcessId::new();
        let mut command = Command::new("x").env_secret("TOKEN", "PATH");
        let error = command.to_start(&id).unwrap_err();
        assert!(error.to_string().contains("PATH was not looked up"), "{error}");
        command.look_up(&crate::EnvSecrets).await.unwrap();
        let value = std::env::var("PATH").unwrap();
        assert!(!format!("{command:?}").contains(&value));
        assert!(!command.argv().iter().any(|word| word.contains(&value)));
        let start = command.to_start(&id).unwrap();
        assert_eq!(start.env, [(Bytes::from(&b"TOKEN"[..]), Bytes::from(value.as_bytes()))]);
    }

    #[test]
    fn arguments_are_passed_as_they_are() {
        let start =
            Command::new("-x").args(["", "a b", "$HOME", "'\n\""]).to_start(&ProcessId::new());
        let args: Vec<Vec<u8>> = start.unwrap().args.into_iter().map(Bytes::into_vec).collect();
        assert_eq!(args, [&b""[..], b"a b", b"$HOME", b"'\n\""]);
    }
}
