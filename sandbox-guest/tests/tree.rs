//! Trees on their way: what arrives is what was sent, and what a hostile peer sends stays inside or is
//! refused.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use sandbox_guest::{
    Bytes, Existing, Failure, FailureKind, Response, TreeMeta, TreeRecord,
    frame::{self, Channel, Frame},
    tree::{Links, MAX_DEPTH, Piece, Source, SourceOptions, Target, TargetOptions, Totals},
};

const OPTIONS: TargetOptions = TargetOptions {
    existing: Existing::Merge,
    parents: false,
    modes: 0o777,
    links: Links::Inside,
    max_entries: 10_000,
    max_bytes: 1 << 40,
};

/// What a source sends, all of it.
fn pieces(path: &Path, skip_special: bool) -> Result<Vec<Piece>, Failure> {
    let options = SourceOptions {
        skip_special,
        channel: Channel::Out,
        encode: |record| frame::encode(&Response::Tree(record)),
    };
    let mut source = Source::open(path, options)?;
    let mut wire = Vec::new();
    loop {
        let mut some = Vec::new();
        let more = source.fill(&mut some)?;
        wire.extend(some);
        if !more {
            break;
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut reader = &wire[..];
    let mut pieces = Vec::new();
    while let Some(frame) = runtime.block_on(frame::read(&mut reader)).unwrap() {
        pieces.push(match frame {
            Frame::Data(Channel::Out, data) => Piece::Data(data),
            Frame::Message(message) => match frame::decode(&message).unwrap() {
                Response::Tree(record) => Piece::Record(record),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        });
    }
    Ok(pieces)
}

fn put(pieces: &[Piece], path: &Path, options: TargetOptions) -> Result<Totals, Failure> {
    let mut target = Target::create(path, options)?;
    for piece in pieces {
        target.take(piece)?;
    }
    target.commit()
}

fn directory(name: &str) -> Piece {
    let meta = TreeMeta { mode: 0o755, ..TreeMeta::default() };
    Piece::Record(TreeRecord::Directory { name: bytes(name), meta })
}

fn file(name: &str) -> Piece {
    let meta = TreeMeta { mode: 0o644, ..TreeMeta::default() };
    Piece::Record(TreeRecord::File { name: bytes(name), meta, size: 0 })
}

fn link(name: &str, target: &str) -> Piece {
    let meta = TreeMeta::default();
    Piece::Record(TreeRecord::Symlink { name: bytes(name), meta, target: bytes(target) })
}

fn hard(name: &str, to: &str) -> Piece {
    Piece::Record(TreeRecord::Link { name: bytes(name), to: bytes(to) })
}

fn data(data: &str) -> Piece {
    Piece::Data(data.into())
}

fn bytes(text: &str) -> Bytes {
    Bytes::from(text.as_bytes())
}

const LEAVE: Piece = Piece::Record(TreeRecord::Leave);
const END: Piece = Piece::Record(TreeRecord::End);

/// A root directory with this in it.
fn tree(inside: Vec<Piece>) -> Vec<Piece> {
    [vec![directory("")], inside, vec![LEAVE, END]].concat()
}

/// Every path below a directory, and what it is.
fn listing(path: &Path) -> Vec<(PathBuf, u32, u64, i64)> {
    let mut found = Vec::new();
    let mut left = vec![path.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            let below = entry.path().strip_prefix(path).unwrap().to_owned();
            let size = if metadata.is_dir() { 0 } else { metadata.len() };
            found.push((below, metadata.mode(), size, metadata.mtime()));
            if metadata.is_dir() {
                left.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

/// A directory with a destination in it, and things outside that must stay as they are.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        let scene = Self(tempfile::tempdir().unwrap());
        fs::create_dir(scene.path("outside")).unwrap();
        fs::write(scene.path("outside/kept"), "kept").unwrap();
        fs::create_dir(scene.path("inside")).unwrap();
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// What is there, but for what the destination has.
    fn outside(&self) -> Vec<PathBuf> {
        let all = listing(self.0.path());
        all.into_iter().map(|one| one.0).filter(|path| !path.starts_with("inside/to")).collect()
    }

    /// Nothing was written outside, nothing is left inside, and the message names it.
    fn refuses(&self, pieces: &[Piece], kind: FailureKind, named: &str) {
        let refused = put(pieces, &self.path("inside/to"), OPTIONS).unwrap_err();
        assert_eq!(refused.kind, kind, "{refused}");
        assert!(refused.message.contains(named), "{refused} names {named}");
        assert!(!self.path("inside/to").exists());
        self.is_as_it_was();
    }

    fn is_as_it_was(&self) {
        let there = ["inside", "outside", "outside/kept"].map(PathBuf::from);
        assert_eq!(self.outside(), there);
        assert_eq!(fs::read(self.path("outside/kept")).unwrap(), b"kept");
    }
}

fn fill(at: &Path) {
    fs::create_dir_all(at.join("a/b/empty")).unwrap();
    fs::write(at.join("a/file"), "contents").unwrap();
    fs::write(at.join("a/none"), "").unwrap();
    fs::write(at.join("a/b/large"), vec![7; 1_000_000]).unwrap();
    fs::write(at.join(OsStr::from_bytes(b"\xff odd\nname")), "odd").unwrap();
    symlink("a/file", at.join("link")).unwrap();
    symlink("../../link", at.join("a/b/up")).unwrap();
    symlink("nowhere", at.join("dangling")).unwrap();
    fs::hard_link(at.join("a/file"), at.join("a/same")).unwrap();
    fs::set_permissions(at.join("a/file"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::set_permissions(at.join("a/b/empty"), fs::Permissions::from_mode(0o500)).unwrap();
    fs::set_permissions(at.join("a/b"), fs::Permissions::from_mode(0o555)).unwrap();
    let long_ago = fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(981_173_106, 5_000));
    fs::File::open(at.join("a/file")).unwrap().set_times(long_ago).unwrap();
    fs::File::open(at.join("a")).unwrap().set_times(long_ago).unwrap();
}

#[test]
fn a_tree_arrives_as_it_was() {
    let scene = Scene::new();
    let from = scene.path("from");
    fs::create_dir(&from).unwrap();
    fill(&from);
    let totals = put(&pieces(&from, false).unwrap(), &scene.path("to"), OPTIONS).unwrap();
    assert_eq!(listing(&scene.path("to")), listing(&from));
    let to = scene.path("to/a/file");
    assert_eq!(fs::read(&to).unwrap(), b"contents");
    assert_eq!(fs::metadata(&to).unwrap().mtime_nsec(), 5_000);
    assert_eq!(
        fs::metadata(&to).unwrap().ino(),
        fs::metadata(scene.path("to/a/same")).unwrap().ino()
    );
    assert_eq!(fs::read_link(scene.path("to/a/b/up")).unwrap(), Path::new("../../link"));
    assert_eq!(totals.bytes, 1_000_011);
    assert_eq!(totals.entries as usize, listing(&from).len() + 1);
}

#[test]
fn a_file_arrives_and_holes_stay_holes() {
    use std::os::unix::fs::FileExt;
    let scene = Scene::new();
    let sparse = fs::File::create(scene.path("sparse")).unwrap();
    sparse.set_len(3 << 30).unwrap();
    sparse.write_all_at(b"begin", 0).unwrap();
    sparse.write_all_at(b"middle", 1 << 30).unwrap();
    put(&pieces(&scene.path("sparse"), false).unwrap(), &scene.path("to"), OPTIONS).unwrap();
    let copy = fs::File::open(scene.path("to")).unwrap();
    assert_eq!(copy.metadata().unwrap().len(), 3 << 30);
    let mut middle = [0; 8];
    copy.read_exact_at(&mut middle, (1 << 30) - 1).unwrap();
    assert_eq!(&middle, b"\0middle\0");
    if sparse.metadata().unwrap().blocks() < 1 << 20 {
        assert!(copy.metadata().unwrap().blocks() < 1 << 20);
    }
}

#[test]
fn set_user_id_bits_are_not_taken_where_they_are_not_wanted() {
    let scene = Scene::new();
    let meta = TreeMeta { mode: 0o6755, ..TreeMeta::default() };
    let program = TreeRecord::File { name: bytes("program"), meta, size: 0 };
    let sent = tree(vec![Piece::Record(program), data("x")]);
    put(&sent, &scene.path("to"), OPTIONS).unwrap();
    assert_eq!(fs::metadata(scene.path("to/program")).unwrap().mode() & 0o7777, 0o755);
    put(&sent, &scene.path("all"), TargetOptions { modes: 0o7777, ..OPTIONS }).unwrap();
    assert_eq!(fs::metadata(scene.path("all/program")).unwrap().mode() & 0o7777, 0o6755);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in ["..", ".", "", "/", "/tmp/x", "../outside/new", "a/b", "a\0b", &"n".repeat(256)] {
        let scene = Scene::new();
        let named = name.as_bytes().escape_ascii().to_string();
        for make in
            [file, directory, |name: &str| link(name, "a"), |name: &str| hard(name, "first")]
        {
            let sent = tree(vec![file("first"), make(name), data("x")]);
            scene.refuses(&sent, FailureKind::System, &named);
        }
    }
}

#[test]
fn links_that_lead_outside_are_refused_and_others_kept() {
    let scene = Scene::new();
    for target in ["/etc/passwd", "..", "../outside", "a/../../outside", "./../outside/kept"] {
        let sent = tree(vec![directory("a"), LEAVE, link("bad", target)]);
        scene.refuses(&sent, FailureKind::PermissionDenied, "bad");
    }
    scene.refuses(&tree(vec![link("bad", "")]), FailureKind::System, "bad");
    scene.refuses(&tree(vec![link("bad", "a\0b")]), FailureKind::System, "bad");
    scene.refuses(&tree(vec![link("bad", &"a/".repeat(3000))]), FailureKind::System, "bad");

    let sent = tree(vec![
        directory("a"),
        link("bad", "../../outside"),
        link("good", "../file"),
        LEAVE,
        link("worse", "/etc/passwd"),
        file("file"),
    ]);
    let options = TargetOptions { links: Links::InsideOrSkip, ..OPTIONS };
    let totals = put(&sent, &scene.path("inside/to"), options).unwrap();
    assert_eq!(totals.skipped, 2);
    assert_eq!(totals.skipped_paths, [Path::new("a/bad"), Path::new("worse")]);
    let names: Vec<_> = listing(&scene.path("inside/to")).into_iter().map(|one| one.0).collect();
    assert_eq!(names, ["a", "a/good", "file"].map(PathBuf::from));
    scene.is_as_it_was();

    let options = TargetOptions { links: Links::All, existing: Existing::Replace, ..OPTIONS };
    put(&sent, &scene.path("inside/to"), options).unwrap();
    assert_eq!(fs::read_link(scene.path("inside/to/worse")).unwrap(), Path::new("/etc/passwd"));
    scene.is_as_it_was();
}

#[test]
fn nothing_is_written_through_a_link() {
    let scene = Scene::new();
    let outside = scene.path("outside");
    let outside = outside.to_str().unwrap();
    let all = TargetOptions { links: Links::All, ..OPTIONS };
    for sent in [
        // A directory, a file, and a hard link where a link is.
        tree(vec![link("x", outside), directory("x"), file("kept"), data("bad"), LEAVE]),
        tree(vec![link("x", &format!("{outside}/kept")), file("x"), data("bad")]),
        tree(vec![link("x", outside), file("a"), hard("x", "a")]),
        // A hard link to something outside, and one to a link.
        tree(vec![link("x", outside), hard("y", "x/kept")]),
        tree(vec![link("x", &format!("{outside}/kept")), hard("y", "x")]),
        tree(vec![hard("y", "../../outside/kept")]),
        tree(vec![hard("y", &format!("{outside}/kept"))]),
    ] {
        let refused = put(&sent, &scene.path("inside/to"), all).unwrap_err();
        assert_eq!(refused.kind, FailureKind::System, "{refused}");
        assert!(!scene.path("inside/to").exists());
        scene.is_as_it_was();
    }
}

#[test]
fn what_comes_twice_is_refused() {
    let scene = Scene::new();
    for (first, second) in [
        (vec![file("x")], file("x")),
        (vec![file("x")], directory("x")),
        (vec![file("x")], link("x", "y")),
        (vec![directory("x"), LEAVE], directory("x")),
        (vec![directory("x"), LEAVE], file("x")),
        (vec![file("y"), link("x", "y")], hard("x", "y")),
    ] {
        scene.refuses(&tree([first, vec![second]].concat()), FailureKind::System, "x");
    }
}

#[test]
fn records_that_make_no_sense_are_refused() {
    let hole = Piece::Record(TreeRecord::Hole { length: 1 });
    for sent in [
        vec![END],
        vec![LEAVE],
        vec![data("x")],
        vec![hole.clone()],
        vec![file("named"), END],
        vec![link("", "a"), END],
        vec![hard("", "a"), END],
        vec![directory(""), END],
        vec![directory(""), LEAVE, LEAVE, END],
        vec![directory(""), LEAVE, file("x"), END],
        vec![file(""), file(""), END],
        vec![file(""), directory(""), END],
        vec![directory(""), data("x"), LEAVE, END],
        vec![directory(""), directory("a"), LEAVE, hole, END],
        vec![directory(""), directory("a"), LEAVE, END],
    ] {
        Scene::new().refuses(&sent, FailureKind::System, "inside/to");
    }
    // Cut off at any point.
    let whole = tree(vec![directory("a"), file("b"), data("x"), LEAVE, file("c"), data("y")]);
    for length in 0..whole.len() {
        Scene::new().refuses(&whole[..length], FailureKind::System, "inside/to");
    }
}

#[test]
fn limits_are_told() {
    let scene = Scene::new();
    let limited = |sent: &[Piece], options: TargetOptions, limit: &str| {
        let refused = put(sent, &scene.path("inside/to"), options).unwrap_err();
        assert_eq!(refused.kind, FailureKind::LimitExceeded, "{refused}");
        assert!(refused.message.contains(limit), "{refused} says {limit}");
        scene.is_as_it_was();
    };
    let many: Vec<Piece> = (0..10).map(|n| file(&n.to_string())).collect();
    limited(&tree(many.clone()), TargetOptions { max_entries: 10, ..OPTIONS }, "10 files");
    let skips = vec![Piece::Record(TreeRecord::Skipped { path: bytes("x") }); 20];
    limited(&tree(skips), TargetOptions { max_entries: 10, ..OPTIONS }, "10 files");
    let large = tree(vec![file("a"), data("12345"), file("b"), data("67890!")]);
    limited(&large, TargetOptions { max_bytes: 10, ..OPTIONS }, "10 bytes");
    let hole = Piece::Record(TreeRecord::Hole { length: u64::MAX });
    let holes = tree(vec![file("a"), hole.clone(), hole]);
    limited(&holes, OPTIONS, &(1_u64 << 40).to_string());
    let deep: Vec<Piece> = (0..MAX_DEPTH).map(|_| directory("d")).collect();
    limited(&tree(deep), OPTIONS, &MAX_DEPTH.to_string());
    put(&tree(many), &scene.path("inside/to"), OPTIONS).unwrap();
    scene.is_as_it_was();
}

#[test]
fn devices_fifos_and_sockets_are_refused_or_left_out() {
    let scene = Scene::new();
    let from = scene.path("from");
    fs::create_dir(&from).unwrap();
    fs::write(from.join("file"), "x").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    let fifo = std::process::Command::new("mkfifo").arg(from.join("fifo")).status().unwrap();
    assert!(fifo.success());
    let refused = pieces(&from, false).unwrap_err();
    assert_eq!(refused.kind, FailureKind::Unsupported, "{refused}");
    let named = refused.message.contains("fifo") || refused.message.contains("socket");
    assert!(named, "{refused} names it");
    let sent = pieces(&from, true).unwrap();
    let mut totals = put(&sent, &scene.path("inside/to"), OPTIONS).unwrap();
    totals.skipped_paths.sort();
    assert_eq!(totals.skipped_paths, [Path::new("fifo"), Path::new("socket")]);
    assert_eq!(listing(&scene.path("inside/to")).len(), 1);
    let refused = pieces(Path::new("/dev/null"), true).unwrap_err();
    assert_eq!(refused.kind, FailureKind::WrongType, "{refused}");
}

#[test]
fn what_is_there_is_merged_replaced_or_kept() {
    let scene = Scene::new();
    let to = scene.path("to");
    let before = |existing| {
        let _ = sandbox_guest::tree::remove_all(&to);
        fs::create_dir_all(to.join("dir/sub")).unwrap();
        fs::write(to.join("dir/old"), "old").unwrap();
        fs::write(to.join("both"), "old").unwrap();
        TargetOptions { existing, ..OPTIONS }
    };
    let closed = TreeMeta { mode: 0o500, ..TreeMeta::default() };
    let closed = |name| Piece::Record(TreeRecord::Directory { name: bytes(name), meta: closed });
    let sent = tree(vec![
        closed("dir"),
        file("new"),
        closed("sub"),
        closed("deep"),
        file("er"),
        LEAVE,
        LEAVE,
        LEAVE,
        file("both"),
        data("new"),
    ]);
    let names = || listing(&to).into_iter().map(|one| one.0).collect::<Vec<_>>();
    let whole = ["both", "dir", "dir/new", "dir/sub", "dir/sub/deep", "dir/sub/deep/er"];

    put(&sent, &to, before(Existing::Merge)).unwrap();
    let mut merged = whole.to_vec();
    merged.insert(3, "dir/old");
    assert_eq!(names(), merged.iter().map(PathBuf::from).collect::<Vec<_>>());
    assert_eq!(fs::read(to.join("both")).unwrap(), b"new");
    assert_eq!(fs::metadata(to.join("dir/sub/deep")).unwrap().mode() & 0o777, 0o500);

    put(&sent, &to, before(Existing::Replace)).unwrap();
    assert_eq!(names(), whole.map(PathBuf::from));
    put(&[file(""), data("x"), END], &to, before(Existing::Replace)).unwrap();
    assert_eq!(fs::read(&to).unwrap(), b"x");
    put(&sent, &to, OPTIONS).unwrap_err();
    put(&sent, &to, TargetOptions { existing: Existing::Replace, ..OPTIONS }).unwrap();
    assert_eq!(names(), whole.map(PathBuf::from));

    for (sent, existing, named) in [
        (sent.clone(), Existing::Refuse, "to"),
        (vec![file(""), data("x"), END], Existing::Refuse, "to"),
        (vec![file(""), data("x"), END], Existing::Merge, "to"),
        (tree(vec![file("both"), data("new"), file("dir"), data("x")]), Existing::Merge, "to/dir"),
        (tree(vec![file("new"), directory("both"), LEAVE]), Existing::Merge, "to/both"),
    ] {
        let options = before(existing);
        let there = listing(&to);
        let refused = put(&sent, &to, options).unwrap_err();
        let conflict = matches!(refused.kind, FailureKind::AlreadyExists | FailureKind::WrongType);
        assert!(conflict, "{refused}");
        assert!(refused.message.contains(named), "{refused} names {named}");
        assert_eq!(listing(&to), there);
    }
    // A file instead of a file; nothing stays beside.
    put(&[file(""), data("x"), END], &to.join("both"), before(Existing::Merge)).unwrap();
    assert_eq!(fs::read(to.join("both")).unwrap(), b"x");
    assert_eq!(listing(&to).len(), 4);
}

#[test]
fn a_merge_does_not_follow_links_that_are_there() {
    let scene = Scene::new();
    let to = scene.path("inside/to");
    fs::create_dir(&to).unwrap();
    symlink(scene.path("outside"), to.join("dir")).unwrap();
    symlink(scene.path("outside/kept"), to.join("file")).unwrap();
    let sent = tree(vec![directory("dir"), file("kept"), data("bad"), LEAVE]);
    put(&sent, &to, OPTIONS).unwrap_err();
    scene.is_as_it_was();
    put(&tree(vec![file("file"), data("new")]), &to, OPTIONS).unwrap();
    assert_eq!(fs::read(to.join("file")).unwrap(), b"new");
    scene.is_as_it_was();
}

#[test]
fn what_is_dropped_half_way_leaves_nothing() {
    let scene = Scene::new();
    let to = scene.path("inside/to");
    let closed = TreeMeta { mode: 0, ..TreeMeta::default() };
    let closed = Piece::Record(TreeRecord::Directory { name: bytes("a"), meta: closed });
    let sent = tree(vec![closed, file("b"), data("x"), LEAVE, file("c"), data("y")]);
    for merged in [false, true] {
        if merged {
            fs::create_dir(&to).unwrap();
        }
        for length in 0..sent.len() {
            let mut target = Target::create(&to, OPTIONS).unwrap();
            for piece in &sent[..length] {
                target.take(piece).unwrap();
            }
            drop(target);
            scene.is_as_it_was();
            assert_eq!(to.exists(), merged);
            assert!(!merged || listing(&to).is_empty());
        }
    }
}
