//! Whatever comes over the wire: an error within bounded time and memory, never a panic.
//!
//! The inputs are valid traffic, mutated. Each run tries the same ones; for a longer one,
//!
//! ```text
//! SANDBOX_FUZZ_CASES=1000000 SANDBOX_FUZZ_SEED=$RANDOM cargo test --release -p sandbox-guest --test fuzz
//! ```

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod traffic;

use std::{
    fmt::Debug,
    io,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use peak_alloc::PeakAlloc;
use proptest::{
    prelude::*,
    test_runner::{RngSeed, TestRunner},
};
use sandbox_guest::{
    FileRequest, Input, Request, Response, ShellEvent, ShellRequest,
    frame::{self, Decoder, Frame, MAX_DATA},
    mux, preamble,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What is measured is the whole process's: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Beside what grows with the input: buffers of a connection, and what the runtime keeps.
const SOME: usize = 2 * 1024 * 1024;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

fn fuzz<S>(inputs: S, target: impl Fn(S::Value) -> Result<(), TestCaseError>)
where
    S: Strategy,
    S::Value: Debug,
{
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config = ProptestConfig {
        cases: number("SANDBOX_FUZZ_CASES", 400) as u32,
        rng_seed: RngSeed::Fixed(number("SANDBOX_FUZZ_SEED", 1)),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    TestRunner::new(config).run(&inputs, target).unwrap_or_else(|error| panic!("{error}"));
}

/// Does it within so much memory on top of what is in use.
fn within<T>(bytes: usize, work: impl FnOnce() -> T) -> Result<T, TestCaseError> {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = work();
    let used = MEMORY.peak_usage().saturating_sub(before);
    prop_assert!(used <= bytes, "{used} bytes were in use, and {bytes} may be");
    Ok(result)
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // Time passes at once when nothing else is to be done.
    runtime.enable_time().start_paused(true).build().unwrap().block_on(future)
}

/// All frames up to the end or the first error.
fn read_all(wire: &[u8]) -> (Vec<Frame>, Option<io::ErrorKind>) {
    let mut reader = wire;
    let mut frames = Vec::new();
    block_on(async {
        loop {
            match frame::read(&mut reader).await {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return (frames, None),
                Err(error) => return (frames, Some(error.kind())),
            }
        }
    })
}

/// The same, as it comes in pieces.
fn decode_all(wire: &[u8], piece: usize) -> (Vec<Frame>, Option<io::ErrorKind>) {
    let mut decoder = Decoder::default();
    let mut frames = Vec::new();
    for bytes in wire.chunks(piece) {
        decoder.push(bytes);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error.kind())),
            }
        }
    }
    let torn = (!decoder.is_empty()).then_some(io::ErrorKind::UnexpectedEof);
    (frames, torn)
}

#[test]
fn frames_are_the_same_however_they_arrive() {
    fuzz((traffic::wire(), 1..5000_usize), |(wire, piece)| {
        let bound = 8 * wire.len() + 4 * MAX_DATA + SOME;
        let (read, decoded) = within(bound, || (read_all(&wire), decode_all(&wire, piece)))?;
        prop_assert_eq!(read, decoded);
        Ok(())
    });
}

#[test]
fn messages_take_memory_in_proportion() {
    fuzz(traffic::payload(), |payload| {
        within(128 * payload.len() + 64 * 1024, || {
            drop(frame::decode::<Request>(&payload));
            drop(frame::decode::<Response>(&payload));
            drop(frame::decode::<Input>(&payload));
            drop(frame::decode::<FileRequest>(&payload));
            drop(frame::decode::<ShellRequest>(&payload));
            drop(frame::decode::<ShellEvent>(&payload));
        })
    });
}

