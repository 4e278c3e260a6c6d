//! The byte streams that the engine carries to a guest and back.

use std::{
    io::{self, Cursor},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bollard::{container::LogOutput, errors::Error as Docker};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use sandbox_core::GuestStream;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio_util::io::StreamReader;

/// No guest takes longer to come up, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// As much of what a guest complains is kept.
const MOST_WORDS: usize = 4096;

/// A guest's first bytes, by which it shows that it serves.
const PREAMBLE: usize = 8;

type Chunks = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// Both directions of a stream that the engine carries.
pub(crate) struct Wire {
    reader: StreamReader<Chunks, Bytes>,
    pub(crate) writer: Pin<Box<dyn AsyncWrite + Send>>,
    words: Words,
}

/// What came over standard error.
#[derive(Clone, Default)]
struct Words(Arc<Mutex<Vec<u8>>>);

impl Words {
    fn add(&self, bytes: &[u8]) {
        let mut words = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST_WORDS.saturating_sub(words.len());
        words.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn text(&self) -> String {
        let words = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&words).trim().to_owned()
    }
}

impl Wire {
    pub(crate) fn new(
        output: impl Stream<Item = Result<LogOutput, Docker>> + Send + 'static,
        writer: Pin<Box<dyn AsyncWrite + Send>>,
    ) -> Self {
        let words = Words::default();
        let said = words.clone();
        let chunks = output.filter_map(move |item| {
            let chunk = match item {
                Ok(LogOutput::StdErr { message }) => {
                    said.add(&message);
                    None
                }
                Ok(LogOutput::StdOut { message } | LogOutput::Console { message }) => {
                    (!message.is_empty()).then_some(Ok(message))
                }
                Ok(LogOutput::StdIn { .. }) => None,
                Err(Docker::IOError { err }) => Some(Err(err)),
                Err(error) => Some(Err(io::Error::other(error))),
            };
            std::future::ready(chunk)
        });
        Self { reader: StreamReader::new(Box::pin(chunks)), writer, words }
    }

    /// The stream, once the guest at its other end has begun to speak; or what it complained of.
    pub(crate) async fn until_it_serves(mut self) -> Result<GuestStream, String> {
        let mut first = vec![0; PREAMBLE];
        match self.reader.read_exact(&mut first).await {
            Ok(_) => {
                let reader = Cursor::new(first).chain(self.reader);
                Ok(Box::new(tokio::io::join(reader, self.writer)))
            }
            Err(error) => {
                let words = self.words.text();
                Err(if words.is_empty() { error.to_string() } else { words })
            }
        }
    }

    /// All that comes until the end, at most so many bytes, and what was complained of.
    pub(crate) async fn read_to_end(self, most: u64) -> io::Result<(Vec<u8>, String)> {
        let mut output = Vec::new();
        self.reader.take(most).read_to_end(&mut output).await?;
        Ok((output, self.words.text()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn wire(items: Vec<LogOutput>) -> Wire {
        Wire::new(futures::stream::iter(items.into_iter().map(Ok)), Box::pin(tokio::io::sink()))
    }

    fn out(bytes: &'static [u8]) -> LogOutput {
        LogOutput::StdOut { message: Bytes::from_static(bytes) }
    }

    #[tokio::test]
    async fn the_first_bytes_are_not_lost() {
        let stream = wire(vec![out(b"SBX"), out(b"GST\0\x01rest")]).until_it_serves().await;
        let mut stream = stream.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"SBXGST\0\x01rest");
        stream.write_all(b"x").await.unwrap();
    }

    #[tokio::test]
    async fn complaints_are_told() {
        let complaint = LogOutput::StdErr { message: Bytes::from_static(b"no socket\n") };
        let said = wire(vec![complaint]).until_it_serves().await.err();
        assert_eq!(said.as_deref(), Some("no socket"));
    }
}
