//! A sandbox's files, from outside. Paths are the sandbox's; relative ones begin at the workspace.

mod directory;
mod stream;
mod transfer;
mod transfer_options;
mod watch;

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use sandbox_guest::{
    Bytes, FileInfo, FileRequest, Input, Request, Response,
    frame::{self, Channel, Frame},
};
use tokio::io::{AsyncRead, AsyncWriteExt};

pub use directory::{DirEntry, LIST_LIMIT, ReadDir};
pub use stream::FileReader;
pub(crate) use transfer::answer;
pub use transfer_options::{
    DownloadOptions, Existing, OutsideLinks, Progress, Transferred, UploadOptions,
};
pub use watch::{FileEvent, FileWatch};

use crate::{
    Error, ErrorKind, Known, Result, TurnEventSink,
    guest::{self, Link},
    manager::{Call, Inner, Repeats, Shared},
};

/// How large a file [`Files::read`] takes into memory, in bytes.
pub const READ_LIMIT: u64 = 64 * 1024 * 1024;

/// The files of a sandbox.
///
/// What changes something takes the turn's sink: the attempt is in the history.
#[derive(Debug, Clone)]
pub struct Files {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, socket or device.
    Other,
}

/// A file's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// What it is.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// The owner's number inside the sandbox.
    pub uid: u32,
    /// The group's.
    pub gid: u32,
    /// The last change of the contents, to the millisecond.
    pub modified: Timestamp,
    /// What a symbolic link says.
    pub target: Option<PathBuf>,
}

impl Files {
    pub(crate) fn new(inner: Arc<Inner>, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }

