//! What sandboxes on another host cost, beside what the `ssh` program costs for the same; JSON lines on
//! stdout, each with what was asked for and whether it was met. On a host of `scripts/hosts`.
//!
//! Distance is made here: a relay on this machine holds every byte back for half of it, in both directions,
//! and as many of them at once as there are. The lines say so.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Stdio,
    sync::mpsc::sync_channel,
    time::{Duration, Instant},
};

use sandbox_core::{Command, CreateSandbox, Sandbox, SandboxManager, Suppressed};
use sandbox_examples::{
    Outcome,
    figures::{median, round, succeed, timed},
};
use sandbox_ssh::SshBackend;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SINK: Suppressed = Suppressed;

/// How long a byte takes from one end of the relay to the other.
const ONE_WAY: Duration = Duration::from_millis(10);

/// What is sent for the throughput, in bytes.
const MUCH: u64 = 256 << 20;

#[tokio::main]
async fn main() -> Outcome {
    let quick = std::env::args().any(|argument| argument == "--quick");
    tokio::spawn(measure(quick)).await?
}

async fn measure(quick: bool) -> Outcome {
    let hosts = std::env::var_os("SANDBOX_SSH_HOSTS")
        .ok_or("SANDBOX_SSH_HOSTS is not set: see scripts/hosts")?;
    let hosts = PathBuf::from(hosts);
    // An ordinary account without start-up files of a shell, where this user can have one.
    let name = if hosts.join("home").exists() { "user" } else { "near" };
    let state = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let near = Peer::of(&hosts.join("config"), name, state.path(), name).await?;
    let repeats = if quick { 10 } else { 40 };
    near.round_trips(state.path(), repeats).await?;
    near.throughput(state.path(), repeats.min(10) / 2).await?;
    let relay = relay(SocketAddr::from((Ipv4Addr::LOCALHOST, near.port)))?;
    let config = near.relayed(&hosts.join("config"), relay, state.path())?;
    let far = Peer::of(&config, "relayed", state.path(), name).await?;
    far.distance(state.path(), repeats * 5).await
}

/// A host, and a connection to it that the sessions of `ssh` share.
struct Peer {
    config: PathBuf,
    name: String,
    /// What it is called in the lines.
    label: String,
    port: u16,
    user: String,
    socket: PathBuf,
    /// Ends with this.
    _master: tokio::process::Child,
}

impl Peer {
    async fn of(config: &Path, name: &str, state: &Path, label: &str) -> Outcome<Self> {
        let mut asked = tokio::process::Command::new("ssh");
        let asked = asked.arg("-F").arg(config).args(["-G", name]).output().await?;
        let asked = String::from_utf8(asked.stdout)?;
        let setting = |key: &str| {
            let mut lines = asked.lines();
            let found = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
            found.map(str::to_owned).ok_or_else(|| format!("ssh -G {name} says no {key}"))
        };
        let socket = state.join(name);
        let mut master = tokio::process::Command::new("ssh");
        master.arg("-F").arg(config).args(["-o", "ControlMaster=yes", "-o"]);
        master.arg(format!("ControlPath={}", socket.display())).args(["-N", name]);
        master.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        let peer = Self {
            config: config.to_owned(),
            name: name.to_owned(),
            label: label.to_owned(),
            port: setting("port")?.parse()?,
            user: setting("user")?,
            socket,
            _master: master.spawn()?,
        };
        let begin = Instant::now();
        while succeed(peer.ssh(&["true"])).await.is_err() || !peer.socket.exists() {
            if begin.elapsed() > Duration::from_secs(30) {
                return Err(format!("{name} cannot be connected to").into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(peer)
    }

    /// A session over the shared connection.
    fn ssh(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new("ssh");
        command.arg("-F").arg(&self.config).args(["-o", "ControlMaster=no", "-o"]);
        command.arg(format!("ControlPath={}", self.socket.display()));
        command.arg(&self.name).args(arguments);
        command
    }

    async fn sandbox(&self, state: &Path) -> Outcome<(SandboxManager, Sandbox)> {
        let backend = SshBackend::builder().host(&self.name).config_file(&self.config).build()?;
        let builder = SandboxManager::builder().state_dir(state.join(format!("of-{}", self.name)));
        let manager = builder.backend(backend).build().await?;
        let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
        Ok((manager, sandbox))
    }

    async fn round_trips(&self, state: &Path, repeats: usize) -> Outcome {
        eprintln!("round trips of /bin/true");
        let (_manager, sandbox) = self.sandbox(state).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..repeats * 20 {
            ours.push(timed(sandbox.exec(Command::new("/bin/true"), &SINK)).await?);
            if round % 10 == 0 {
                theirs.push(timed(succeed(self.ssh(&["true"]))).await?);
            }
        }
        sandbox.destroy(&SINK).await?;
        let (ours, theirs) = (median(&ours), median(&theirs));
        let line = Line { metric: "exec_round_trip", of: &self.label, value: ours };
        line.beside("ssh true over a shared connection", theirs, Some(Asked::Faster(5.0)));
        Ok(())
    }

    async fn throughput(&self, state: &Path, repeats: usize) -> Outcome {
        eprintln!("256 MiB of standard output");
        let (_manager, sandbox) = self.sandbox(state).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let much = MUCH.to_string();
        for _ in 0..repeats {
            let command = Command::new("head").args(["-c", &much, "/dev/zero"]);
            let start = Instant::now();
            let run = sandbox.exec(command, &SINK).await?;
            if run.stdout.total != MUCH {
                return Err(format!("{} bytes came", run.stdout.total).into());
            }
            ours.push(start.elapsed());
            // Its output is read as ours is, and thrown away.
            theirs.push(timed(drain(self.ssh(&["head", "-c", &much, "/dev/zero"]))).await?);
        }
        sandbox.destroy(&SINK).await?;
        let line = Line { metric: "stdout_256mib", of: &self.label, value: median(&ours) };
        line.beside("ssh head over a shared connection", median(&theirs), None);
        Ok(())
    }

    /// Round trips over the relay, which this is reached through.
    async fn distance(&self, state: &Path, repeats: usize) -> Outcome {
        eprintln!("round trips of /bin/true over {} ms", (ONE_WAY * 2).as_millis());
        let (_manager, sandbox) = self.sandbox(state).await?;
        let mut link = TcpStream::connect(relay(echo()?)?)?;
        link.set_nodelay(true)?;
        let mut session = Echo::over(self.ssh(&["cat"]))?;
        let (mut ours, mut links, mut echoes) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repeats {
            ours.push(timed(sandbox.exec(Command::new("/bin/true"), &SINK)).await?);
            let begin = Instant::now();
            link.write_all(b"x")?;
            link.read_exact(&mut [0])?;
            links.push(begin.elapsed());
            echoes.push(timed(session.round_trip()).await?);
        }
        drop(session);
        sandbox.destroy(&SINK).await?;
        let value = median(&ours);
        let line = Line { metric: "exec_round_trip_20ms", of: &self.label, value };
        let peer = "the link: a byte through the same relay (no netem), and back";
        line.beside(peer, median(&links), Some(Asked::Plus(2.0)));
        let peer = "the session: a byte to ssh cat through the same relay, and back";
        line.beside(peer, median(&echoes), None);
        Ok(())
    }

    /// A configuration with a host that is this one, behind a relay.
    fn relayed(&self, config: &Path, relay: SocketAddr, state: &Path) -> Outcome<PathBuf> {
        let text = std::fs::read_to_string(config)?;
        let (port, user) = (self.port, &self.user);
        let host = format!(
            "Host relayed\n    HostName {}\n    Port {}\n    User {user}\n    HostKeyAlias [127.0.0.1]:{port}\n",
            relay.ip(),
            relay.port()
        );
        let path = state.join("config");
        std::fs::write(&path, host + &text)?;
        Ok(path)
    }
}

/// A session that gives back what it is given.
struct Echo {
    child: tokio::process::Child,
}

impl Echo {
    fn over(mut cat: tokio::process::Command) -> Outcome<Self> {
        cat.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        Ok(Self { child: cat.spawn()? })
    }

    async fn round_trip(&mut self) -> std::io::Result<()> {
        let pipes = (&mut self.child.stdin, &mut self.child.stdout);
        let (Some(stdin), Some(stdout)) = pipes else {
            return Err(std::io::ErrorKind::NotConnected.into());
        };
        stdin.write_all(b"x").await?;
        stdin.flush().await?;
        stdout.read_u8().await.map(drop)
    }
}

/// Somebody who gives back what comes.
fn echo() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.set_nodelay(true);
            let mut piece = [0; 1024];
            while let Ok(count @ 1..) = stream.read(&mut piece) {
                if stream.write_all(&piece[..count]).is_err() {
                    break;
                }
            }
        }
    });
    Ok(address)
}

