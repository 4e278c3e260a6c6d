//! Traffic, valid and not.

use proptest::{collection::vec, prelude::*, sample::Index};
use sandbox_guest::{
    Done, Entry, ExitStatus, Failure, FailureKind, FileInfo, FileKind, FileRequest, Hello, Input,
    ProcessExit, PtySize, Request, Response, ShellDone, ShellEvent, ShellRequest, Start, Started,
    Status, Welcome,
    frame::{self, Channel, HEAD},
};
use serde::Serialize;

fn payload_of<T: Serialize>(message: &T) -> Vec<u8> {
    frame::encode(message).unwrap()[HEAD..].to_vec()
}

/// Messages of every kind, as they are when all is well.
pub(crate) fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let bytes = |text: &str| text.as_bytes().to_vec().into();
    let start = Start {
        id: "prc_1".into(),
        program: bytes("sh"),
        args: vec![bytes("-c"), bytes("true")],
        env: vec![(bytes("A"), bytes("b"))],
        cwd: Some(bytes("/workspace")),
        pty: Some(PtySize { rows: 24, cols: 80 }),
        timeout_ms: Some(1000),
        ..Start::default()
    };
    let started =
        Started { process: "prc_1".into(), pid: 7, stdout: 0, stderr: 0, stdin: 0, taken: 0 };
    let exit = ProcessExit {
        status: ExitStatus::Exited(3),
        stdout: 10,
        stderr: 0,
        output_open: false,
        duration_us: 1,
        cpu_us: 1,
        max_memory: 1,
    };
    let info = FileInfo {
        kind: FileKind::Symlink,
        size: 3,
        mode: 0o777,
        uid: 1000,
        gid: 1000,
        modified_ms: -1,
        target: Some(bytes("there")),
    };
    let entry = Entry { name: bytes("name"), info: info.clone() };
    let failure =
        Failure { kind: FailureKind::NotFound, message: "no such thing".into(), errno: Some(2) };
    let welcome = Welcome {
        version: "0".into(),
        instance: "ins_1".into(),
        arch: "x86_64".into(),
        workspace: bytes("/workspace"),
    };
    let done = ShellDone { number: 1, status: 0, output_open: true, duration_us: 5, cpu_us: 5 };
    vec![
        ("hello", payload_of(&Request::Hello(Hello { client: "c".into(), instance: "i".into() }))),
        ("start", payload_of(&Request::Start(start))),
        ("status request", payload_of(&Request::Status)),
        ("connect", payload_of(&Request::Connect { port: 8080 })),
        ("connected", payload_of(&Response::Connected)),
        (
            "read",
            payload_of(&Request::File(FileRequest::Read {
                path: bytes("/etc/passwd"),
                offset: 0,
                length: Some(10),
            })),
        ),
        ("welcome", payload_of(&Response::Welcome(welcome))),
        ("started", payload_of(&Response::Started(started))),
        ("exited", payload_of(&Response::Exited(exit))),
        ("accepted", payload_of(&Response::Accepted { stdin: 1 << 40 })),
        ("status", payload_of(&Response::Status(Status { memory: Some(1), ..Status::default() }))),
        ("file", payload_of(&Response::File(info))),
        ("entries", payload_of(&Response::Entries(vec![entry; 5]))),
        ("done", payload_of(&Response::Done(Done::default()))),
        ("failed", payload_of(&Response::Failed(failure.clone()))),
        ("taken", payload_of(&Input::Taken { stdout: 1, stderr: 2 })),
        ("end", payload_of(&Input::End)),
        ("run", payload_of(&ShellRequest::Run { number: 1, text: bytes("echo"), stdin: true })),
        ("shell failed", payload_of(&ShellEvent::Failed(failure))),
        ("shell done", payload_of(&ShellEvent::Done(done.clone()))),
        (
            "shell ended",
            payload_of(&ShellEvent::Ended {
                command: Some(done),
                status: ExitStatus::Signaled(9),
                words: bytes("words"),
            }),
        ),
    ]
}

/// A way to spoil bytes.
#[derive(Debug, Clone)]
enum Spoil {
    Set(Index, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    /// Something that claims to be long.
    Claim(Index, u8, u32),
}

impl Spoil {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Set(at, byte) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Self::Cut(at) if !bytes.is_empty() => bytes.truncate(at.index(bytes.len())),
            Self::Insert(at, more) => {
                let at = at.index(bytes.len() + 1);
                bytes.splice(at..at, more.iter().copied());
            }
            Self::Claim(at, marker, length) => {
                let at = at.index(bytes.len() + 1);
                let mut claim = vec![*marker];
                claim.extend_from_slice(&length.to_be_bytes());
                bytes.splice(at..at, claim);
            }
            Self::Set(..) | Self::Cut(_) => {}
        }
    }
}

