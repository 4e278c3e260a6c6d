//! One file as a stream, with constant memory.

use std::{
    io,
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use sandbox_guest::{
    FileRequest, Input, Request, Response,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, ReadBuf};

use super::{
    Files, Metadata, metadata, next_frame, protocol,
    transfer::{answer, moving},
    wire,
};
use crate::{
    Error, ErrorKind, Result, SandboxId, TurnEventSink,
    guest::{self, Link},
};

/// How much is read at once of what is to be written.
const PIECE: usize = frame::MAX_DATA - frame::HEAD;

/// A file being read, as an [`AsyncRead`]. Dropping it ends the reading.
pub struct FileReader {
    metadata: Metadata,
    state: State,
    sandbox: SandboxId,
    /// Keeps the connection.
    _link: Arc<Link>,
}

type Reading = BufReader<Stream>;
type Next = Pin<Box<dyn Future<Output = (Reading, Result<Frame>)> + Send + Sync>>;

enum State {
    Waits(Next),
    Has { reading: Reading, data: Vec<u8>, at: usize },
    Over,
}

impl std::fmt::Debug for FileReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileReader").field("metadata", &self.metadata).finish_non_exhaustive()
    }
}

impl Files {
    /// A file's contents as a stream, from `offset` on, with constant memory. It waits as long as nobody
    /// reads.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`, `Conflict` for a directory; each names the path. Reading fails with
    /// an [`io::Error`] that has an [`Error`] inside.
    pub async fn reader(&self, path: impl AsRef<Path>, offset: u64) -> Result<FileReader> {
        let link = self.shared.link(&self.inner).await?;
        let request = FileRequest::Read { path: wire(path.as_ref()), offset, length: None };
        let mut stream = link.open(Request::File(request)).await?;
        let first = guest::answered(guest::response(&mut stream)).await;
        let info = match first.map_err(|e| self.about(e))? {
            Response::File(info) => info,
            other => return Err(self.about(guest::unexpected(&other))),
        };
        Ok(FileReader {
            metadata: metadata(info),
            state: State::Waits(next(BufReader::new(stream))),
            sandbox: self.shared.id.clone(),
            _link: link,
        })
    }

    /// Replaces a file's contents as a whole with what is read to its end, or not at all; makes the file,
    /// and the directories above it, where they are missing. Takes constant memory, and returns how much it
    /// was. Dropping the future leaves the file as it was.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write); `Backend` if reading fails, with the cause.
    pub async fn write_from(
        &self,
        path: impl AsRef<Path>,
        contents: impl AsyncRead + Send + Unpin,
        sink: &dyn TurnEventSink,
    ) -> Result<u64> {
        let path = path.as_ref();
        let (call, link) = self.begin("write", path, sink).await?;
        let request =
            FileRequest::Write { path: wire(path), mode: None, append: false, parents: true };
        call.finish(send(&link, request, contents).await)
    }
}

async fn send(
    link: &Link,
    request: FileRequest,
    mut contents: impl AsyncRead + Send + Unpin,
) -> Result<u64> {
    let (mut reader, mut writer) = tokio::io::split(link.open(Request::File(request)).await?);
    let all_sent = AtomicBool::new(false);
    let feed = async {
        let mut buffer = vec![0; PIECE];
        let mut bytes = 0;
        loop {
            let count = contents.read(&mut buffer).await.map_err(|error| {
                Error::io("write", "reading what was to be written failed", error)
            })?;
            if count == 0 {
                all_sent.store(true, Ordering::Release);
                frame::write_message(&mut writer, &Input::End).await.map_err(guest::broken)?;
                return Ok(bytes);
            }
            let write = async {
                frame::write_data(&mut writer, Channel::In, &buffer[..count]).await?;
                // What is produced slowly must not wait here for more.
                writer.flush().await
            };
            moving("write", write).await?.map_err(guest::broken)?;
            bytes += count as u64;
        }
    };
    answer(feed, &all_sent, &mut reader).await
}

fn next(mut reading: Reading) -> Next {
    Box::pin(async move {
        let frame = moving("read", next_frame(&mut reading)).await.and_then(|frame| frame);
        (reading, frame)
    })
}

impl FileReader {
    /// The file's metadata when it was opened.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn fail(&mut self, error: Error) -> Poll<io::Result<()>> {
        self.state = State::Over;
        let error = error.with_sandbox(&self.sandbox);
        let kind = match error.kind() {
            ErrorKind::Unavailable => io::ErrorKind::ConnectionReset,
            _ => io::ErrorKind::Other,
        };
        Poll::Ready(Err(io::Error::new(kind, error)))
    }
}

impl AsyncRead for FileReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match &mut self.state {
                State::Over => return Poll::Ready(Ok(())),
                State::Has { data, at, .. } if *at < data.len() => {
                    let count = buf.remaining().min(data.len() - *at);
                    buf.put_slice(&data[*at..*at + count]);
                    *at += count;
                    return Poll::Ready(Ok(()));
                }
                State::Has { .. } => {
                    let State::Has { reading, .. } =
                        std::mem::replace(&mut self.state, State::Over)
                    else {
                        continue;
                    };
                    self.state = State::Waits(next(reading));
                }
                State::Waits(next) => {
                    let (reading, frame) = ready!(next.as_mut().poll(cx));
                    match frame {
                        Ok(Frame::Data(Channel::Out, data)) => {
                            self.state = State::Has { reading, data, at: 0 };
                        }
                        Ok(Frame::Data(..)) => {
                            return self.fail(protocol("data of another channel"));
                        }
                        Ok(Frame::Message(message)) => match super::decode(&message) {
                            Ok(Response::Done(_)) => self.state = State::Over,
                            Ok(Response::Failed(failure)) => {
                                return self.fail(guest::failed(failure));
                            }
                            Ok(other) => return self.fail(guest::unexpected(&other)),
                            Err(error) => return self.fail(error),
                        },
                        Err(error) => return self.fail(error),
                    }
                }
            }
        }
    }
}
