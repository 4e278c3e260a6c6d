//! One command on a host, and its input and output as a byte stream.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use openssh::{Child, ChildStdin, ChildStdout, Session, Stdio};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    task::JoinHandle,
};

use crate::master::Master;

/// What is kept of what a command says beside its answer.
const WORDS: usize = 4096;

/// How long a session may go on after nobody wants it any more, until what was written has arrived.
const LINGER: Duration = Duration::from_secs(10);

/// A command on a host. Dropping it ends its input; its session is closed when the command has ended.
pub(crate) struct Channel {
    stdin: Option<ChildStdin>,
    /// `None` once it is being closed.
    open: Option<Open>,
    words: Arc<Mutex<Vec<u8>>>,
    listening: JoinHandle<()>,
    master: Arc<Master>,
}

struct Open {
    stdout: ChildStdout,
    child: Child<Arc<Session>>,
    /// Its place among the connection's sessions.
    place: Option<OwnedSemaphorePermit>,
}

impl Channel {
    /// Starts a command.
    pub(crate) async fn open(master: Arc<Master>, command: &str) -> Result<Self, openssh::Error> {
        let mut wanted = Arc::clone(&master.session).arc_raw_command(command);
        wanted.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = wanted.spawn().await?;
        let pipes = (child.stdin().take(), child.stdout().take(), child.stderr().take());
        let (Some(stdin), Some(stdout), Some(mut stderr)) = pipes else {
            return Err(openssh::Error::ChildIo(io::ErrorKind::BrokenPipe.into()));
        };
        let words = Arc::new(Mutex::new(Vec::new()));
        let said = Arc::clone(&words);
        let listening = tokio::spawn(async move {
            let mut buffer = [0; 512];
            while let Ok(count @ 1..) = stderr.read(&mut buffer).await {
                let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                said.extend_from_slice(&buffer[..count]);
                let much = said.len().saturating_sub(WORDS);
                said.drain(..much);
            }
        });
        let open = Some(Open { stdout, child, place: None });
        Ok(Self { stdin: Some(stdin), open, words, listening, master })
    }

    /// Takes this place until its session is closed.
    pub(crate) fn takes(mut self, place: OwnedSemaphorePermit) -> Self {
        if let Some(open) = &mut self.open {
            open.place = Some(place);
        }
        self
    }

    /// What the command said beside its answer.
    pub(crate) fn words(&self) -> String {
        let said = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        crate::error::last_words(&said)
    }

    pub(crate) fn master(&self) -> &Arc<Master> {
        &self.master
    }

    /// Reads to the end of the output and waits for the command's.
    pub(crate) async fn finish(mut self) -> io::Result<(Option<i32>, Vec<u8>)> {
        drop(self.stdin.take());
        let Some(open) = self.open.take() else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut said = Vec::new();
        open.stdout.take(1 << 20).read_to_end(&mut said).await?;
        let status = open.child.wait().await;
        Ok((status.ok().and_then(|status| status.code()), said))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // To close a session is to throw away what is still on its way.
        drop(self.stdin.take());
        self.listening.abort();
        let (open, master) = (self.open.take(), Arc::clone(&self.master));
        let (Some(open), Ok(runtime)) = (open, tokio::runtime::Handle::try_current()) else {
            return;
        };
        runtime.spawn(async move {
            let Open { mut stdout, child, place } = open;
            let ended = async {
                let _ = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
                let _ = child.wait().await;
            };
            let _ = tokio::time::timeout(LINGER, ended).await;
            drop((place, master));
        });
    }
}

impl AsyncRead for Channel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.open {
            Some(open) => Pin::new(&mut open.stdout).poll_read(cx, buffer),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncWrite for Channel {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stdin {
            Some(stdin) => Pin::new(stdin).poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stdin {
            Some(stdin) => Pin::new(stdin).poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The end of a pipe is told by closing it.
        self.stdin = None;
        Poll::Ready(Ok(()))
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").finish_non_exhaustive()
    }
}
