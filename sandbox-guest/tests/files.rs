//! Files, asked of the real guest program in its own language.
#![cfg(all(feature = "program", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod common;

use std::{
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use common::Guest;
use sandbox_guest::{
    Failure, FailureKind, FileInfo, FileRequest, Input, Request, Response,
    frame::{self, Channel},
};

async fn file(client: &common::Client, request: FileRequest) -> Result<Response, Failure> {
    client.ask(Request::File(request)).await
}

async fn read(client: &common::Client, path: &[u8]) -> Result<(FileInfo, Vec<u8>, u64), Failure> {
    use sandbox_guest::frame::Frame;
    let request = FileRequest::Read { path: path.to_vec().into(), offset: 0, length: None };
    let mut stream = client.send(&Request::File(request)).await;
    let info = match common::next(&mut stream).await {
        Response::File(info) => info,
        Response::Failed(failure) => return Err(failure),
        other => panic!("{other:?}"),
    };
    let mut data = Vec::new();
    loop {
        match frame::read(&mut stream).await.unwrap().unwrap() {
            Frame::Data(_, piece) => data.extend(piece),
            Frame::Message(message) => match frame::decode(&message).unwrap() {
                Response::Done(done) => return Ok((info, data, done.bytes)),
                other => panic!("{other:?}"),
            },
        }
    }
}

async fn write(
    client: &common::Client,
    path: &[u8],
    data: &[u8],
    append: bool,
) -> Result<u64, Failure> {
    let path = path.to_vec().into();
    let request = FileRequest::Write { path, mode: Some(0o640), append, parents: true };
    let mut stream = client.send(&Request::File(request)).await;
    frame::write_data(&mut stream, Channel::In, data).await.unwrap();
    frame::write_message(&mut stream, &Input::End).await.unwrap();
    match common::next(&mut stream).await {
        Response::Done(done) => Ok(done.bytes),
        Response::Failed(failure) => Err(failure),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn files_are_written_read_and_listed() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n ^ (n >> 9)) as u8).collect();
    for (name, data) in [
        (&b"dir/sub/big"[..], &data[..]),
        (b"empty", b""),
        (b"with space\nand newline", b"text"),
        (b"\xff\xfe", b"no UTF-8"),
    ] {
        assert_eq!(write(&client, name, data, false).await.unwrap(), data.len() as u64);
        let (info, back, bytes) = read(&client, name).await.unwrap();
        assert!(back == data);
        assert_eq!((info.size, bytes, info.mode), (bytes, data.len() as u64, 0o640));
    }
    write(&client, b"empty", b"more", true).await.unwrap();
    assert_eq!(read(&client, b"empty").await.unwrap().1, b"more");

    // An existing file keeps its mode, and a link to it stays one.
    let path = |name: &str| guest.workspace().join(name);
    std::fs::set_permissions(path("empty"), PermissionsExt::from_mode(0o751)).unwrap();
    std::os::unix::fs::symlink("empty", path("link")).unwrap();
    write(&client, b"link", b"through", false).await.unwrap();
    assert_eq!(std::fs::read(path("empty")).unwrap(), b"through");
    assert!(path("link").is_symlink());
    assert_eq!(path("empty").metadata().unwrap().permissions().mode() & 0o7777, 0o751);

    // Not all of it came: nothing of it stays.
    let request = FileRequest::Write {
        path: b"empty".to_vec().into(),
        mode: None,
        append: false,
        parents: false,
    };
    let mut stream = client.send(&Request::File(request)).await;
    frame::write_data(&mut stream, Channel::In, &data).await.unwrap();
    drop(stream);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(std::fs::read(path("empty")).unwrap(), b"through");
    let mut stream =
        client.send(&Request::File(FileRequest::List { path: b".".to_vec().into() })).await;
    let mut names = Vec::new();
    loop {
        match common::next(&mut stream).await {
            Response::Entries(entries) => {
                names.extend(entries.into_iter().map(|e| e.name.into_vec()));
            }
            Response::Done(_) => break,
            other => panic!("{other:?}"),
        }
    }
    names.sort();
    let expected: [&[u8]; 5] = [b"dir", b"empty", b"link", b"with space\nand newline", b"\xff\xfe"];
    assert_eq!(names, expected);
}

