//! Connections without the engine in between: where its containers are processes of this host that we may look
//! into, a guest's socket is connected to as it is, and no byte passes the engine. Only our own containers: what
//! may be done in a borrowed one, its owner has decided.
//!
//! Where that cannot be, because the engine is elsewhere, this is an ordinary user, or a container's runtime
//! shows nothing of what is in it, the engine carries connections in, as it always can.

use std::{io, os::fd::AsRawFd};

use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use sandbox_core::{Error, ErrorKind, GuestStream, Result};
use tokio::{io::Interest, net::UnixStream};

use crate::{container::SOCKET, look, process::Process, shared::Shared, stream::PATIENCE};

const OPERATION: &str = "connect";

/// A running container's first process, if it can be told for certain which of this host's it is.
pub(crate) async fn process(shared: &Shared, container: &str) -> Option<Process> {
    if !shared.settings.direct {
        return None;
    }
    let found = look::container(shared, OPERATION, container).await.ok()??;
    let (id, state) = (found.id?, found.state?);
    if state.running != Some(true) || state.paused == Some(true) {
        return None;
    }
    match Process::of(&id, state.pid?) {
        Ok(process) => Some(process),
        Err(error) => {
            tracing::debug!(%error, container, "its processes are not this host's to see");
            None
        }
    }
}

/// A connection to the guest of one of our containers; `None` where only the engine can say how the container
/// is, or carry a connection into it.
///
/// # Errors
///
/// `Timeout` if somebody listens and says nothing.
pub(crate) async fn connect(shared: &Shared, container: &str) -> Result<Option<GuestStream>> {
    let Some(process) = process(shared, container).await else { return Ok(None) };
    match tokio::time::timeout(PATIENCE, reach(&process, SOCKET)).await {
        Ok(Ok(stream)) => Ok(Some(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%error, container, "the engine carries the connection");
            Ok(None)
        }
        Err(_) => {
            let message = format!("the guest did not answer within {} s", PATIENCE.as_secs());
            Err(Error::new(ErrorKind::Timeout, OPERATION, message))
        }
    }
}

/// Connects, and waits until the guest has begun to speak: to whom it does not take it says nothing.
async fn reach(process: &Process, socket: &str) -> io::Result<UnixStream> {
    let found = process.socket(socket)?;
    // By its descriptor: its path may be too long for an address, and lead elsewhere by now.
    let stream = UnixStream::connect(format!("/proc/self/fd/{}", found.as_raw_fd())).await?;
    let there = stream.peer_cred()?.pid().unwrap_or_default();
    if there != process.number() {
        let message = format!("process {there}, which listens at {socket}, is not the guest");
        return Err(io::Error::other(message));
    }
    loop {
        stream.readable().await?;
        let begun = stream.try_io(Interest::READABLE, || {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            recv(&stream, &mut [0; 1][..], flags).map(|(_, count)| count).map_err(Errno::into)
        });
        match begun {
            Ok(0) => return Err(io::Error::other("the guest does not take this user")),
            Ok(_) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncWriteExt, net::UnixListener};

    use super::*;

    fn bind(dir: &tempfile::TempDir) -> (UnixListener, String) {
        let path = dir.path().join("socket");
        (UnixListener::bind(&path).unwrap(), path.to_str().unwrap().to_owned())
    }

    #[tokio::test]
    async fn whoever_speaks_is_connected_to() {
        // A path that is too long for an address.
        let dir = tempfile::Builder::new().prefix(&"long".repeat(30)).tempdir().unwrap();
        let short = tempfile::tempdir().unwrap();
        let (listener, path) = bind(&short);
        let long = dir.path().join("socket").to_str().unwrap().to_owned();
        std::fs::rename(path, &long).unwrap();
        let speaks = async {
            let (mut there, _) = listener.accept().await.unwrap();
            there.write_all(b"SBX").await.unwrap();
            there
        };
        let ourselves = Process::ourselves();
        let (stream, _there) = tokio::join!(reach(&ourselves, &long), speaks);
        let mut first = [0; 3];
        tokio::io::AsyncReadExt::read_exact(&mut stream.unwrap(), &mut first).await.unwrap();
        assert_eq!(&first, b"SBX", "nothing of it is lost");
    }

    #[tokio::test]
    async fn whoever_hangs_up_takes_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (listener, path) = bind(&dir);
        let hangs_up = async { drop(listener.accept().await.unwrap()) };
        let ourselves = Process::ourselves();
        let (stream, ()) = tokio::join!(reach(&ourselves, &path), hangs_up);
        assert!(stream.unwrap_err().to_string().contains("does not take"));
    }

    #[tokio::test]
    async fn somebody_else_is_not_spoken_to() {
        let dir = tempfile::tempdir().unwrap();
        let (_listener, path) = bind(&dir);
        let mut child = tokio::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let other = Process::held_by_number(child.id().unwrap());
        let error = reach(&other, &path).await.unwrap_err();
        assert!(error.to_string().contains("is not the guest"), "{error}");
        drop(child.stdin.take());
        child.wait().await.unwrap();
    }
}
