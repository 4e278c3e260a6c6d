//! A guest that is not what it says: whatever it sends, nothing is written outside of where a download
//! goes, no memory is spent on it without end, and the error says what was wrong.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use sandbox_conformance::{
    decorate::{Decorated, Decoration},
    fake::DirectoryBackend,
};
use sandbox_core::{
    CreateSandbox, DownloadOptions, Error, ErrorKind, Existing, GuestStream, Instance, LIST_LIMIT,
    Network, Result, Sandbox, SandboxBackend, SandboxManager, Suppressed, UploadOptions,
};
use sandbox_guest::{
    Bytes, Done, Entry, FileInfo, FileKind, Input, Request, Response, TreeMeta, TreeRecord,
    Welcome,
    frame::{self, Channel, Frame},
    mux::{self, Stream},
    preamble,
};
use tokio::io::AsyncWriteExt;

/// What the guest answers to a request about files.
#[derive(Clone)]
enum Line {
    Says(Response),
    Data(Vec<u8>),
    /// Entries, so many times 1000.
    Lists(usize),
    /// The same data without end.
    Floods,
    /// What the client sends is read to its end before the next line.
    Listens,
}

#[derive(Clone)]
struct Forged(Arc<Vec<Line>>);

impl std::fmt::Debug for Forged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forged")
    }
}

#[async_trait]
impl Decoration for Forged {
    async fn connect(&self, _: &dyn SandboxBackend, instance: &Instance) -> Result<GuestStream> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let (forged, instance) = (self.clone(), instance.id.to_string());
        tokio::spawn(async move { forged.serve(theirs, instance).await });
        Ok(Box::new(ours))
    }
}

impl Forged {
    async fn serve(self, mut socket: tokio::io::DuplexStream, instance: String) {
        preamble::exchange(&mut socket).await.unwrap();
        let mut incoming = mux::server(socket);
        while let Some(stream) = incoming.accept().await {
            let (forged, instance) = (self.clone(), instance.clone());
            tokio::spawn(async move {
                // The client may let go at any time.
                let _ = forged.answer(stream, instance).await;
            });
        }
    }

    async fn answer(&self, mut stream: Stream, instance: String) -> std::io::Result<()> {
        let Some(Frame::Message(message)) = frame::read(&mut stream).await? else { return Ok(()) };
        match frame::decode(&message)? {
            Request::Hello(_) => {
                let welcome = Welcome {
                    version: "0".into(),
                    instance,
                    arch: "forged".into(),
                    workspace: Bytes::from(b"/".to_vec()),
                };
                frame::write_message(&mut stream, &Response::Welcome(welcome)).await?;
            }
            Request::File(_) => self.play(&mut stream).await?,
            _ => {
                let done = Response::Done(Done::default());
                frame::write_message(&mut stream, &done).await?;
            }
        }
        stream.shutdown().await?;
        while frame::read(&mut stream).await?.is_some() {}
        Ok(())
    }

    async fn play(&self, stream: &mut Stream) -> std::io::Result<()> {
        for line in &*self.0 {
            match line {
                Line::Says(response) => frame::write_message(stream, response).await?,
                Line::Data(data) => frame::write_data(stream, Channel::Out, data).await?,
                Line::Lists(times) => {
                    for n in 0..*times {
                        let entries = (0..1000).map(|m| entry(&format!("{n}-{m}"))).collect();
                        frame::write_message(stream, &Response::Entries(entries)).await?;
                    }
                }
                Line::Floods => loop {
                    frame::write_data(stream, Channel::Out, &[7; 60_000]).await?;
                },
                Line::Listens => loop {
                    match frame::read(stream).await? {
                        Some(Frame::Message(message)) => match frame::decode(&message)? {
                            Input::End | Input::Tree(TreeRecord::End) => break,
                            _ => {}
                        },
                        Some(_) => {}
                        None => return Ok(()),
                    }
                },
            }
        }
        Ok(())
    }
}

fn info(kind: FileKind) -> FileInfo {
    FileInfo { kind, size: 0, mode: 0o644, uid: 0, gid: 0, modified_ms: 0, target: None }
}

fn entry(name: &str) -> Entry {
    Entry { name: bytes(name), info: info(FileKind::File) }
}

fn bytes(text: &str) -> Bytes {
    Bytes::from(text.as_bytes())
}

fn tree(record: TreeRecord) -> Line {
    Line::Says(Response::Tree(record))
}

fn directory(name: &str) -> Line {
    let meta = TreeMeta { mode: 0o755, ..TreeMeta::default() };
    tree(TreeRecord::Directory { name: bytes(name), meta })
}

