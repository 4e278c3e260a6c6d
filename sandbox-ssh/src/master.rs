//! A connection to a host: an `ssh` process of ours that other sessions go through.
//!
//! It is no background process. Its own session waits for the end of its input, which is a pipe that only
//! this process has: so the connection ends when it is dropped, and also when this process is killed.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use openssh::Session;
use rustix::process::{Pid, Signal, getuid, kill_process};
use sandbox_core::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::{Semaphore, oneshot, watch},
};

use crate::{address::Address, refused, script, settings::Settings};

/// How many sessions go through one connection, beside its own: OpenSSH's servers allow ten unless they
/// are told otherwise.
pub(crate) const SESSIONS: usize = 8;
/// How much an account's shell may say before the first command of ours does.
const NOISE: u64 = 256 * 1024;
/// How long an `ssh` that was told to end may take.
const AFTERMATH: Duration = Duration::from_secs(2);
const OPERATION: &str = "connect to the host";

/// What a host is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) system: String,
    pub(crate) architecture: String,
    /// The account's cache directory.
    pub(crate) cache: String,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Master {
    /// Its name, to the host too.
    pub(crate) id: String,
    pub(crate) facts: Facts,
    pub(crate) session: Arc<Session>,
    pub(crate) sessions: Arc<Semaphore>,
    /// Whether it had a session beside its own.
    pub(crate) opened: AtomicBool,
    ended: watch::Receiver<bool>,
    /// Dropping it ends the connection.
    _stop: oneshot::Sender<()>,
}

impl Master {
    /// Connects.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` if the host's key is not the known one, or it does not let us in; `Unavailable`
    /// if it cannot be reached.
    pub(crate) async fn connect(settings: &Settings, host: &Address) -> Result<Self> {
        let id = uuid::Uuid::now_v7().simple().to_string();
        let socket = socket(&id)?;
        let mut child = start(settings, host, &socket)?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            return Err(Error::new(ErrorKind::Backend, OPERATION, "ssh has no pipes"));
        };
        let said = tokio::spawn(tail(stderr));
        let facts = tokio::time::timeout(settings.connect_timeout, facts(stdout)).await;
        let facts = match facts {
            Ok(Ok(facts)) => facts,
            Ok(Err(_)) => {
                let _ = tokio::time::timeout(AFTERMATH, child.wait()).await;
                let _ = child.start_kill();
                let said = tokio::time::timeout(AFTERMATH, said).await;
                let said = said.ok().and_then(Result::ok).unwrap_or_default();
                return Err(refused::explain(settings, host, &said).await);
            }
            Err(_) => {
                let message =
                    format!("{host} did not answer within {:?}", settings.connect_timeout);
                return Err(Error::new(ErrorKind::Unavailable, OPERATION, message));
            }
        };
        let session = Arc::new(Session::resume_mux(socket.clone().into(), None));
        let (tell, ended) = watch::channel(false);
        let (stop, stopped) = oneshot::channel();
        tokio::spawn(look_after(child, stdin, socket, stopped, tell));
        let sessions = Arc::new(Semaphore::new(SESSIONS));
        let opened = AtomicBool::new(false);
        Ok(Self { id, facts, session, sessions, opened, ended, _stop: stop })
    }

    /// Whether it has ended.
    pub(crate) fn is_dead(&self) -> bool {
        *self.ended.borrow()
    }

    /// Waits for its end.
    pub(crate) async fn ended(&self) {
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }
}