    /// A file's contents, up to [`READ_LIMIT`]; [`reader`](Self::reader) has no limit.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`, `Conflict` for a directory, `LimitExceeded` for a larger file;
    /// each names the path.
    pub async fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let path = path.as_ref();
        let contents = self.fetch(path, 0, READ_LIMIT + 1).await?;
        if contents.len() as u64 > READ_LIMIT {
            let message = format!("{} is larger than {READ_LIMIT} bytes", path.display());
            return Err(self.about(Error::new(ErrorKind::LimitExceeded, "read", message)));
        }
        Ok(contents)
    }

    /// A file's contents as text, up to [`READ_LIMIT`].
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); `Conflict` for what is not UTF-8.
    pub async fn read_to_string(&self, path: impl AsRef<Path>) -> Result<String> {
        let path = path.as_ref();
        String::from_utf8(self.read(path).await?).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let message = format!("{} is not UTF-8 from byte {at} on", path.display());
            self.about(Error::new(ErrorKind::Conflict, "read_to_string", message))
        })
    }

    /// A part of a file: up to `length` bytes, at most [`READ_LIMIT`], from `offset` on. Fewer where the
    /// file ends before, none past its end.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); `LimitExceeded` for a longer part.
    pub async fn read_range(
        &self,
        path: impl AsRef<Path>,
        offset: u64,
        length: u64,
    ) -> Result<Vec<u8>> {
        let path = path.as_ref();
        if length > READ_LIMIT {
            let message = format!(
                "{length} bytes of {} are more than {READ_LIMIT}; read them in parts",
                path.display()
            );
            return Err(self.about(Error::new(ErrorKind::LimitExceeded, "read_range", message)));
        }
        self.fetch(path, offset, length).await
    }

    /// Replaces a file's contents as a whole, or not at all; makes the file, and the directories above
    /// it, where they are missing.
    ///
    /// # Errors
    ///
    /// `PermissionDenied`, `Conflict` for a directory …; each names the path.
    pub async fn write(
        &self,
        path: impl AsRef<Path>,
        contents: impl AsRef<[u8]>,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        self.put("write", path.as_ref(), contents.as_ref(), false, sink).await
    }

    /// Adds to a file's end; makes the file where it is missing.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub async fn append(
        &self,
        path: impl AsRef<Path>,
        contents: impl AsRef<[u8]>,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        self.put("append", path.as_ref(), contents.as_ref(), true, sink).await
    }

    /// Metadata, links followed.
    ///
    /// # Errors
    ///
    /// `NotFound` or `PermissionDenied`, with the path.
    pub async fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.stat(path.as_ref(), true).await
    }

    /// Metadata of the thing itself, a link's own if it is one.
    ///
    /// # Errors
    ///
    /// As [`metadata`](Self::metadata).
    pub async fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.stat(path.as_ref(), false).await
    }

    /// Whether something is there; of a link, whether there is something that it leads to.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` where that cannot be told.
    pub async fn exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.metadata(path).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The absolute path that a path leads to when every link in it is followed.
    ///
    /// # Errors
    ///
    /// `NotFound` or `PermissionDenied`, with the path.
    pub async fn canonicalize(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let request = FileRequest::Canonicalize { path: wire(path.as_ref()) };
        match self.ask(request).await? {
            Response::Path(path) => Ok(local_path(path)),
            other => Err(guest::unexpected(&other)),
        }
    }

    /// Makes a directory, and those above it.
    ///
    /// # Errors
    ///
    /// `Conflict` if something else is there.
    pub async fn create_dir_all(
        &self,
        path: impl AsRef<Path>,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let path = path.as_ref();
        let request = FileRequest::MakeDir { path: wire(path), parents: true, mode: None };
        self.change("create_dir_all", path, request, sink).await
    }

    /// Removes a file, a link, or an empty directory.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`; a directory that is not empty is refused.
    pub async fn remove(&self, path: impl AsRef<Path>, sink: &dyn TurnEventSink) -> Result<()> {
        let path = path.as_ref();
        let request = FileRequest::Remove { path: wire(path), recursive: false };
        self.change("remove", path, request, sink).await
    }

    /// Removes a directory with all that is in it. Links in it are removed, not followed.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`.
    pub async fn remove_all(&self, path: impl AsRef<Path>, sink: &dyn TurnEventSink) -> Result<()> {
        let path = path.as_ref();
        let request = FileRequest::Remove { path: wire(path), recursive: true };
        self.change("remove_all", path, request, sink).await
    }

    /// Renames, replacing a file of that name.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`, `Conflict`.
    pub async fn rename(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let request = FileRequest::Rename { from: wire(from.as_ref()), to: wire(to.as_ref()) };
        self.change("rename", from.as_ref(), request, sink).await
    }

    /// Makes a symbolic link at `path` that says `target`.
    ///
    /// # Errors
    ///
    /// `Conflict` if something is there.
    pub async fn symlink(
        &self,
        target: impl AsRef<Path>,
        path: impl AsRef<Path>,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let path = path.as_ref();
        let request = FileRequest::Symlink { target: wire(target.as_ref()), path: wire(path) };
        self.change("symlink", path, request, sink).await
    }

    /// Sets permission bits.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`.
    pub async fn set_mode(
        &self,
        path: impl AsRef<Path>,
        mode: u32,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let path = path.as_ref();
        let request = FileRequest::SetMode { path: wire(path), mode };
        self.change("set_mode", path, request, sink).await
    }

    async fn put(
        &self,
        operation: &'static str,
        path: &Path,
        contents: &[u8],
        append: bool,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let (call, link) = self.begin(operation, path, sink).await?;
        let request = FileRequest::Write { path: wire(path), mode: None, append, parents: true };
        call.finish(send_file(&link, request, contents).await)
    }

    async fn change(
        &self,
        operation: &'static str,
        path: &Path,
        request: FileRequest,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let (call, link) = self.begin(operation, path, sink).await?;
        let result = match link.call(Request::File(request)).await {
            Ok(Response::Done(_)) => Ok(()),
            Ok(other) => Err(guest::unexpected(&other)),
            Err(error) => Err(error),
        };
        call.finish(result)
    }

    /// Records what is about to be done.
    async fn begin<'a>(
        &self,
        operation: &'static str,
        path: &Path,
        sink: &'a dyn TurnEventSink,
    ) -> Result<(Call<'a>, Arc<Link>)> {
        let consumer = self.shared.record(&self.inner).await?.consumer.clone();
        let mut call = Call::new(&self.inner, &self.shared, consumer, sink);
        let link = self.shared.link(&self.inner).await?;
        call.record(Known::FileOperation {
            operation: operation.into(),
            path: path.to_string_lossy().into_owned(),
        })
        .await?;
        Ok((call, link))
    }

    /// Asks something that changes nothing: over a cut connection again.
    async fn ask(&self, request: FileRequest) -> Result<Response> {
        self.shared.ask(&self.inner, Request::File(request)).await
    }

    /// Up to so many bytes of a file; over a cut connection all of them anew.
    async fn fetch(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut repeats = Repeats::new();
        loop {
            match self.try_fetch(path, offset, length).await {
                Err(error) if repeats.again(&error).await => {}
                fetched => return fetched,
            }
        }
    }

    async fn try_fetch(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<u8>> {
        let link = self.shared.link(&self.inner).await?;
        let request = FileRequest::Read { path: wire(path), offset, length: Some(length) };
        let mut stream = link.open(Request::File(request)).await?;
        let answer = guest::answered(guest::response(&mut stream)).await;
        let info = match answer.map_err(|e| self.about(e))? {
            Response::File(info) => info,
            other => return Err(guest::unexpected(&other)),
        };
        let mut contents = Vec::with_capacity(info.size.min(length).min(1024 * 1024) as usize);
        loop {
            match guest::answered(next_frame(&mut stream)).await.map_err(|e| self.about(e))? {
                Frame::Data(Channel::Out, bytes) => contents.extend_from_slice(&bytes),
                Frame::Data(..) => return Err(protocol("data of another channel")),
                Frame::Message(payload) => match decode(&payload)? {
                    Response::Done(_) => return Ok(contents),
                    Response::Failed(failure) => return Err(self.about(guest::failed(failure))),
                    other => return Err(guest::unexpected(&other)),
                },
            }
            if contents.len() as u64 > length {
                return Err(self.about(protocol("more than was asked for")));
            }
        }
    }

    async fn stat(&self, path: &Path, follow: bool) -> Result<Metadata> {
        match self.ask(FileRequest::Stat { path: wire(path), follow }).await? {
            Response::File(info) => Ok(metadata(info)),
            other => Err(guest::unexpected(&other)),
        }
    }

    fn about(&self, error: Error) -> Error {
        error.with_sandbox(&self.shared.id)
    }
}

