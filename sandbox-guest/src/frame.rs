//! The unit of a request's stream: a length, a type, and a payload.
//!
//! ```text
//! ┌────────────────────┬─────────┬─────────────────┐
//! │ length, u32 BE     │ type u8 │ payload         │   length counts type and payload
//! └────────────────────┴─────────┴─────────────────┘
//! ```
//!
//! Type 0 is a MessagePack message; 1, 2 and 3 are data of stdin (or a file being written), stdout (or a
//! file being read) and stderr. Everything here may come from a hostile peer: lengths are checked before
//! a byte of the payload is read or a buffer made.

use std::io;

use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The most that one message may measure, in bytes: room for the longest argument vector Linux takes.
pub const MAX_MESSAGE: usize = 4 * 1024 * 1024;

/// The most that one data frame may carry, in bytes.
pub const MAX_DATA: usize = 64 * 1024;

/// How long a frame's head is.
pub const HEAD: usize = 5;

/// Whose bytes a data frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Towards the guest: a process's standard input, or a file's contents.
    In,
    /// From the guest: standard output, a terminal's output, or a file's contents.
    Out,
    /// From the guest: standard error.
    Err,
}

impl Channel {
    const fn tag(self) -> u8 {
        match self {
            Self::In => 1,
            Self::Out => 2,
            Self::Err => 3,
        }
    }
}

/// One frame, as it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// An encoded message; [`decode`] reads it.
    Message(Vec<u8>),
    /// Data of a channel, never empty.
    Data(Channel, Vec<u8>),
}

/// Reads one frame; `None` where the stream ends cleanly between two frames.
///
/// Not safe to cancel between frames' bytes: give it a task of its own, or drop the stream with it.
///
/// # Errors
///
/// `InvalidData` for an unknown type or an excessive length, `UnexpectedEof` for a torn frame.
pub async fn read<R: AsyncRead + Unpin>(reader: &mut R) -> io::Result<Option<Frame>> {
    let mut head = [0; HEAD];
    let first = reader.read(&mut head).await?;
    if first == 0 {
        return Ok(None);
    }
    reader.read_exact(&mut head[first..]).await?;
    let (channel, length) = understand(head)?;
    // Grows with what really arrives: a length alone buys a hostile peer no memory.
    let mut payload = Vec::with_capacity(length.min(MAX_DATA));
    reader.take(length as u64).read_to_end(&mut payload).await?;
    if payload.len() != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame::new(channel, payload)))
}

/// Takes apart what comes in pieces, for who has no reader to wait on: after each piece, all frames that
/// are complete. It holds no more than one frame that is not, and the last piece.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// What has been taken from the buffer.
    taken: usize,
}

impl Decoder {
    /// Adds a piece.
    pub fn push(&mut self, piece: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(piece);
    }

    /// The next frame that is complete.
    ///
    /// # Errors
    ///
    /// `InvalidData` as [`read`]; nothing that comes later can be understood then.
    pub fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        let rest = &self.buffer[self.taken..];
        let Some((head, rest)) = rest.split_first_chunk::<HEAD>() else { return Ok(None) };
        let (channel, length) = understand(*head)?;
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let frame = Frame::new(channel, payload.to_vec());
        self.taken += HEAD + length;
        Ok(Some(frame))
    }

    /// Whether nothing is left that is not a whole frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.len() == self.taken
    }
}

impl Frame {
    fn new(channel: Option<Channel>, payload: Vec<u8>) -> Self {
        match channel {
            None => Self::Message(payload),
            Some(channel) => Self::Data(channel, payload),
        }
    }
}

/// What a frame's head says: whose data follows, or none's but a message, and how long it is.
fn understand(head: [u8; HEAD]) -> io::Result<(Option<Channel>, usize)> {
    let [a, b, c, d, tag] = head;
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    let limit = if tag == 0 { MAX_MESSAGE } else { MAX_DATA };
    if length < 2 || length - 1 > limit {
        return Err(invalid(format!("a frame of type {tag} and {length} bytes")));
    }
    let channel = match tag {
        0 => None,
        1 => Some(Channel::In),
        2 => Some(Channel::Out),
        3 => Some(Channel::Err),
        other => return Err(invalid(format!("a frame of unknown type {other}"))),
    };
    Ok((channel, length - 1))
}

/// Writes a message as one frame, and flushes.
///
/// # Errors
///
/// `InvalidInput` if the message is longer than [`MAX_MESSAGE`]; otherwise the stream's own error.
pub async fn write_message<W, T>(writer: &mut W, message: &T) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
    T: Serialize + Sync,
{
    let encoded = encode(message)?;
    writer.write_all(&encoded).await?;
    writer.flush().await
}

