//! The real guest program, as an ordinary process, spoken to in its own language.
#![cfg(all(feature = "program", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod common;

use std::time::{Duration, Instant};

use common::{Event, Guest, alive, command, shell, wait_until};
use sandbox_guest::{
    ExitStatus, FailureKind, Input, Output, ProcessState, PtySize, Request, Response, Start,
    frame::{self, Channel},
};

#[tokio::test]
async fn output_and_exit_codes_come_back() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let ended = client.shell("echo out; echo err >&2; exit 7").await;
    assert_eq!(ended.stdout, b"out\n");
    assert_eq!(ended.stderr, b"err\n");
    assert_eq!(ended.status(), ExitStatus::Exited(7));
    assert_eq!((ended.exit.stdout, ended.exit.stderr), (4, 4));
    assert!(!ended.exit.output_open && ended.exit.max_memory > 0);
    assert_eq!(client.shell("ulimit -c").await.text(), "0\n");
    let ended = client.shell("kill -TERM $$").await;
    assert_eq!(ended.status(), ExitStatus::Signaled(15));
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let guest = Guest::start();
    let client = guest.connect().await;
    std::fs::write(guest.workspace().join("plain"), "text").unwrap();
    let path = guest.workspace().join("plain").to_str().unwrap().to_owned();
    for (start, kind, text) in [
        (command(&["no-such-program"]), FailureKind::NotFound, "not found in PATH"),
        (command(&["/no/such"]), FailureKind::NotFound, "/no/such"),
        (command(&[&path]), FailureKind::PermissionDenied, "not executable"),
        (
            Start { cwd: Some(b"/no/dir".to_vec().into()), ..command(&["true"]) },
            FailureKind::NotFound,
            "working directory \"/no/dir\"",
        ),
        (
            Start { user: Some("nobody-here".into()), ..command(&["true"]) },
            FailureKind::NotFound,
            "user \"nobody-here\"",
        ),
        (
            Start { pty: Some(PtySize { rows: 0, cols: 80 }), ..command(&["true"]) },
            FailureKind::Invalid,
            "0 rows",
        ),
    ] {
        let failure = client.run(start).await.unwrap_err();
        assert_eq!(failure.kind, kind, "{failure}");
        assert!(failure.message.contains(text), "{failure}");
    }
}

#[tokio::test]
async fn standard_input_goes_through() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = Start { stdin: true, ..command(&["cat"]) };
    let process = client.spawn(start).await.unwrap();
    let common::Process { mut reader, mut writer, started } = process;
    let data: Vec<u8> = (0..64 * 1024 * 1024_u32).map(|n| (n ^ (n >> 11)) as u8).collect();
    let sent = data.clone();
    let (accepted, mut heard) = tokio::sync::watch::channel(0_u64);
    let (taken, mut took) = tokio::sync::watch::channel(0_u64);
    tokio::spawn(async move {
        use tokio::io::AsyncWriteExt;
        let mut at = 0;
        loop {
            let most = (*heard.borrow() + sandbox_guest::DEFAULT_WINDOW) as usize;
            let end = sent.len().min(most).min(at + 65536);
            if end > at {
                frame::write_data(&mut writer, Channel::In, &sent[at..end]).await.unwrap();
                at = end;
                if at == sent.len() {
                    frame::write_message(&mut writer, &Input::End).await.unwrap();
                }
            } else {
                writer.flush().await.unwrap();
                tokio::select! { r = heard.changed() => if r.is_err() { return }, _ = took.changed() => {} }
            }
            let stdout = *took.borrow_and_update();
            frame::write_message(&mut writer, &Input::Taken { stdout, stderr: 0 }).await.unwrap();
        }
    });
    let mut back = Vec::new();
    loop {
        use sandbox_guest::frame::Frame;
        match frame::read(&mut reader).await.unwrap().unwrap() {
            Frame::Data(_, data) => {
                back.extend(data);
                taken.send_replace(back.len() as u64);
            }
            Frame::Message(message) => match frame::decode(&message).unwrap() {
                Response::Accepted { stdin } => drop(accepted.send_replace(stdin)),
                Response::Exited(exit) => {
                    assert_eq!(exit.status, ExitStatus::Exited(0));
                    break;
                }
                other => panic!("{other:?}"),
            },
        }
    }
    assert!(back == data);
    assert_eq!(started.stdin, 0);
}

#[tokio::test]
async fn a_process_that_reads_no_input_blocks_nothing() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let script = "head -c 3000000 /dev/zero; exec sleep 0.2";
    let mut process = client.spawn(Start { stdin: true, ..shell(script) }).await.unwrap();
    process.write(&vec![0; 1024 * 1024]).await.unwrap();
    assert_eq!(process.finish().await.stdout.len(), 3_000_000);
    // One that closes it gets no more, and goes on.
    let script = "exec <&-; echo closed; sleep 0.2; echo end";
    let mut process = client.spawn(Start { stdin: true, ..shell(script) }).await.unwrap();
    process.until("closed").await;
    process.write(&vec![0; 1024 * 1024]).await.unwrap();
    assert_eq!(process.finish().await.text(), "end\n");
}

