//! Workspaces as archives, for other backends and other hosts.
//!
//! An archive is a line that says what it is, and then what a guest sends of a tree, record by record: the
//! same from every backend. The guest that reads it writes nothing outside of its workspace, whatever the
//! archive says.

use std::sync::atomic::{AtomicBool, Ordering};

use sandbox_guest::{
    FileRequest, Input, Request, Response, TreeRecord,
    frame::{self, Channel, Frame},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

use super::SandboxManager;
use crate::{
    CreateSandbox, Error, ErrorKind, Name, Result, Sandbox, SnapshotId, Suppressed, TurnEventSink,
    guest::{self, Link},
};

/// The first line of an archive.
const MAGIC: &[u8] = b"sandboxer workspace 1\n";

impl SandboxManager {
    /// Writes the workspace of a snapshot as an archive that [`import`](Self::import) reads, on whatever
    /// backend: contents, modes, times, links and holes. Sockets, devices and FIFOs are left out. Takes
    /// constant memory. The writer is flushed, and not shut down.
    ///
    /// A sandbox is made from the snapshot for it, as [`fork`](Self::fork) does, and destroyed afterwards;
    /// the history shows both.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such snapshot; otherwise as [`fork`](Self::fork), and what the writer says.
    pub async fn export<W>(
        &self,
        snapshot: &SnapshotId,
        to: &mut W,
        sink: &dyn TurnEventSink,
    ) -> Result<()>
    where
        W: AsyncWrite + Send + Unpin,
    {
        let source = Passing(Some(self.fork_snapshot(snapshot, None, sink).await?));
        let sent = async {
            let link = source.sandbox()?.link().await?;
            send_out(&link, to).await
        };
        let sent = sent.await;
        let gone = source.end(sink).await;
        sent.and(gone)
    }

    /// Makes a sandbox whose workspace is what [`export`](Self::export) has written.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if the request names a workspace, or what is read is no archive; otherwise as
    /// [`create`](Self::create), and what the reader says. After an error there is no such sandbox.
    pub async fn import<R>(
        &self,
        name: Option<&str>,
        request: CreateSandbox,
        from: R,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox>
    where
        R: AsyncRead + Send + Unpin,
    {
        if request.spec.workspace.is_some() {
            return Err(invalid("the archive is the workspace; the request must not name another"));
        }
        let name: Option<Name> = name.map(str::parse).transpose()?;
        let mut from = BufReader::with_capacity(256 * 1024, from);
        let mut magic = [0; MAGIC.len()];
        let read = from.read_exact(&mut magic).await;
        if read.is_err() || magic != MAGIC {
            return Err(invalid("this is no archive of a workspace"));
        }
        let made = Passing(Some(self.create_new(name, request, sink).await?));
        let taken = async {
            let link = made.sandbox()?.link().await?;
            take_in(&link, &mut from).await
        };
        match taken.await {
            Ok(()) => made.keep(),
            Err(error) => {
                if let Err(left) = made.end(sink).await {
                    tracing::warn!(error = %left, "a sandbox that was half made is left");
                }
                Err(error)
            }
        }
    }
}

/// A sandbox that is destroyed unless somebody says otherwise.
struct Passing(Option<Sandbox>);

impl Passing {
    fn sandbox(&self) -> Result<&Sandbox> {
        self.0.as_ref().ok_or_else(|| invalid("it is gone already"))
    }

    fn keep(mut self) -> Result<Sandbox> {
        self.0.take().ok_or_else(|| invalid("it is gone already"))
    }

    async fn end(mut self, sink: &dyn TurnEventSink) -> Result<()> {
        match self.0.take() {
            Some(sandbox) => sandbox.destroy(sink).await,
            None => Ok(()),
        }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let Some(sandbox) = self.0.take() else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(error) = sandbox.destroy(&Suppressed).await {
                tracing::warn!(%error, "a sandbox that was made in passing is left");
            }
        });
    }
}

async fn send_out(link: &Link, to: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
    let written = |error| Error::io("export", "write the archive", error);
    let request = FileRequest::Download { path: b".".to_vec().into(), skip_special: true };
    let mut stream = BufReader::new(link.open(Request::File(request)).await?);
    to.write_all(MAGIC).await.map_err(written)?;
    loop {
        match frame::read(&mut stream).await.map_err(guest::broken)? {
            Some(Frame::Data(Channel::Out, data)) => {
                frame::write_data(to, Channel::In, &data).await.map_err(written)?;
            }
            Some(Frame::Message(payload)) => {
                match frame::decode(&payload).map_err(guest::broken)? {
                    Response::Tree(record) => {
                        let ended = matches!(record, TreeRecord::End);
                        let message = Input::Tree(record);
                        frame::write_message(to, &message).await.map_err(written)?;
                        if ended {
                            return to.flush().await.map_err(written);
                        }
                    }
                    Response::Failed(failure) => return Err(guest::failed(failure)),
                    other => return Err(guest::unexpected(&other)),
                }
            }
            Some(Frame::Data(..)) => {
                let message = "data of another channel";
                return Err(Error::new(ErrorKind::Guest, "export", message));
            }
            None => return Err(guest::broken(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

async fn take_in(link: &Link, from: &mut (impl AsyncRead + Unpin)) -> Result<()> {
    let request = FileRequest::Upload {
        path: b".".to_vec().into(),
        existing: sandbox_guest::Existing::Merge,
    };
    let stream = link.open(Request::File(request)).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let all_sent = AtomicBool::new(false);
    let feed = async {
        loop {
            let read = match frame::read(from).await {
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => None,
                read => read.map_err(|error| Error::io("import", "read the archive", error))?,
            };
            match read {
                Some(Frame::Data(Channel::In, data)) => {
                    let sent = frame::write_data(&mut writer, Channel::In, &data).await;
                    sent.map_err(guest::broken)?;
                }
                Some(Frame::Message(payload)) => {
                    let record = match frame::decode(&payload) {
                        Ok(Input::Tree(record)) => record,
                        _ => {
                            return Err(invalid("the archive has something else in it than files"));
                        }
                    };
                    let ended = matches!(record, TreeRecord::End);
                    all_sent.store(ended, Ordering::Release);
                    let sent = frame::write_message(&mut writer, &Input::Tree(record)).await;
                    sent.map_err(guest::broken)?;
                    if ended {
                        return writer.flush().await.map_err(guest::broken);
                    }
                }
                Some(Frame::Data(..)) => {
                    return Err(invalid("the archive has something else in it than files"));
                }
                None => return Err(invalid("the archive is cut short")),
            }
        }
    };
    crate::files::answer(feed, &all_sent, &mut reader).await
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidSpec, "import", message)
}
