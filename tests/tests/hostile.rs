//! A guest that is hostile: garbage, huge frames, wrong ids, answers to other questions, or nothing at all.
//! Whatever is asked of it ends within bounded time and memory, never in a panic.
//!
//! The guest is made up here, at the other end of the stream that the backend hands over. Time is the
//! runtime's own: it passes at once when nothing else is to be done, so that a wait for ever shows as one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use peak_alloc::PeakAlloc;
use proptest::{
    collection::vec,
    prelude::*,
    sample::Index,
    strategy::ValueTree,
    test_runner::{RngSeed, TestRunner},
};
use sandbox_conformance::{
    decorate::{Decorated, Decoration},
    fake::DirectoryBackend,
};
use sandbox_core::{
    Command, CreateSandbox, DownloadOptions, Error, ErrorKind, GuestStream, Instance, Network,
    Result, Sandbox, SandboxBackend, SandboxManager, ShellOptions, Suppressed, UploadOptions,
};
use sandbox_guest::{
    Done, Entry, ExitStatus, FileInfo, FileKind, ProcessExit, Request, Response, Started, Status,
    Welcome,
    frame::{self, Channel, Frame},
    mux, preamble,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    net::TcpStream,
};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What is measured, and the clock, are the whole process's: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// In the runtime's time. Every wait of the harness is shorter, and so are some in a row.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// A file that is read into memory has 64 MiB at most, and lies there twice while it grows.
const MEMORY_BOUND: usize = 256 * 1024 * 1024;