#[tokio::test]
async fn every_byte_of_both_channels_arrives() {
    let guest = Guest::start();
    let client = guest.connect().await;
    for _ in 0..5 {
        let script = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero >&2; wait";
        let ended = client.shell(script).await;
        assert_eq!((ended.stdout.len(), ended.stderr.len()), (10_000_000, 10_000_000));
    }
}

#[tokio::test]
async fn a_background_child_does_not_hold_up_the_outcome() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let begin = Instant::now();
    let ended = client.shell("sleep 30 & echo $!").await;
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert!(ended.exit.output_open);
    let pid: u32 = ended.text().trim().parse().unwrap();
    assert!(alive(pid), "it lives on");
}

#[tokio::test]
async fn a_timeout_ends_the_whole_tree() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let bystander = client.spawn(command(&["sleep", "30"])).await.unwrap();
    let pids = guest.workspace().join("pids");
    let scripts = [
        "trap '' TERM; echo $$ >> pids; sleep 30",
        "setsid sh -c 'echo $$ >> pids; exec sleep 30' & wait",
        "(setsid sh -c 'echo $$ >> pids; sleep 30' &) ; sleep 30",
        "f() { [ $1 -gt 8 ] || { f $(($1 + 1)) & f $(($1 + 1)) & }; wait; sleep 30; }; f 0",
        "while :; do sleep 30 & done",
        "f() { (f &) }; f; sleep 30",
        "while :; do (setsid sh -c 'sleep 0.01' &) ; done",
    ];
    for script in scripts {
        let start = Start { timeout_ms: Some(500), ..shell(&format!("echo begun; {script}")) };
        let begin = Instant::now();
        let ended = client.run(start).await.unwrap();
        assert_eq!(ended.status(), ExitStatus::TimedOut, "{script}");
        assert!(ended.text().starts_with("begun"));
        println!("{:?}: {script}", begin.elapsed());
        assert!(begin.elapsed() < Duration::from_millis(2500), "{script}: {:?}", begin.elapsed());
        for pid in std::fs::read_to_string(&pids).unwrap_or_default().lines() {
            assert!(!alive(pid.parse().unwrap()), "{script}: {pid}");
        }
    }
    assert!(alive(bystander.started.pid));
}

#[tokio::test]
async fn kill_is_cancelled_and_signal_is_signaled() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = command(&["sleep", "30"]);
    let id = start.id.clone();
    let process = client.spawn(start).await.unwrap();
    let pid = process.started.pid;
    client.ask(Request::Kill { process: id }).await.unwrap();
    assert!(!alive(pid));
    assert_eq!(process.finish().await.status(), ExitStatus::Cancelled);

    let start = command(&["sleep", "30"]);
    let id = start.id.clone();
    let process = client.spawn(start).await.unwrap();
    let signal = Request::Signal { process: id.clone(), signal: 10, tree: false };
    client.ask(signal.clone()).await.unwrap();
    assert_eq!(process.finish().await.status(), ExitStatus::Signaled(10));
    assert_eq!(client.ask(signal).await.unwrap_err().kind, FailureKind::NotFound);
    let signal = Request::Signal { process: id, signal: 99, tree: false };
    assert_eq!(client.ask(signal).await.unwrap_err().kind, FailureKind::Invalid);
}

#[tokio::test]
async fn letting_go_of_a_stream_kills() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let process = client.spawn(shell("sleep 30 & sleep 30")).await.unwrap();
    let pid = process.started.pid;
    drop(process);
    tokio::time::sleep(Duration::from_millis(20)).await;
    wait_until("the kill", || !alive(pid));
    let Response::Processes(list) = client.ask(Request::Processes).await.unwrap() else { panic!() };
    assert!(list.is_empty(), "{list:?}");
}

#[tokio::test]
async fn a_cut_connection_loses_nothing() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = shell("i=0; while [ $i -lt 200000 ]; do echo line $i; i=$((i+1)); done; exit 3");
    let id = start.id.clone();
    let mut process = client.spawn(start).await.unwrap();
    let mut output = Vec::new();
    while output.len() < 300_000 {
        let Some(Event::Data(_, data)) = process.event().await else { panic!() };
        output.extend(data);
        let stdout = output.len() as u64 / 2;
        process.send(Input::Taken { stdout, stderr: 0 }).await.unwrap();
    }
    // What is not acknowledged is sent again from where the client says it is.
    cut(client, process).await;
    let client = guest.connect().await;
    let process = client.attach(&id, output.len() as u64, 0).await.unwrap();
    assert_eq!(process.started.stdout, output.len() as u64);
    let ended = process.finish().await;
    output.extend(&ended.stdout);
    let expected: String = (0..200_000).map(|n| format!("line {n}\n")).collect();
    assert!(output == expected.as_bytes());
    assert_eq!(ended.status(), ExitStatus::Exited(3));
}