async fn send_file(link: &Link, request: FileRequest, contents: &[u8]) -> Result<()> {
    let mut stream = link.open(Request::File(request)).await?;
    let sent = async {
        for piece in contents.chunks(frame::MAX_DATA) {
            let written = frame::write_data(&mut stream, Channel::In, piece);
            guest::answered(async { written.await.map_err(guest::broken) }).await?;
        }
        guest::answered(async {
            let ended = frame::write_message(&mut stream, &Input::End).await;
            ended.map_err(guest::broken)?;
            stream.flush().await.map_err(guest::broken)
        })
        .await
    };
    // A guest that refuses says why, and does not wait for all of it.
    let sent = sent.await;
    match guest::answered(guest::response(&mut stream)).await {
        Ok(Response::Done(_)) => sent,
        Ok(other) => Err(guest::unexpected(&other)),
        Err(error) => Err(error),
    }
}

async fn next_frame<R: AsyncRead + Unpin>(stream: &mut R) -> Result<Frame> {
    let frame = frame::read(stream).await.map_err(guest::broken)?;
    frame.ok_or_else(|| guest::broken(std::io::ErrorKind::UnexpectedEof.into()))
}

fn decode(payload: &[u8]) -> Result<Response> {
    frame::decode(payload).map_err(guest::broken)
}

fn protocol(what: &str) -> Error {
    Error::new(ErrorKind::Guest, "file operation", format!("the guest sent {what}"))
}

fn wire(path: &Path) -> Bytes {
    Bytes::from(path.as_os_str().as_bytes().to_vec())
}

fn metadata(info: FileInfo) -> Metadata {
    Metadata {
        kind: match info.kind {
            sandbox_guest::FileKind::File => FileKind::File,
            sandbox_guest::FileKind::Directory => FileKind::Directory,
            sandbox_guest::FileKind::Symlink => FileKind::Symlink,
            _ => FileKind::Other,
        },
        size: info.size,
        mode: info.mode,
        uid: info.uid,
        gid: info.gid,
        modified: Timestamp::from_millisecond(info.modified_ms).unwrap_or(Timestamp::UNIX_EPOCH),
        target: info.target.map(local_path),
    }
}

fn local_path(path: Bytes) -> PathBuf {
    PathBuf::from(OsString::from_vec(path.into_vec()))
}
