//! Telling a client what changes below a path, as it happens.
//!
//! The kernel keeps so many events and no more; a client that takes them too slowly is told that some are
//! missing. The watch ends with its stream.

use std::{io, sync::Arc, time::Duration};

use sandbox_guest::{Done, Failure, FailureKind, FileEvent, Response, frame, mux::Stream};
use tokio::io::{Interest, ReadHalf, WriteHalf, unix::AsyncFd};

use super::{
    base::failure,
    files::{failed, locate, lost},
    guest::{Guest, MAX_WATCHES},
    sys,
    watcher::{self, Watcher},
};

/// How many bytes of paths are put into one message, roughly.
const MESSAGE: usize = 64 * 1024;

/// How long the second half of a renaming may take to come.
const HALF: Duration = Duration::from_millis(20);

type Answer = Result<Response, Failure>;

/// Tells what changes until the client lets go. What is returned is the last message.
pub(crate) async fn watch(
    guest: &Arc<Guest>,
    path: &[u8],
    recursive: bool,
    stream: &mut Stream,
) -> io::Result<Answer> {
    let Ok(_place) = guest.watches.try_acquire() else {
        let message = format!("there are {MAX_WATCHES} watches already, which is the limit");
        return Ok(Err(failure(FailureKind::LimitExceeded, message)));
    };
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let shown = path.clone();
    let made = guest.pool.run(move || Watcher::new(path, recursive)).await;
    let watcher = match made.unwrap_or_else(|| Err(lost())) {
        Ok(watcher) => watcher,
        Err(failure) => return Ok(Err(failure)),
    };
    let readable = match watcher.descriptor().and_then(|fd| sys::watch(fd, Interest::READABLE)) {
        Ok(readable) => readable,
        Err(error) => return Ok(Err(failed("watch", &shown, &error))),
    };
    frame::write_message(stream, &Response::Done(Done::default())).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    tokio::select! {
        // The client says nothing more: it lets go.
        () = until_closed(&mut reader) => Err(io::ErrorKind::UnexpectedEof.into()),
        told = tell(guest, watcher, readable, &mut writer) => told,
    }
}

async fn until_closed(reader: &mut ReadHalf<&mut Stream>) {
    while let Ok(Some(_)) = frame::read(reader).await {}
}

async fn tell(
    guest: &Arc<Guest>,
    mut watcher: Watcher,
    readable: AsyncFd<std::os::fd::OwnedFd>,
    writer: &mut WriteHalf<&mut Stream>,
) -> io::Result<Answer> {
    loop {
        let mut events = Vec::new();
        let ready = if watcher.has_half() {
            tokio::time::timeout(HALF, readable.readable()).await.ok()
        } else {
            Some(readable.readable().await)
        };
        match ready {
            None => watcher.give_up_half(&mut events),
            Some(ready) => {
                let mut ready = ready?;
                let collected = guest.pool.run(move || {
                    let drained = watcher.collect(&mut events);
                    (watcher, events, drained)
                });
                let Some((same, some, drained)) = collected.await else { return Ok(Err(lost())) };
                (watcher, events) = (same, some);
                if drained {
                    ready.clear_ready();
                }
            }
        }
        send(events, writer).await?;
        if watcher.is_over() {
            return Ok(Ok(Response::Events(vec![FileEvent::End])));
        }
    }
}

async fn send(events: Vec<FileEvent>, writer: &mut WriteHalf<&mut Stream>) -> io::Result<()> {
    let mut some = Vec::new();
    let mut size = 0;
    for event in events {
        size += watcher::size(&event);
        some.push(event);
        if size >= MESSAGE {
            size = 0;
            frame::write_message(writer, &Response::Events(std::mem::take(&mut some))).await?;
        }
    }
    if !some.is_empty() {
        frame::write_message(writer, &Response::Events(some)).await?;
    }
    Ok(())
}