#[tokio::test]
async fn file_errors_name_the_path() {
    let guest = Guest::start();
    let client = guest.connect().await;
    std::fs::create_dir(guest.workspace().join("dir")).unwrap();
    std::fs::write(guest.workspace().join("dir/file"), "x").unwrap();
    let bytes = |text: &str| text.as_bytes().to_vec().into();
    assert_eq!(read(&client, b"dir").await.unwrap_err().kind, FailureKind::WrongType);
    let failure = read(&client, b"missing").await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::NotFound);
    assert!(failure.message.contains("workspace/missing"), "{failure}");
    assert_eq!(write(&client, b"dir", b"x", false).await.unwrap_err().kind, FailureKind::WrongType);
    assert_eq!(read(&client, b"a\0b").await.unwrap_err().kind, FailureKind::Invalid);
    for (request, kind) in [
        (FileRequest::Stat { path: bytes("no"), follow: true }, FailureKind::NotFound),
        (
            FileRequest::MakeDir { path: bytes("dir"), parents: false, mode: None },
            FailureKind::AlreadyExists,
        ),
        (FileRequest::Remove { path: bytes("dir"), recursive: false }, FailureKind::AlreadyExists),
        (FileRequest::List { path: bytes("dir/file") }, FailureKind::WrongType),
        (FileRequest::Rename { from: bytes("no"), to: bytes("yes") }, FailureKind::NotFound),
    ] {
        let failure = file(&client, request).await.unwrap_err();
        assert_eq!(failure.kind, kind, "{failure}");
        assert!(failure.message.contains("workspace/"), "{failure}");
    }
    for request in [
        FileRequest::MakeDir { path: bytes("a/b/c"), parents: true, mode: Some(0o700) },
        FileRequest::MakeDir { path: bytes("a/b/c"), parents: true, mode: None },
        FileRequest::Symlink { target: bytes("nowhere"), path: bytes("a/link") },
        FileRequest::Rename { from: bytes("a/b"), to: bytes("a/d") },
        FileRequest::SetMode { path: bytes("a/d"), mode: 0 },
        FileRequest::Remove { path: bytes("a"), recursive: true },
    ] {
        let shown = format!("{request:?}");
        assert!(matches!(file(&client, request).await, Ok(Response::Done(_))), "{shown}");
    }
    assert!(!guest.workspace().join("a").exists());
}

#[test]
fn a_tree_is_copied_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
        mkdir -p a/empty a/deep/er; echo text > a/file; ln a/file a/deep/hard; ln -s ../nowhere a/link
        mkfifo a/fifo; truncate -s 50M a/sparse; printf x | dd of=a/sparse bs=1 seek=20M conv=notrunc 2>&-
        chmod 751 a/file; chmod 000 a/deep/er; printf z > "a/$(printf '\377n')"
        head -c 3000000 /dev/urandom > a/data; touch -d '2001-02-03 04:05:06.789' a/file a/deep a
        setfattr -n user.overlay.opaque -v y a/empty 2>&- || python3 -c 'import os; os.setxattr("a/empty", "user.overlay.opaque", b"y")'
        mknod a/whiteout c 0 0 || true
    "#;
    let run = |script: &str| {
        let output =
            std::process::Command::new("sh").current_dir(&dir).args(["-c", script]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    run(script);
    run(&format!("{} copy-tree a b", common::program().display()));
    let list = |name: &str| {
        run(&format!(
            "cd {name} && find . -printf '%p %y %m %U %G %T@ %n %l\\n' | sort && \
                      find . -type f -exec sha256sum {{}} + | sort && stat -c %t:%T whiteout"
        ))
    };
    assert_eq!(list("a"), list("b"));
    run("test b/file -ef b/deep/hard && ! test a/file -ef b/file");
    let blocks: u64 = run("stat -c %b b/sparse").trim().parse().unwrap();
    assert!(blocks < 1000, "{blocks} blocks");
    let value =
        run("python3 -c 'import os; print(os.getxattr(\"b/empty\", \"user.overlay.opaque\"))'");
    assert_eq!(value, "b'y'\n");
    // What exists is not touched.
    run(&format!("! {} copy-tree a b 2>&-", common::program().display()));
    run("test -f b/file");
    run(&format!("{} remove-tree b && ! test -e b", common::program().display()));
}

/// Not a check but a measurement.
#[tokio::test]
#[ignore = "a measurement"]
async fn read_speed() {
    let guest = Guest::start();
    let client = guest.connect().await;
    std::fs::write(guest.workspace().join("big"), vec![7; 500_000_000]).unwrap();
    for _ in 0..3 {
        let begin = Instant::now();
        let (_, data, _) = read(&client, b"big").await.unwrap();
        println!("{} MB/s", data.len() as f64 / begin.elapsed().as_secs_f64() / 1e6);
    }
}