#[test]
fn a_message_of_nothing_but_empty_values_takes_little() {
    // Each value is a byte on the wire, and a string or a vector in memory.
    for (head, value) in [(b"\x81\xa9Processes".as_slice(), 0x90), (b"\x81\xa7Entries", 0x80)] {
        let mut payload = head.to_vec();
        let count = frame::MAX_MESSAGE as u32 - 64;
        payload.push(0xdd);
        payload.extend_from_slice(&count.to_be_bytes());
        payload.resize(payload.len() + count as usize, value);
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let decoded = within(SOME, || frame::decode::<Response>(&payload).map(drop)).unwrap();
        assert_eq!(decoded.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn what_is_said_is_understood() {
    // The control of the rest: what traffic is made of is valid, every message of it.
    for (name, message) in traffic::messages() {
        let kinds = [
            frame::decode::<Request>(&message).is_ok(),
            frame::decode::<Response>(&message).is_ok(),
            frame::decode::<Input>(&message).is_ok(),
            frame::decode::<ShellRequest>(&message).is_ok(),
            frame::decode::<ShellEvent>(&message).is_ok(),
        ];
        assert!(kinds.contains(&true), "{name} is a message");
    }
}

#[test]
fn a_preamble_is_one_or_an_error() {
    fuzz(proptest::collection::vec(any::<u8>(), 0..64), |bytes| {
        let result = within(SOME, || {
            block_on(async {
                let (mut here, mut there) = tokio::io::duplex(64);
                there.write_all(&bytes).await.unwrap();
                drop(there);
                preamble::exchange(&mut here).await
            })
        })?;
        // Ours is not among those that chance makes.
        prop_assert!(result.is_err());
        Ok(())
    });
}

/// What may be taken from a connection whose other side is hostile: all that its windows let it send.
const CONNECTION: usize = 64 * 1024 * 1024;

#[test]
fn a_hostile_guest_cannot_harm_the_harness() {
    fuzz((traffic::connection(), any::<bool>()), |(wire, hangs)| {
        within(CONNECTION, || {
            block_on(async {
                let (here, mut there) = tokio::io::duplex(64 * 1024);
                let wire = &wire;
                let mux = mux::client(here);
                let mut stream = mux.open().await.unwrap();
                let _ = frame::write_message(&mut stream, &Request::Status).await;
                // Gone when it ends, or is not waited for any more.
                let peer = async move {
                    let _ = there.write_all(wire).await;
                    let _ = there.flush().await;
                    if hangs {
                        let mut all = Vec::new();
                        let _ = there.read_to_end(&mut all).await;
                    }
                };
                // It says nothing more, or is gone: the one is the caller's to bound, the other an end.
                let read = async {
                    while let Ok(Some(frame)) = frame::read(&mut stream).await {
                        if let Frame::Message(message) = frame {
                            drop(frame::decode::<Response>(&message));
                        }
                    }
                    hangs.then_some(())
                };
                let read = tokio::time::timeout(Duration::from_secs(60), read);
                let peer = tokio::time::timeout(Duration::from_secs(120), peer);
                let (read, _) = tokio::join!(read, peer);
                drop(mux);
                read.is_ok() || hangs
            })
        })
        .and_then(|ended| {
            prop_assert!(ended, "the stream of a connection that is gone has an end");
            Ok(())
        })
    });
}

#[test]
fn a_hostile_client_cannot_harm_the_guest() {
    fuzz(traffic::connection(), |wire| {
        within(CONNECTION, || {
            block_on(async {
                let (here, mut there) = tokio::io::duplex(64 * 1024);
                let mut incoming = mux::server(here);
                let serve = async {
                    while let Some(mut stream) = incoming.accept().await {
                        tokio::spawn(async move {
                            while let Ok(Some(frame)) = frame::read(&mut stream).await {
                                if let Frame::Message(message) = frame {
                                    drop(frame::decode::<Request>(&message));
                                    drop(frame::decode::<Input>(&message));
                                }
                            }
                        });
                    }
                };
                let send = async move {
                    let _ =
                        tokio::time::timeout(Duration::from_secs(60), there.write_all(&wire)).await;
                };
                let served = tokio::time::timeout(Duration::from_secs(120), serve);
                let (served, ()) = tokio::join!(served, send);
                served.is_ok()
            })
        })
        .and_then(|ended| {
            prop_assert!(ended, "a connection that is gone has an end");
            Ok(())
        })
    });
}
