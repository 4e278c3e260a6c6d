//! What is in a directory.

use std::{
    collections::VecDeque,
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use sandbox_guest::{Entry, FileRequest, Request, Response, mux::Stream};

use super::{Files, Metadata, metadata, wire};
use crate::{Error, ErrorKind, Result, SandboxId, guest, manager::Repeats};

/// How many entries [`Files::list`] takes into memory.
pub const LIST_LIMIT: usize = 100_000;

/// How many bytes of names and links, which a hostile guest may make as long as it likes.
const LIST_BYTES: usize = 64 * 1024 * 1024;

/// A directory's entry.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirEntry {
    /// Its name.
    pub name: OsString,
    /// Its own metadata: a link is not followed.
    pub metadata: Metadata,
}

/// The entries of a directory, in no order, as they come. See [`Files::read_dir`].
#[derive(Debug)]
pub struct ReadDir {
    stream: Option<Stream>,
    entries: VecDeque<Entry>,
    sandbox: SandboxId,
    path: PathBuf,
}

impl Files {
    /// A directory's entries, sorted by name, up to [`LIST_LIMIT`] of them; [`read_dir`](Self::read_dir) has
    /// no limit.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`, `Conflict` if it is no directory, `LimitExceeded` if it has more.
    pub async fn list(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>> {
        let mut repeats = Repeats::new();
        loop {
            match self.try_list(path.as_ref()).await {
                Err(error) if repeats.again(&error).await => {}
                listed => return listed,
            }
        }
    }

    async fn try_list(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let mut found = self.read_dir(path).await?;
        let (mut entries, mut bytes) = (Vec::new(), 0);
        while let Some(entry) = found.next().await? {
            bytes += entry.name.len();
            bytes += entry.metadata.target.as_ref().map_or(0, |target| target.as_os_str().len());
            if entries.len() == LIST_LIMIT || bytes > LIST_BYTES {
                let message = format!(
                    "{} has more than {LIST_LIMIT} entries, or {LIST_BYTES} bytes of them; read them \
                     one by one",
                    path.display()
                );
                return Err(self.about(Error::new(ErrorKind::LimitExceeded, "list", message)));
            }
            entries.push(entry);
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// A directory's entries one by one, in no order, however many there are.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`, `Conflict` if it is no directory.
    pub async fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let path = path.as_ref();
        let link = self.shared.link(&self.inner).await?;
        let stream = link.open(Request::File(FileRequest::List { path: wire(path) })).await?;
        let mut found = ReadDir {
            stream: Some(stream),
            entries: VecDeque::new(),
            sandbox: self.shared.id.clone(),
            path: path.to_owned(),
        };
        // So that what is wrong with the directory is told here.
        found.more().await?;
        Ok(found)
    }
}

impl ReadDir {
    /// The next entry; `None` after the last. Not safe to cancel.
    ///
    /// # Errors
    ///
    /// `Unavailable` if the connection is cut; what the system says.
    pub async fn next(&mut self) -> Result<Option<DirEntry>> {
        if self.entries.is_empty() {
            self.more().await?;
        }
        Ok(self.entries.pop_front().map(|Entry { name, info }| DirEntry {
            name: OsString::from_vec(name.into_vec()),
            metadata: metadata(info),
        }))
    }

    /// Waits for more entries, or the end.
    async fn more(&mut self) -> Result<()> {
        // Gone while it is waited for: after a cancelled wait there is nothing that could be read.
        while self.entries.is_empty()
            && let Some(mut stream) = self.stream.take()
        {
            let next = guest::answered(guest::response(&mut stream)).await;
            match next.map_err(|error| error.with_sandbox(&self.sandbox))? {
                Response::Entries(entries) => {
                    self.entries = entries.into();
                    self.stream = Some(stream);
                }
                Response::Done(_) => {}
                other => {
                    let error = guest::unexpected(&other).with_sandbox(&self.sandbox);
                    tracing::debug!(path = %self.path.display(), %error, "listing");
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}