/// What the made-up guest does.
#[derive(Debug, Clone, Default)]
struct Script {
    /// Sent before anything else, instead of the preamble.
    instead: Option<Vec<u8>>,
    /// Whether it answers the greeting.
    greets: bool,
    /// Sent on each stream after its request.
    answer: Vec<u8>,
    /// How often.
    times: usize,
    end: End,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum End {
    /// The stream ends.
    #[default]
    Close,
    /// The stream is thrown away.
    Reset,
    /// The whole connection is.
    Cut,
    /// Nothing more comes, for ever.
    Silence,
}

#[derive(Debug, Default)]
struct Hostile(Mutex<Option<Script>>);

#[async_trait]
impl Decoration for Hostile {
    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<GuestStream> {
        let script = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(script) = script else { return inner.connect(instance).await };
        let (here, mut outer) = tokio::io::duplex(64 * 1024);
        let (mut inner, there) = tokio::io::duplex(64 * 1024);
        let name = instance.id.to_string();
        // The connection lasts as long as the guest does not cut it.
        tokio::spawn(async move {
            tokio::select! {
                _ = guest(there, script, name) => {}
                _ = tokio::io::copy_bidirectional(&mut outer, &mut inner) => {}
            }
        });
        Ok(Box::new(here))
    }
}

/// Ends when the connection is to be cut.
async fn guest(mut socket: DuplexStream, script: Script, name: String) -> io::Result<()> {
    if let Some(bytes) = &script.instead {
        socket.write_all(bytes).await?;
        if script.end == End::Close {
            // What was said has yet to go on its way.
            socket.shutdown().await?;
            socket.read_to_end(&mut Vec::new()).await?;
        }
        if script.end == End::Silence {
            socket.read_to_end(&mut Vec::new()).await?;
        }
        return Ok(());
    }
    preamble::exchange(&mut socket).await?;
    let mut incoming = mux::server(socket);
    let (cut, mut is_cut) = tokio::sync::mpsc::channel(1);
    loop {
        let mut stream = tokio::select! {
            stream = incoming.accept() => match stream {
                Some(stream) => stream,
                None => return Ok(()),
            },
            _ = is_cut.recv() => return Ok(()),
        };
        let (script, name, cut) = (script.clone(), name.clone(), cut.clone());
        tokio::spawn(async move {
            let Some(Frame::Message(request)) = frame::read(&mut stream).await? else {
                return Ok(());
            };
            let hello = matches!(frame::decode(&request), Ok(Request::Hello(_)));
            if hello && script.greets {
                let welcome = Welcome {
                    version: "0".into(),
                    instance: name,
                    arch: "x86_64".into(),
                    workspace: b"/".to_vec().into(),
                };
                frame::write_message(&mut stream, &Response::Welcome(welcome)).await?;
                return stream.shutdown().await;
            }
            for _ in 0..script.times {
                stream.write_all(&script.answer).await?;
            }
            stream.flush().await?;
            match script.end {
                End::Close => stream.shutdown().await?,
                End::Reset => return Ok(()),
                End::Cut => drop(cut.send(()).await),
                End::Silence => {}
            }
            while frame::read(&mut stream).await?.is_some() {}
            io::Result::Ok(())
        });
    }
}

/// A sandbox whose guest can be made a hostile one.
struct Scene {
    hostile: Arc<Decorated<Hostile>>,
    sandbox: Sandbox,
    dir: tempfile::TempDir,
    /// What is asked of it, in turn.
    next: AtomicUsize,
}

/// What a harness may ask of a sandbox.
const OPERATIONS: usize = 13;

/// The one that reads a file into memory.
const READ: usize = 5;

/// Those with a thread that waits for what comes, which keeps the clock of a test from passing: that they
/// end when nothing moves would take two minutes each.
const THREADED: [usize; 2] = [9, 10];

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = DirectoryBackend::new(&dir.path().join("backend"));
        let hostile = Decorated::new(Arc::new(files), Hostile::default());
        let manager = manager(&dir, &hostile).await;
        let request = CreateSandbox::new().network(Network::Host);
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        std::fs::write(dir.path().join("file"), vec![b'x'; 300_000]).unwrap();
        Self { hostile, sandbox, dir, next: AtomicUsize::new(0) }
    }

    /// Asks one thing of the sandbox, whose guest does this, over a new connection.
    async fn ask(&self, operation: usize, script: Script) -> Result<()> {
        *self.hostile.decoration().0.lock().unwrap() = Some(script);
        let manager = manager(&self.dir, &self.hostile).await;
        let sandbox = manager.open(self.sandbox.id().as_str()).await?;
        let (files, sink) = (sandbox.files(), &Suppressed);
        let local = self.dir.path().join("file");
        let new = self.dir.path().join("new");
        match operation {
            0 => sandbox.exec(Command::new("true").stdin("input"), sink).await.map(drop),
            1 => {
                let command = Command::new("true").stdin_piped();
                let mut process = sandbox.spawn(command, sink).await?;
                process.write_stdin(b"input").await?;
                while process.next_output().await.is_some() {}
                process.wait(&sandbox, sink).await.map(drop)
            }
            2 => sandbox.processes().await.map(drop),
            3 => sandbox.stats().await.map(drop),
            4 => sandbox.shell(ShellOptions::new(), sink).await?.run("true", sink).await.map(drop),
            READ => files.read("x").await.map(drop),
            6 => files.list("x").await.map(drop),
            7 => files.metadata("x").await.map(drop),
            8 => files.write("x", vec![0; 100_000], sink).await,
            9 => files.upload(&local, "x", UploadOptions::new(), sink).await.map(drop),
            10 => files.download("x", &new, DownloadOptions::new()).await.map(drop),
            11 => files.rename("x", "y", sink).await,
            _ => carry(&sandbox).await,
        }
    }

    /// The same, within bounded time and memory.
    async fn try_one(&self, operation: usize, script: Script) -> Result<()> {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let end = script.end;
        let asked = tokio::time::timeout(FOR_EVER, self.ask(operation, script)).await;
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(used < MEMORY_BOUND, "{used} bytes for operation {operation}, then {end:?}");
        asked.unwrap_or_else(|_| panic!("operation {operation} waits for ever, after {end:?}"))
    }

    async fn end(self) {
        *self.hostile.decoration().0.lock().unwrap() = None;
        let manager = manager(&self.dir, &self.hostile).await;
        let sandbox = manager.open(self.sandbox.id().as_str()).await.unwrap();
        sandbox.destroy(&Suppressed).await.unwrap();
    }
}