fn file(name: &str) -> Line {
    let meta = TreeMeta { mode: 0o6777, ..TreeMeta::default() };
    tree(TreeRecord::File { name: bytes(name), meta, size: 0 })
}

fn link(name: &str, target: &str) -> Line {
    let meta = TreeMeta::default();
    tree(TreeRecord::Symlink { name: bytes(name), meta, target: bytes(target) })
}

fn hard(name: &str, to: &str) -> Line {
    tree(TreeRecord::Link { name: bytes(name), to: bytes(to) })
}

fn data(text: &str) -> Line {
    Line::Data(text.into())
}

fn leave() -> Line {
    tree(TreeRecord::Leave)
}

fn end() -> Line {
    tree(TreeRecord::End)
}

/// A sandbox whose guest answers so, and a directory to download to, with something beside.
struct Scene {
    dir: tempfile::TempDir,
    backend: DirectoryBackend,
    sandbox: Sandbox,
}

impl Scene {
    async fn new(lines: Vec<Line>) -> Self {
        let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        let backend = DirectoryBackend::new(&dir.path().join("backend"));
        let forged = Decorated::new(Arc::new(backend.clone()), Forged(Arc::new(lines)));
        let manager = SandboxManager::builder()
            .state_dir(dir.path().join("state"))
            .shared_backend(forged)
            .build()
            .await
            .unwrap();
        let request = CreateSandbox::new().network(Network::Host);
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        fs::create_dir_all(dir.path().join("here/inside")).unwrap();
        fs::write(dir.path().join("here/beside"), "kept").unwrap();
        Self { dir, backend, sandbox }
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("here")
    }

    async fn download(&self, existing: Existing) -> Result<sandbox_core::Transferred> {
        let options = DownloadOptions::new().existing(existing);
        self.sandbox.files().download("x", self.here().join("inside/to"), options).await
    }

    /// Nothing is beside the destination but what was there.
    fn is_untouched(&self) {
        assert_eq!(names(&self.here()), ["beside", "inside"]);
        assert_eq!(fs::read(self.here().join("beside")).unwrap(), b"kept");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.backend.end_all();
    }
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn said(error: &Error) -> String {
    error.to_string()
}

#[tokio::test]
async fn an_honest_tree_comes_down() {
    let lines = vec![
        directory(""),
        directory("a"),
        file("b"),
        data("contents"),
        leave(),
        link("c", "a/b"),
        hard("d", "a/b"),
        leave(),
        end(),
    ];
    let scene = Scene::new(lines).await;
    let down = scene.download(Existing::Merge).await.unwrap();
    assert_eq!((down.files, down.bytes), (5, 8));
    let to = scene.here().join("inside/to");
    for name in ["a/b", "c", "d"] {
        assert_eq!(fs::read(to.join(name)).unwrap(), b"contents");
    }
    // No program of the sandbox's becomes one that runs as somebody else here.
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(to.join("d")).unwrap().permissions().mode() & 0o7777, 0o777);
    scene.is_untouched();
}

#[tokio::test]
async fn hostile_trees_write_nothing_outside() {
    use ErrorKind::{Guest, PermissionDenied};
    let up = "../../beside";
    let inside = |lines: Vec<Line>| [vec![directory("")], lines, vec![leave(), end()]].concat();
    let cases: Vec<(Vec<Line>, ErrorKind, &str)> = vec![
        // Names that lead elsewhere.
        (inside(vec![file("/tmp/forged"), data("bad")]), Guest, "/tmp/forged"),
        (inside(vec![file(up), data("bad")]), Guest, up),
        (inside(vec![directory(".."), file("beside"), data("bad")]), Guest, ".."),
        (inside(vec![file("a\0b"), data("bad")]), Guest, "a\\x00b"),
        (inside(vec![link(up, "a")]), Guest, up),
        (inside(vec![file("a"), hard(up, "a")]), Guest, up),
        // Links that do.
        (inside(vec![link("out", "/etc/passwd")]), PermissionDenied, "out"),
        (inside(vec![link("out", up)]), PermissionDenied, "out"),
        (
            inside(vec![directory("a"), link("up", ".."), leave(), link("out", "a/up/..")]),
            PermissionDenied,
            "out",
        ),
        (inside(vec![hard("out", up)]), Guest, "out"),
        (inside(vec![hard("out", "/etc/passwd")]), Guest, "out"),
        // What comes twice, and a link with something below it.
        (inside(vec![file("a"), file("a"), data("bad")]), Guest, "a"),
        (inside(vec![link("a", "b"), directory("a"), file("c"), leave()]), Guest, "a"),
        (inside(vec![file("a"), directory("a"), file("c"), leave()]), Guest, "a"),
        (inside(vec![directory("b"), leave(), link("a", "b"), file("a"), data("bad")]), Guest, "a"),
        // What makes no sense.
        (vec![file("named"), end()], Guest, "to"),
        (vec![link("", "a"), end()], Guest, "to"),
        (vec![directory(""), leave(), leave(), end()], Guest, "to"),
        (vec![directory(""), file("a"), end()], Guest, "to"),
        (vec![end()], Guest, "to"),
        (vec![data("bad"), end()], Guest, "to"),
        (vec![directory(""), Line::Says(Response::Entries(Vec::new()))], Guest, "another question"),
        (
            vec![directory(""), Line::Says(Response::Done(Done::default()))],
            Guest,
            "another question",
        ),
        // What has no end: links to nothing left out, holes, data.
        (
            vec![file(""), tree(TreeRecord::Hole { length: u64::MAX }), end()],
            ErrorKind::LimitExceeded,
            "bytes",
        ),
    ];
    for (lines, kind, named) in cases {
        let scene = Scene::new(lines).await;
        let error = scene.download(Existing::Merge).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(said(&error).contains(named), "{error} names {named}");
        assert_eq!(names(&scene.here().join("inside")), Vec::<String>::new());
        scene.is_untouched();
        assert!(!Path::new("/tmp/forged").exists());
    }
}