/// Writes data of a channel, in as many frames as it takes. Does not flush.
///
/// # Errors
///
/// The stream's own error.
pub async fn write_data<W>(writer: &mut W, channel: Channel, data: &[u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    for chunk in data.chunks(MAX_DATA) {
        // One write: the stream below makes a frame of its own of each.
        let mut frame = Vec::with_capacity(HEAD + chunk.len());
        frame.extend_from_slice(&data_head(channel, chunk.len()));
        frame.extend_from_slice(chunk);
        writer.write_all(&frame).await?;
    }
    Ok(())
}

/// The head of a data frame with so many bytes, at most [`MAX_DATA`]; for who puts frames together in
/// a buffer of its own.
#[must_use]
pub fn data_head(channel: Channel, length: usize) -> [u8; HEAD] {
    head(length, channel.tag())
}

/// A message as the bytes of its frame.
///
/// # Errors
///
/// `InvalidInput` if the message is longer than [`MAX_MESSAGE`].
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 5];
    rmp_serde::encode::write_named(&mut frame, message)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let length = frame.len() - 5;
    if length > MAX_MESSAGE {
        let message = format!("a message of {length} bytes; the limit is {MAX_MESSAGE}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    frame[..5].copy_from_slice(&head(length, 0));
    Ok(frame)
}

/// A message's payload, decoded.
///
/// # Errors
///
/// `InvalidData` if it is not such a message.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> io::Result<T> {
    rmp_serde::from_slice(payload).map_err(|error| invalid(error.to_string()))
}

fn head(payload: usize, tag: u8) -> [u8; HEAD] {
    let length = (payload as u32 + 1).to_be_bytes();
    [length[0], length[1], length[2], length[3], tag]
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Request, Response};

    fn block_on<F: Future>(future: F) -> F::Output {
        thread_local! {
            static RUNTIME: tokio::runtime::Runtime =
                tokio::runtime::Builder::new_current_thread().build().unwrap();
        }
        RUNTIME.with(|runtime| runtime.block_on(future))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn data_comes_back_whole(data in proptest::collection::vec(any::<u8>(), 1..200_000)) {
            let mut wire = Vec::new();
            block_on(write_data(&mut wire, Channel::Err, &data)).unwrap();
            let mut reader = &wire[..];
            let mut back = Vec::new();
            while let Some(frame) = block_on(read(&mut reader)).unwrap() {
                let Frame::Data(Channel::Err, bytes) = frame else { panic!("{frame:?}") };
                back.extend(bytes);
            }
            prop_assert_eq!(back, data);
        }

        #[test]
        fn a_stream_is_taken_apart_the_same_wherever_it_is_split(
            pieces in proptest::collection::vec((0..4_u8, 1..2000_usize), 0..12),
            sizes in proptest::collection::vec(1..700_usize, 1..20),
        ) {
            let mut wire = Vec::new();
            let mut expected = Vec::new();
            for (tag, length) in pieces {
                let payload = vec![tag; length];
                wire.extend_from_slice(&head(length, tag));
                wire.extend_from_slice(&payload);
                let (channel, _) = understand(head(length, tag)).unwrap();
                expected.push(Frame::new(channel, payload));
            }
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            let mut rest = &wire[..];
            for size in sizes.iter().cycle() {
                let (piece, later) = rest.split_at((*size).min(rest.len()));
                decoder.push(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    found.push(frame);
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(decoder.is_empty());
            prop_assert_eq!(&found, &expected);
            // And as a reader does it.
            let mut reader = &wire[..];
            let mut read_back = Vec::new();
            while let Some(frame) = block_on(read(&mut reader)).unwrap() {
                read_back.push(frame);
            }
            prop_assert_eq!(read_back, expected);
        }

        #[test]
        fn garbage_is_an_error_or_a_frame_never_a_panic(
            garbage in proptest::collection::vec(any::<u8>(), 0..4096),
        ) {
            let mut reader = &garbage[..];
            while let Ok(Some(frame)) = block_on(read(&mut reader)) {
                if let Frame::Message(payload) = frame {
                    let _ = decode::<Request>(&payload);
                    let _ = decode::<Response>(&payload);
                }
            }
        }
    }

    #[test]
    fn a_huge_length_is_refused_before_it_is_read() {
        let mut wire = &[0xff, 0xff, 0xff, 0xff, 0, 1, 2, 3][..];
        let error = block_on(read(&mut wire)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_message_survives_fields_it_does_not_know() {
        #[derive(Serialize)]
        enum Later {
            Hello(LaterHello),
        }
        #[derive(Serialize)]
        struct LaterHello {
            client: String,
            instance: String,
            colour: &'static str,
        }
        let hello = LaterHello { client: "c".into(), instance: "i".into(), colour: "blue" };
        let frame = encode(&Later::Hello(hello)).unwrap();
        let Request::Hello(hello) = decode(&frame[5..]).unwrap() else { panic!() };
        assert_eq!(hello.instance, "i");
    }
}