/// One connection to a port of the sandbox. It may be silent for as long as it likes; then its client goes.
async fn carry(sandbox: &Sandbox) -> Result<()> {
    let mut forward = sandbox.forward(([127, 0, 0, 1], 0), 80, &Suppressed).await?;
    // It may be refused before it is looked at.
    let Ok(mut socket) = TcpStream::connect(forward.local_addr()).await else {
        return Err(forward.refused().await.unwrap());
    };
    let _ = socket.write_all(b"input").await;
    let mut piece = vec![0; 64 * 1024];
    loop {
        let read = tokio::time::timeout(FOR_EVER / 60, socket.read(&mut piece)).await;
        match read {
            Ok(Ok(0)) => return Ok(()),
            Ok(Ok(_)) => {}
            Err(_) => return Err(Error::new(ErrorKind::Timeout, "read", "nothing is said")),
            Ok(Err(broken)) if forward.stats().refused == 0 => {
                return Err(Error::io("read", "a connection", broken));
            }
            Ok(Err(_)) => return Err(forward.refused().await.unwrap()),
        }
    }
}

async fn manager(dir: &tempfile::TempDir, hostile: &Arc<Decorated<Hostile>>) -> SandboxManager {
    let backend = Arc::clone(hostile) as Arc<dyn SandboxBackend>;
    let builder = SandboxManager::builder().state_dir(dir.path().join("state"));
    builder.shared_backend(backend).build().await.unwrap()
}

/// Runs it on a clock of its own, and sees to it that no task panics.
fn on_a_clock(test: impl AsyncFnOnce(&Scene)) {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = PANICS.load(Ordering::SeqCst);
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        let _ = writeln!(io::stderr(), "{panic}");
    }));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(async {
        let scene = Scene::new().await;
        tokio::time::pause();
        test(&scene).await;
        tokio::time::resume();
        scene.end().await;
    });
    std::panic::set_hook(usual);
    assert_eq!(PANICS.load(Ordering::SeqCst), before, "a task panicked");
}

fn said(response: &Response) -> Vec<u8> {
    frame::encode(response).unwrap()
}

fn data(channel: Channel, length: usize) -> Vec<u8> {
    let mut bytes = frame::data_head(channel, length).to_vec();
    bytes.resize(bytes.len() + length, b'x');
    bytes
}

/// What an honest guest may answer, to some question.
fn answers() -> Vec<Vec<u8>> {
    let started = Started {
        process: "prc_of_another".into(),
        pid: 1,
        stdout: 0,
        stderr: 0,
        stdin: 0,
        taken: 0,
    };
    let exit = ProcessExit {
        status: ExitStatus::Exited(0),
        stdout: 1 << 60,
        stderr: 1,
        output_open: true,
        duration_us: u64::MAX,
        cpu_us: u64::MAX,
        max_memory: u64::MAX,
    };
    let info = FileInfo {
        kind: FileKind::File,
        size: u64::MAX,
        mode: u32::MAX,
        uid: 0,
        gid: 0,
        modified_ms: i64::MAX,
        target: None,
    };
    let name = b"../../etc/passwd".to_vec().into();
    vec![
        said(&Response::Started(started.clone())),
        said(&Response::Started(Started { stdout: u64::MAX, ..started })),
        said(&Response::Exited(exit)),
        said(&Response::Accepted { stdin: u64::MAX - 1 }),
        said(&Response::Status(Status { idle_ms: u64::MAX, ..Status::default() })),
        said(&Response::File(info.clone())),
        said(&Response::Entries(vec![Entry { name, info }; 3])),
        said(&Response::Processes(Vec::new())),
        said(&Response::Done(Done { bytes: u64::MAX })),
        said(&Response::Connected),
        [said(&Response::Connected), data(Channel::Out, 1000)].concat(),
        data(Channel::Out, 64 * 1024),
        data(Channel::Err, 10),
        data(Channel::In, 10),
    ]
}

#[test]
fn what_is_no_guest_is_an_error() {
    on_a_clock(async |scene| {
        let mut version = b"SBXGST".to_vec();
        version.extend_from_slice(&999_u16.to_be_bytes());
        for (instead, end, kind) in [
            (Vec::new(), End::Close, ErrorKind::Unavailable),
            (Vec::new(), End::Silence, ErrorKind::Timeout),
            (b"SBX".to_vec(), End::Silence, ErrorKind::Timeout),
            (b"bash: no such file\n".to_vec(), End::Close, ErrorKind::Guest),
            (vec![0; 100_000], End::Silence, ErrorKind::Guest),
            (version, End::Silence, ErrorKind::Guest),
        ] {
            for operation in 0..OPERATIONS {
                let instead = Some(instead.clone());
                let script = Script { instead: instead.clone(), end, ..Script::default() };
                let error = scene.try_one(operation, script).await.unwrap_err();
                assert_eq!(error.kind(), kind, "{operation}, {instead:?}, {end:?}: {error}");
            }
        }
    });
}