/// Ends a connection without ending its streams first.
async fn cut(client: common::Client, process: common::Process) {
    std::mem::forget(process);
    drop(client);
    tokio::time::sleep(Duration::from_millis(50)).await;
}

#[tokio::test]
async fn an_ended_process_waits_for_a_client_that_was_cut_off() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = shell("sleep 0.2; echo late; exit 4");
    let id = start.id.clone();
    let process = client.spawn(start).await.unwrap();
    cut(client, process).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let client = guest.connect().await;
    let ended = client.attach(&id, 0, 0).await.unwrap().finish().await;
    assert_eq!((ended.text().as_str(), ended.status()), ("late\n", ExitStatus::Exited(4)));
}

#[tokio::test]
async fn a_detached_process_keeps_its_output() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = Start {
        detached: true,
        output: Output::Keep { limit: 1_000_000 },
        ..shell("head -c 5000000 /dev/zero | tr '\\0' x; echo end")
    };
    let id = start.id.clone();
    let process = client.spawn(start).await.unwrap();
    drop(process);
    drop(client);
    let client = guest.connect().await;
    let ended = loop {
        let Response::Processes(list) = client.ask(Request::Processes).await.unwrap() else {
            panic!()
        };
        if matches!(list[0].state, ProcessState::Exited(_)) {
            break client.attach(&id, 0, 0).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(ended.started.stdout, 4_000_004);
    let ended = ended.finish().await;
    assert_eq!(ended.stdout.len(), 1_000_000);
    assert!(ended.stdout.ends_with(b"xxend\n"));
    assert_eq!(ended.exit.stdout, 5_000_004);
    let tail = client.attach(&id, 5_000_000, 0).await.unwrap().finish().await;
    assert_eq!(tail.stdout, b"end\n");
}

#[tokio::test]
async fn a_terminal_is_one() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let script = "trap 'stty size' WINCH; stty size; tty -s && echo tty; read x; echo got $x; \
                  while :; do sleep 0.05; done";
    let size = PtySize { rows: 31, cols: 91 };
    let start = Start { pty: Some(size), stdin: true, ..shell(script) };
    let mut process = client.spawn(start).await.unwrap();
    let text = process.until("tty\r\n").await;
    assert!(text.contains("31 91"), "{text:?}");
    process.write(b"word\n").await.unwrap();
    process.until("got word").await;
    process.send(Input::Resize(PtySize { rows: 20, cols: 70 })).await.unwrap();
    process.until("20 70").await;
    process.write(b"\x03").await.unwrap();
    assert_eq!(process.finish().await.status(), ExitStatus::Signaled(2));

    let start = Start { pty: Some(size), stdin: true, ..command(&["cat"]) };
    let mut process = client.spawn(start).await.unwrap();
    process.write(b"hello\n").await.unwrap();
    process.send(Input::End).await.unwrap();
    let ended = process.finish().await;
    assert_eq!(ended.status(), ExitStatus::Exited(0));
    assert_eq!(ended.text(), "hello\r\nhello\r\n");

    let ended = client.shell("tty; test -t 1 || echo none").await;
    assert_eq!(ended.text(), "not a tty\nnone\n");
}

#[tokio::test]
async fn the_same_id_starts_nothing_twice() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let start = shell("echo once >> ran; sleep 0.3; echo done");
    let first = client.spawn(start.clone()).await.unwrap();
    let second = client.spawn(start).await.unwrap();
    assert_eq!(first.started.pid, second.started.pid);
    let ended = second.finish().await;
    assert_eq!(ended.text(), "done\n");
    drop(first);
    assert_eq!(std::fs::read_to_string(guest.workspace().join("ran")).unwrap(), "once\n");
}

#[tokio::test]
async fn input_that_comes_by_two_connections_is_taken_once() {
    let guest = Guest::start();
    let (client, other) = (guest.connect().await, guest.connect().await);
    for output in [Output::Stream, Output::Keep { limit: 1_000_000 }] {
        let start = Start { stdin: true, output, ..command(&["cat"]) };
        let mut first = client.spawn(start.clone()).await.unwrap();
        let mut second = other.spawn(start).await.unwrap();
        assert_eq!((first.started.stdin, second.started.stdin), (0, 0));
        first.write(b"once ").await.unwrap();
        second.write(b"once upon").await.unwrap();
        // It may come after what it was sent before.
        first.write(b"upon a time").await.unwrap();
        second.write(b" a time").await.unwrap();
        second.send(Input::End).await.unwrap();
        let ended = second.finish().await;
        assert_eq!(ended.text(), "once upon a time");
        drop(first);
    }
}

