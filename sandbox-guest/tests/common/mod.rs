//! A guest in plain mode, and a small client for it.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::{
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use sandbox_guest::{
    ExitStatus, Failure, Hello, Input, ProcessExit, Request, Response, Setup, Start, Started,
    frame::{self, Channel, Frame},
    mux::{self, Mux, Stream},
    preamble,
};
use tokio::{
    io::{AsyncWriteExt, ReadHalf, WriteHalf},
    net::UnixStream,
};

/// A running guest; killed with all it started when it is dropped.
pub(crate) struct Guest {
    pub(crate) child: Child,
    pub(crate) dir: tempfile::TempDir,
}

impl Guest {
    pub(crate) fn start() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Setup)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let workspace = dir.path().join("workspace");
        std::fs::create_dir(&workspace).unwrap();
        let mut setup = Setup {
            instance: "instance".into(),
            listen_path: Some(dir.path().join("socket").to_str().unwrap().into()),
            workspace: workspace.to_str().unwrap().into(),
            env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
            ..Setup::default()
        };
        change(&mut setup);
        let path = dir.path().join("setup.json");
        std::fs::write(&path, serde_json::to_vec(&setup).unwrap()).unwrap();
        let child = Command::new(program())
            .args(["init", "--setup"])
            .arg(&path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let guest = Self { child, dir };
        wait_until("the socket", || guest.socket().exists());
        guest
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub(crate) fn workspace(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    pub(crate) async fn connect(&self) -> Client {
        Client::connect(&self.socket()).await
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let pid = self.child.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The static program where it is embedded, else the one that cargo built for the tests.
pub(crate) fn program() -> PathBuf {
    static PATH: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    PATH.get_or_init(|| {
        let Some(bytes) = sandbox_guest::bundled() else {
            return env!("CARGO_BIN_EXE_sandbox-guest").into();
        };
        use std::os::unix::fs::PermissionsExt;
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("sandbox-guest-{}", std::process::id()));
        let part = path.with_extension("part");
        std::fs::write(&part, bytes).unwrap();
        std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(&part, &path).unwrap();
        path
    })
    .clone()
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default().chars().next();
    state.is_some_and(|state| state != 'Z')
}

#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) mux: Mux,
}

pub(crate) struct Process {
    pub(crate) reader: ReadHalf<Stream>,
    pub(crate) writer: WriteHalf<Stream>,
    pub(crate) started: Started,
}

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit: ProcessExit,
}

impl Ended {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub(crate) fn status(&self) -> ExitStatus {
        self.exit.status
    }
}

impl Client {
    pub(crate) async fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        preamble::exchange(&mut stream).await.unwrap();
        let client = Self { mux: mux::client(stream) };
        let hello = Hello { client: "test".into(), instance: "instance".into() };
        let Response::Welcome(_) = client.ask(Request::Hello(hello)).await.unwrap() else {
            panic!("no welcome")
        };
        client
    }

    pub(crate) async fn send(&self, request: &Request) -> Stream {
        let mut stream = self.mux.open().await.unwrap();
        frame::write_message(&mut stream, request).await.unwrap();
        stream
    }

    pub(crate) async fn ask(&self, request: Request) -> Result<Response, Failure> {
        let mut stream = self.send(&request).await;
        match next(&mut stream).await {
            Response::Failed(failure) => Err(failure),
            response => Ok(response),
        }
    }

    pub(crate) async fn spawn(&self, start: Start) -> Result<Process, Failure> {
        attached(self.send(&Request::Start(start)).await).await
    }

    pub(crate) async fn attach(
        &self,
        process: &str,
        stdout: u64,
        stderr: u64,
    ) -> Result<Process, Failure> {
        let request = Request::Attach { process: process.into(), stdout, stderr };
        attached(self.send(&request).await).await
    }

    pub(crate) async fn run(&self, start: Start) -> Result<Ended, Failure> {
        Ok(self.spawn(start).await?.finish().await)
    }

    pub(crate) async fn shell(&self, script: &str) -> Ended {
        self.run(shell(script)).await.unwrap()
    }
}

async fn attached(stream: Stream) -> Result<Process, Failure> {
    let (mut reader, writer) = tokio::io::split(stream);
    match next(&mut reader).await {
        Response::Started(started) => Ok(Process { reader, writer, started }),
        Response::Failed(failure) => Err(failure),
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn next<R: tokio::io::AsyncRead + Unpin>(reader: &mut R) -> Response {
    match frame::read(reader).await.unwrap().unwrap() {
        Frame::Message(message) => frame::decode(&message).unwrap(),
        Frame::Data(..) => panic!("data where a message was expected"),
    }
}

/// What came in on a process's stream.
pub(crate) enum Event {
    Data(Channel, Vec<u8>),
    Message(Response),
}

impl Process {
    pub(crate) async fn event(&mut self) -> Option<Event> {
        Some(match frame::read(&mut self.reader).await.ok()?? {
            Frame::Data(channel, data) => Event::Data(channel, data),
            Frame::Message(message) => Event::Message(frame::decode(&message).unwrap()),
        })
    }

    pub(crate) async fn send(&mut self, input: Input) -> io::Result<()> {
        frame::write_message(&mut self.writer, &input).await
    }

    pub(crate) async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        frame::write_data(&mut self.writer, Channel::In, data).await?;
        self.writer.flush().await
    }

    /// Acknowledges and gathers all output until the end.
    pub(crate) async fn finish(mut self) -> Ended {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.event().await.expect("the stream ended early") {
                Event::Data(Channel::Err, data) => stderr.extend(data),
                Event::Data(_, data) => stdout.extend(data),
                Event::Message(Response::Exited(exit)) => return Ended { stdout, stderr, exit },
                Event::Message(Response::Accepted { .. }) => continue,
                Event::Message(other) => panic!("{other:?}"),
            }
            let stdout = self.started.stdout + stdout.len() as u64;
            let stderr = self.started.stderr + stderr.len() as u64;
            let _ = self.send(Input::Taken { stdout, stderr }).await;
        }
    }

    /// Reads standard output until this is in it.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            match self.event().await {
                Some(Event::Data(_, data)) => seen += &String::from_utf8_lossy(&data),
                Some(Event::Message(Response::Accepted { .. })) => {}
                _ => panic!("ended before {text:?}: {seen:?}"),
            }
        }
        seen
    }
}

pub(crate) fn command(words: &[&str]) -> Start {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Start {
        id: format!("p{count}"),
        program: words[0].as_bytes().to_vec().into(),
        args: words[1..].iter().map(|word| word.as_bytes().to_vec().into()).collect(),
        ..Start::default()
    }
}

pub(crate) fn shell(script: &str) -> Start {
    command(&["/bin/sh", "-c", script])
}