fn spoil() -> impl Strategy<Value = Spoil> {
    let marker = prop::sample::select(vec![0xc6_u8, 0xc9, 0xdb, 0xdd, 0xdf]);
    let length = prop::sample::select(vec![u32::MAX, 1 << 31, 1 << 28, 1 << 20, 70_000, 300]);
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Spoil::Set(at, byte)),
        1 => any::<Index>().prop_map(Spoil::Cut),
        2 => (any::<Index>(), vec(any::<u8>(), 1..20)).prop_map(|(at, more)| Spoil::Insert(at, more)),
        2 => (any::<Index>(), marker, length)
            .prop_map(|(at, marker, length)| Spoil::Claim(at, marker, length)),
    ]
}

fn spoilt(bytes: Vec<u8>, spoils: &[Spoil]) -> Vec<u8> {
    let mut bytes = bytes;
    for spoil in spoils {
        spoil.apply(&mut bytes);
    }
    bytes
}

/// A message's payload, more or less.
pub(crate) fn payload() -> impl Strategy<Value = Vec<u8>> {
    let messages: Vec<Vec<u8>> = messages().into_iter().map(|(_, message)| message).collect();
    let message = (prop::sample::select(messages), vec(spoil(), 0..5));
    prop_oneof![
        6 => message.prop_map(|(message, spoils)| spoilt(message, &spoils)),
        1 => vec(any::<u8>(), 0..2000),
    ]
}

fn head(length: u32, tag: u8) -> Vec<u8> {
    let mut head = length.to_be_bytes().to_vec();
    head.push(tag);
    head
}

fn framed(payload: &[u8]) -> Vec<u8> {
    let mut bytes = head(payload.len() as u32 + 1, 0);
    bytes.extend_from_slice(payload);
    bytes
}

fn piece() -> impl Strategy<Value = Vec<u8>> {
    let channel = prop::sample::select(vec![Channel::In, Channel::Out, Channel::Err]);
    let data = (channel, vec(any::<u8>(), 1..3000)).prop_map(|(channel, data)| {
        let mut bytes = frame::data_head(channel, data.len()).to_vec();
        bytes.extend_from_slice(&data);
        bytes
    });
    prop_oneof![
        4 => payload().prop_map(|payload| framed(&payload)),
        2 => data,
        1 => (payload(), vec(spoil(), 1..3))
            .prop_map(|(payload, spoils)| spoilt(framed(&payload), &spoils)),
        1 => (any::<u32>(), 0..6_u8).prop_map(|(length, tag)| head(length, tag)),
        1 => vec(any::<u8>(), 0..40),
    ]
}

/// What is read from one stream.
pub(crate) fn wire() -> impl Strategy<Value = Vec<u8>> {
    vec(piece(), 0..8).prop_map(|pieces| pieces.concat())
}

/// A header of the protocol that carries many streams.
fn mux_header(kind: u8, flags: u16, stream: u32, length: u32) -> Vec<u8> {
    let mut header = vec![0, kind];
    header.extend_from_slice(&flags.to_be_bytes());
    header.extend_from_slice(&stream.to_be_bytes());
    header.extend_from_slice(&length.to_be_bytes());
    header
}

/// What is read from a whole connection: packets for streams that there are and that there are not.
pub(crate) fn connection() -> impl Strategy<Value = Vec<u8>> {
    let stream = prop_oneof![4 => Just(1_u32), 2 => 0..8_u32, 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0..2_u16, 2 => 0..16_u16, 1 => any::<u16>()];
    let data = (stream.clone(), flags.clone(), wire()).prop_map(|(stream, flags, wire)| {
        let mut packet = mux_header(0, flags, stream, wire.len() as u32);
        packet.extend_from_slice(&wire);
        packet
    });
    let other = (0..5_u8, flags, stream, any::<u32>())
        .prop_map(|(kind, flags, stream, length)| mux_header(kind, flags, stream, length));
    let packet = prop_oneof![5 => data, 2 => other, 1 => vec(any::<u8>(), 0..40)];
    vec(packet, 0..8).prop_map(|packets| packets.concat())
}