/// A way to an address that takes a while, in both directions. It does not limit how much goes over it.
fn relay(to: SocketAddr) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let joined = || {
                let far = TcpStream::connect(to)?;
                near.set_nodelay(true)?;
                far.set_nodelay(true)?;
                hold_back(near.try_clone()?, far.try_clone()?);
                hold_back(far, near);
                std::io::Result::Ok(())
            };
            if let Err(error) = joined() {
                eprintln!("the relay: {error}");
            }
        }
    });
    Ok(address)
}

/// Brings bytes over, each a while after it came.
fn hold_back(mut from: TcpStream, mut to: TcpStream) {
    let (hold, held) = sync_channel::<(Instant, Vec<u8>)>(4096);
    std::thread::spawn(move || {
        let mut piece = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            if hold.send((Instant::now() + ONE_WAY, piece[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    std::thread::spawn(move || {
        for (due, bytes) in held {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

/// Runs a command and reads its output.
async fn drain(mut command: tokio::process::Command) -> Outcome {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut stdout = child.stdout.take().ok_or("it has no output")?;
    let mut piece = vec![0; 256 * 1024];
    let mut total = 0;
    while let count @ 1.. = stdout.read(&mut piece).await? {
        total += count as u64;
    }
    if child.wait().await?.success() && total == MUCH {
        return Ok(());
    }
    Err(format!("{total} bytes came").into())
}

/// What a figure must be, beside its peer's.
#[derive(Clone, Copy)]
enum Asked {
    /// At least so many times faster.
    Faster(f64),
    /// At most so many milliseconds more.
    Plus(f64),
}

/// A time, in milliseconds.
struct Line<'a> {
    metric: &'a str,
    /// The host.
    of: &'a str,
    value: f64,
}

impl Line<'_> {
    fn beside(&self, peer: &str, peer_value: f64, asked: Option<Asked>) {
        let mut line = json!({
            "metric": self.metric, "backend": "ssh", "host": self.of, "value": round(self.value),
            "unit": "ms", "peer": peer, "peer_value": round(peer_value),
            "ratio": round(self.value / peer_value),
        });
        if let Some(asked) = asked {
            let (text, met) = match asked {
                Asked::Faster(times) => {
                    (format!("at least {times} times faster"), self.value * times <= peer_value)
                }
                Asked::Plus(more) => {
                    (format!("at most {more} ms more"), self.value <= peer_value + more)
                }
            };
            (line["asked"], line["met"]) = (text.into(), met.into());
        }
        println!("{line}");
    }
}
