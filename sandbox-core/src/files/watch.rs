//! What happens to a sandbox's files, as it happens.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandbox_guest::{FileEvent as Wire, FileRequest, Request, Response, mux::Stream};
use tokio::sync::mpsc;

use super::{Files, local_path, wire};
use crate::{
    Error, ErrorKind, Known, Result,
    guest::{self, Link, RECONNECT},
    manager::{Inner, Shared},
};

/// How many messages of events are kept for who does not take them; the guest keeps a few more.
const KEPT: usize = 4;

/// Something that happened to a file. Paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileEvent {
    /// There is a new file, directory or link of this name, perhaps instead of another.
    Created(PathBuf),
    /// Its contents or metadata changed.
    Modified(PathBuf),
    /// It is gone, or led out of what is watched.
    Removed(PathBuf),
    /// It has another name now.
    Renamed {
        /// The old one.
        from: PathBuf,
        /// The new one.
        to: PathBuf,
    },
    /// More happened than could be kept: look for yourself.
    Overflow,
}

/// Events of files, as they come. Dropping it ends the watch. See [`Files::watch`].
#[derive(Debug)]
pub struct FileWatch {
    events: VecDeque<FileEvent>,
    come: mpsc::Receiver<Result<Vec<Wire>>>,
}

impl Files {
    /// Watches a file, or a directory and what is in it; with `recursive` all directories below it too,
    /// those that are made later as well. Links are followed only to find `path` itself.
    ///
    /// Events are kept for who is slow, but not without end: then [`FileEvent::Overflow`] stands for those
    /// that are missing. The same is told once after the connection to the sandbox was cut and has come back,
    /// or a snapshot was taken for which its guest gave way to another. What the sandbox's user may not look
    /// into is not told of. In a new directory the same may be told twice.
    ///
    /// # Errors
    ///
    /// `NotFound`, `PermissionDenied`; `LimitExceeded`, with the limit, for too many directories, or too
    /// many watches at once.
    pub async fn watch(&self, path: impl AsRef<Path>, recursive: bool) -> Result<FileWatch> {
        let record = self.shared.record(&self.inner).await?;
        let link = self.shared.link(&self.inner).await?;
        let request = FileRequest::Watch { path: wire(path.as_ref()), recursive };
        let stream = begin(&link, &request).await.map_err(|error| self.about(error))?;
        let (give, come) = mpsc::channel(KEPT);
        let watching = Watching {
            inner: Arc::clone(&self.inner),
            shared: Arc::clone(&self.shared),
            request,
            seen: record.seq,
            give,
        };
        tokio::spawn(watching.run(stream));
        Ok(FileWatch { events: VecDeque::new(), come })
    }
}

impl FileWatch {
    /// The next event; `None` once what was watched is gone. Safe to cancel.
    ///
    /// # Errors
    ///
    /// `Lost` when the sandbox was stopped, rewound or destroyed, or is gone. After an error there is
    /// nothing more.
    pub async fn next(&mut self) -> Result<Option<FileEvent>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.come.recv().await {
                Some(events) => self.events.extend(events?.into_iter().filter_map(event)),
                None => return Ok(None),
            }
        }
    }
}

struct Watching {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    request: FileRequest,
    /// The sandbox's last record that has nothing to say to the watch.
    seen: u64,
    give: mpsc::Sender<Result<Vec<Wire>>>,
}

impl Watching {
    /// Passes events on until there are no more or nobody wants them. The stream ends with it.
    async fn run(mut self, mut stream: Stream) {
        let give = self.give.clone();
        let pass = async {
            loop {
                let result = match guest::response(&mut stream).await {
                    Ok(Response::Events(events)) => Ok(events),
                    Ok(other) => Err(guest::unexpected(&other)),
                    Err(cut) if cut.kind() == ErrorKind::Unavailable => {
                        self.again(cut).await.map(|again| {
                            stream = again;
                            vec![Wire::Overflow]
                        })
                    }
                    Err(error) => Err(error),
                };
                let over = match &result {
                    Ok(events) => events.contains(&Wire::End),
                    Err(_) => true,
                };
                let result = result.map_err(|error| error.with_sandbox(&self.shared.id));
                if self.give.send(result).await.is_err() || over {
                    return;
                }
            }
        };
        tokio::select! {
            () = pass => {}
            () = give.closed() => {}
        }
    }

    /// Goes on where the connection was cut, if the sandbox is the same.
    async fn again(&mut self, cut: Error) -> Result<Stream> {
        let deadline = tokio::time::Instant::now() + RECONNECT;
        let mut pause = Duration::from_millis(5);
        loop {
            let watched = async {
                let link = self.shared.link(&self.inner).await?;
                begin(&link, &self.request).await
            };
            let watched = watched.await;
            // After the new watch has begun, so that nothing falls between.
            self.check().await?;
            match watched {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Lost)
                        && !error.is_retryable() =>
                {
                    return Err(lost(error.message()).with_source(error));
                }
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(error),
                Err(_) if tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
                Err(_) => return Err(lost("the connection did not come back").with_source(cut)),
            }
        }
    }

    /// Whether the sandbox's files are still those that were watched.
    async fn check(&mut self) -> Result<()> {
        for event in self.inner.journal.read(&self.shared.id, self.seen).await? {
            let why = match event.known() {
                Some(Known::Rewound { .. }) => "the sandbox was rewound",
                Some(Known::Stopped | Known::Started { .. }) => "the sandbox was stopped",
                Some(Known::Ready { .. }) => "the sandbox got fresh files",
                Some(Known::Lost { .. } | Known::Recovered { .. }) => "its instance was lost",
                Some(Known::Expired { .. }) => "the sandbox's time was over",
                Some(Known::Destroyed | Known::Detached) => "the sandbox was destroyed",
                _ => continue,
            };
            return Err(lost(why));
        }
        Ok(())
    }
}

async fn begin(link: &Link, request: &FileRequest) -> Result<Stream> {
    let mut stream = link.open(Request::File(request.clone())).await?;
    match guest::answered(guest::response(&mut stream)).await? {
        Response::Done(_) => Ok(stream),
        other => Err(guest::unexpected(&other)),
    }
}

fn lost(why: &str) -> Error {
    Error::new(ErrorKind::Lost, "watch", format!("{why}; watch it anew"))
}

fn event(event: Wire) -> Option<FileEvent> {
    Some(match event {
        Wire::Created(path) => FileEvent::Created(local_path(path)),
        Wire::Modified(path) => FileEvent::Modified(local_path(path)),
        Wire::Removed(path) => FileEvent::Removed(local_path(path)),
        Wire::Renamed { from, to } => {
            FileEvent::Renamed { from: local_path(from), to: local_path(to) }
        }
        Wire::Overflow => FileEvent::Overflow,
        _ => return None,
    })
}