/// Keeps the process until it ends, or shall.
async fn look_after(
    mut child: Child,
    stdin: ChildStdin,
    socket: PathBuf,
    stopped: oneshot::Receiver<()>,
    tell: watch::Sender<bool>,
) {
    let stop = tokio::select! {
        _ = child.wait() => false,
        _ = stopped => true,
    };
    if stop {
        drop(stdin);
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
        if tokio::time::timeout(AFTERMATH, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
    }
    let _ = fs::remove_file(socket);
    let _ = tell.send(true);
}

fn start(settings: &Settings, host: &Address, socket: &Path) -> Result<Child> {
    let mut ssh = Command::new(&settings.program);
    ssh.args(arguments(settings, host, socket));
    ssh.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Signals of the harness's terminal are not for it.
    ssh.process_group(0).kill_on_drop(true);
    ssh.spawn().map_err(|error| {
        let message = format!(
            "the program {} cannot be run; install the OpenSSH client",
            settings.program.display()
        );
        Error::new(ErrorKind::Unavailable, OPERATION, message).with_source(error).retryable(false)
    })
}

/// The arguments of `ssh`. What is said here is not what the user's configuration says.
pub(crate) fn arguments(
    settings: &Settings,
    host: &Address,
    socket: &Path,
) -> Vec<std::ffi::OsString> {
    let mut line: Vec<std::ffi::OsString> = Vec::new();
    if let Some(file) = &settings.config_file {
        line.extend(["-F".into(), file.into()]);
    }
    let mut control = std::ffi::OsString::from("ControlPath=");
    control.push(socket);
    let (interval, count) = settings.keep_alive;
    let interval = format!("ServerAliveInterval={}", interval.as_secs());
    let count = format!("ServerAliveCountMax={count}");
    let timeout = format!("ConnectTimeout={}", settings.connect_timeout.as_secs().max(1));
    let mut options: Vec<std::ffi::OsString> = vec!["ControlMaster=yes".into(), control];
    options.extend(
        [
            "ControlPersist=no",
            "BatchMode=yes",
            &interval,
            &count,
            &timeout,
            "ForwardAgent=no",
            "ForwardX11=no",
            "ClearAllForwardings=yes",
            "PermitLocalCommand=no",
            "RemoteCommand=none",
            "RequestTTY=no",
            "SessionType=default",
            "StdinNull=no",
            "ForkAfterAuthentication=no",
            "EscapeChar=none",
            "Tunnel=no",
        ]
        .map(Into::into),
    );
    if !settings.host_keys_as_configured {
        options.push("StrictHostKeyChecking=yes".into());
    }
    for option in options {
        line.extend(["-o".into(), option]);
    }
    line.extend(["-T".into(), "--".into(), host.as_str().into(), script::anchor().into()]);
    line
}

/// Reads what the host says of itself; then the connection stands.
async fn facts(from: impl AsyncRead + Unpin) -> io::Result<Facts> {
    let mut lines = BufReader::new(from).take(NOISE).lines();
    let mut next = async || lines.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof.into());
    let mut line: io::Result<String> = next().await;
    while line? != "sandbox-anchor" {
        line = next().await;
    }
    let (system, architecture) = (next().await?, next().await?);
    let (home, cache) = (next().await?, next().await?);
    let cache = if cache.starts_with('/') { cache } else { format!("{home}/.cache") };
    if next().await? != "sandbox-anchored" {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Facts { system, architecture, cache })
}

/// The last that was said.
async fn tail(mut from: impl AsyncRead + Unpin) -> Vec<u8> {
    const MOST: usize = 4096;
    let mut kept = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..count]);
        let much = kept.len().saturating_sub(MOST);
        kept.drain(..much);
    }
    kept
}

/// Where a connection listens for sessions. The path of a socket must be short, so that it is not in a
/// directory of the connection's own.
fn socket(id: &str) -> Result<PathBuf> {
    let uid = getuid().as_raw();
    let dir = std::env::temp_dir().join(format!("sandboxer-ssh-{uid}"));
    let failed = |error| Error::io(OPERATION, dir.display().to_string(), error);
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(&dir).map_err(failed)?;
    if !found.is_dir() || found.uid() != uid || found.mode() & 0o077 != 0 {
        let message = format!("{} is not a directory of this user's alone", dir.display());
        return Err(Error::new(ErrorKind::PermissionDenied, OPERATION, message));
    }
    // The end of a UUIDv7 is what is random in it.
    Ok(dir.join(&id[id.len() - 16..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_ssh() {
        let host = Address::parse("me@build1").unwrap();
        let settings = Settings { config_file: Some("/etc/a b".into()), ..Settings::default() };
        let line = arguments(&settings, &host, Path::new("/tmp/s"));
        insta::assert_debug_snapshot!(line);
    }

    #[tokio::test]
    async fn what_a_shell_says_before_does_not_matter() {
        let said = b"Welcome!\nfortune: sandbox\n\nsandbox-anchor\nLinux\nx86_64\n/home/me\n\nsandbox-anchored\n";
        let found = facts(&said[..]).await.unwrap();
        let expected = Facts {
            system: "Linux".into(),
            architecture: "x86_64".into(),
            cache: "/home/me/.cache".into(),
        };
        assert_eq!(found, expected);
        assert!(facts(&said[..60]).await.is_err());
    }
}