#[tokio::test]
async fn freezing_stops_everything_and_thawing_lets_it_go_on() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let frozen = client.ask(Request::Freeze).await.unwrap();
    assert!(matches!(frozen, Response::Frozen { idle: true }));
    client.ask(Request::Thaw).await.unwrap();

    let count = guest.workspace().join("count");
    let script = "(setsid sh -c 'while :; do echo x >> count; done' &); sleep 30";
    let process = client.spawn(shell(script)).await.unwrap();
    let length = || std::fs::metadata(&count).map_or(0, |metadata| metadata.len());
    wait_until("the counter", || length() > 10);
    let frozen = client.ask(Request::Freeze).await.unwrap();
    assert!(matches!(frozen, Response::Frozen { idle: false }));
    let before = length();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(length(), before);
    let failure = client.run(command(&["true"])).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Frozen);
    client.ask(Request::Thaw).await.unwrap();
    wait_until("the counter to go on", || length() > before);

    // A freeze ends with its connection.
    let other = guest.connect().await;
    other.ask(Request::Freeze).await.unwrap();
    drop(other);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = length();
    wait_until("the counter to go on", || length() > before);
    drop(process);
}

#[tokio::test]
async fn garbage_ends_only_its_own_connection() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let guest = Guest::start();
    let client = guest.connect().await;
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 100_000], b"SBXGST\0\x01\xff\xff\xff\xff"]
    {
        let mut stream = tokio::net::UnixStream::connect(guest.socket()).await.unwrap();
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
    }
    let mut stream = client.mux.open().await.unwrap();
    stream.write_all(&[0, 0, 0, 3, 0, 0xc1, 0xc1]).await.unwrap();
    stream.flush().await.unwrap();
    let Response::Failed(failure) = common::next(&mut stream).await else { panic!() };
    assert_eq!(failure.kind, FailureKind::Unsupported);
    assert_eq!(client.shell("echo fine").await.text(), "fine\n");
}

#[tokio::test]
async fn another_instance_is_refused() {
    let guest = Guest::start();
    let mut socket = tokio::net::UnixStream::connect(guest.socket()).await.unwrap();
    sandbox_guest::preamble::exchange(&mut socket).await.unwrap();
    let client = common::Client { mux: sandbox_guest::mux::client(socket) };
    let failure = client.ask(Request::Status).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Invalid);
    let hello = sandbox_guest::Hello { client: "test".into(), instance: "other".into() };
    let failure = client.ask(Request::Hello(hello)).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::WrongInstance);
}

#[tokio::test]
async fn a_deadline_ends_the_guest_and_all_in_it() {
    let mut guest = Guest::start();
    let client = guest.connect().await;
    let process =
        client.spawn(Start { detached: true, ..command(&["sleep", "30"]) }).await.unwrap();
    let pid = process.started.pid;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let soon = now.as_millis() as u64 + 300;
    let deadline = Request::Deadline { expires_at: Some(soon), lease_until: None };
    client.ask(deadline).await.unwrap();
    wait_until("the end", || matches!(guest.child.try_wait(), Ok(Some(_))));
    assert!(guest.child.wait().unwrap().success());
    assert!(!alive(pid));
}

#[tokio::test]
async fn the_guest_is_small() {
    let guest = Guest::start();
    let client = guest.connect().await;
    for _ in 0..20 {
        client.shell("head -c 2000000 /dev/zero").await;
    }
    let Response::Status(status) = client.ask(Request::Status).await.unwrap() else { panic!() };
    println!("{status:?}");
    assert_eq!(status.running, 0);
    if sandbox_guest::bundled().is_some() {
        assert!(status.guest_memory <= 3 * 1024 * 1024, "{status:?}");
        let size = std::fs::metadata(common::program()).unwrap().len();
        println!("program: {size} bytes");
        assert!(size <= 2_500_000, "{size}");
    }
}

/// Not a check but a measurement: `cargo test --release -- --ignored --nocapture round_trip`.
#[tokio::test]
#[ignore = "a measurement"]
async fn round_trip() {
    const TIMES: usize = 500;
    let guest = Guest::start();
    let client = guest.connect().await;
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    for _ in 0..3 {
        let mut plain = Vec::new();
        for _ in 0..TIMES {
            let begin = Instant::now();
            std::process::Command::new("/bin/true").output().unwrap();
            plain.push(begin.elapsed());
        }
        let mut through = Vec::new();
        for _ in 0..TIMES {
            let begin = Instant::now();
            client.run(command(&["/bin/true"])).await.unwrap();
            through.push(begin.elapsed());
        }
        println!("plain {:?}, through the guest {:?}", median(plain), median(through));
    }
}