#[test]
fn a_guest_that_does_not_greet_is_an_error() {
    on_a_clock(async |scene| {
        let mut said = answers();
        said.push(Vec::new());
        for answer in said {
            for end in [End::Close, End::Silence, End::Cut] {
                let answer = answer.clone();
                let script = Script { answer, times: 1, end, ..Script::default() };
                scene.try_one(0, script).await.unwrap_err();
            }
        }
    });
}

#[test]
fn silence_and_garbage_are_errors_whatever_was_asked() {
    let garbage = [
        Vec::new(),
        b"garbage, and more of it".to_vec(),
        vec![0xff; 5],
        vec![0, 0, 0, 9, 0, 0xdd, 0xff, 0xff, 0xff, 0xff, 0, 0, 0],
        vec![0, 0, 0, 2, 9, 9],
        vec![0, 0x3f, 0xff, 0xff, 0],
    ];
    on_a_clock(async |scene| {
        for answer in garbage {
            for end in [End::Close, End::Reset, End::Cut, End::Silence] {
                for operation in 0..OPERATIONS {
                    if end == End::Silence && THREADED.contains(&operation) {
                        continue;
                    }
                    let answer = answer.clone();
                    let script =
                        Script { greets: true, answer, times: 1, end, ..Script::default() };
                    let asked = scene.try_one(operation, script.clone()).await;
                    // A process whose guest is gone is lost, which is a result.
                    let lost = matches!(operation, 0 | 1);
                    assert!(asked.is_err() || lost, "{operation} succeeded with {script:?}");
                }
            }
        }
    });
}

#[test]
fn floods_have_an_end() {
    on_a_clock(async |scene| {
        for answer in answers() {
            for operation in 0..OPERATIONS {
                // More than may be read into memory, and more messages than anybody has to say.
                let times = match (operation, answer.len() > 1000) {
                    (READ, true) => 1500,
                    (_, true) => 100,
                    _ => 1000,
                };
                let script = Script {
                    greets: true,
                    answer: answer.clone(),
                    times,
                    end: End::Close,
                    ..Script::default()
                };
                let _ = scene.try_one(operation, script).await;
            }
        }
    });
}

#[test]
fn any_sequence_of_answers_ends() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
    };
    let config = ProptestConfig {
        cases: number("SANDBOX_FUZZ_CASES", 200) as u32,
        rng_seed: RngSeed::Fixed(number("SANDBOX_FUZZ_SEED", 1)),
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    };
    let end = prop::sample::select(vec![End::Close, End::Reset, End::Cut, End::Silence]);
    let spoilt = vec((any::<Index>(), any::<u8>()), 0..3);
    let script = (vec((prop::sample::select(answers()), spoilt), 0..6), 1..4_usize, end).prop_map(
        |(parts, times, end)| {
            let spoil = |(mut part, spoils): (Vec<u8>, Vec<(Index, u8)>)| {
                for (at, byte) in spoils {
                    let at = at.index(part.len());
                    part[at] = byte;
                }
                part
            };
            let answer = parts.into_iter().flat_map(spoil).collect();
            Script { greets: true, answer, times, end, ..Script::default() }
        },
    );
    on_a_clock(async |scene| {
        // The runner is not of the runtime's kind: it makes the cases, which are then tried here.
        let mut runner = TestRunner::new(config.clone());
        for _ in 0..config.cases {
            let script = script.new_tree(&mut runner).unwrap().current();
            let operation = scene.next.fetch_add(1, Ordering::Relaxed) % OPERATIONS;
            if script.end == End::Silence && THREADED.contains(&operation) {
                continue;
            }
            let _ = scene.try_one(operation, script).await;
        }
    });
}