#[tokio::test]
async fn a_tree_that_is_cut_off_leaves_what_was_there() {
    let scene = Scene::new(vec![directory(""), file("a"), data("new")]).await;
    fs::create_dir(scene.here().join("inside/to")).unwrap();
    fs::write(scene.here().join("inside/to/a"), "old").unwrap();
    for existing in [Existing::Merge, Existing::Replace] {
        let error = scene.download(existing).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert_eq!(names(&scene.here().join("inside")), ["to"]);
        assert_eq!(names(&scene.here().join("inside/to")), ["a"]);
        assert_eq!(fs::read(scene.here().join("inside/to/a")).unwrap(), b"old");
        scene.is_untouched();
    }
}

#[tokio::test]
async fn what_has_no_end_is_ended() {
    let flood = || vec![file(""), Line::Floods];
    let scene = Scene::new(flood()).await;
    let options = DownloadOptions::new().max_bytes(10_000_000);
    let to = scene.here().join("inside/to");
    let error = scene.sandbox.files().download("x", &to, options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error:?}");
    assert!(said(&error).contains("10000000"), "{error} says the limit");
    assert!(!to.exists());

    let scene =
        Scene::new(vec![Line::Says(Response::File(info(FileKind::File))), Line::Floods]).await;
    let error = scene.sandbox.files().read("x").await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::LimitExceeded | ErrorKind::Guest), "{error:?}");
    let error = scene.sandbox.files().read_range("x", 0, 10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Guest, "{error:?}");

    let scene = Scene::new(vec![Line::Lists(usize::MAX)]).await;
    let error = scene.sandbox.files().list("x").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error:?}");
    assert!(said(&error).contains(&LIST_LIMIT.to_string()), "{error} says the limit");
    // One by one they are somebody else's to count.
    let mut entries = scene.sandbox.files().read_dir("x").await.unwrap();
    for _ in 0..LIST_LIMIT + 2000 {
        assert!(entries.next().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn as_many_entries_as_may_be_are_listed() {
    let full = Line::Lists(LIST_LIMIT / 1000);
    let scene = Scene::new(vec![full, Line::Says(Response::Done(Done::default()))]).await;
    assert_eq!(scene.sandbox.files().list("x").await.unwrap().len(), LIST_LIMIT);
}

#[tokio::test]
async fn an_upload_is_done_only_when_the_guest_says_so() {
    let done = Line::Says(Response::Done(Done::default()));
    for (lines, kind) in [
        (vec![Line::Listens, done.clone()], None),
        (vec![Line::Listens], Some(ErrorKind::Unavailable)),
        (vec![done], Some(ErrorKind::Guest)),
        (vec![], Some(ErrorKind::Unavailable)),
        (vec![Line::Listens, data("x")], Some(ErrorKind::Guest)),
        (vec![Line::Listens, directory("")], Some(ErrorKind::Guest)),
    ] {
        let scene = Scene::new(lines).await;
        // Large enough that an early answer comes before its end.
        fs::write(scene.here().join("inside/large"), vec![7; 30_000_000]).unwrap();
        let from = scene.here().join("inside");
        let up = scene.sandbox.files().upload(&from, "x", UploadOptions::new(), &Suppressed).await;
        assert_eq!(up.map_err(|error| error.kind()).err(), kind);
        scene.is_untouched();
    }
}
