//! A bridge between standard input and output and a Unix socket, for transports that offer only those.

use std::{io, path::Path};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
};

use super::guest::errno_text;

/// Carries bytes both ways until the socket's side has ended.
pub(crate) fn main(path: &Path) -> Result<(), String> {
    let name = |error: io::Error| format!("connect to {}: {}", path.display(), errno_text(&error));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(name)?;
    let done = runtime.block_on(async {
        let socket = UnixStream::connect(path).await?;
        let (mut from, mut to) = socket.into_split();
        let mut stdin = stdio(0)?;
        let mut stdout = stdio(1)?;
        // The end of our input is passed on; the end of theirs is the end.
        let there = async {
            let done = pass(&mut stdin, &mut to).await;
            let _ = to.shutdown().await;
            done
        };
        let back = pass(&mut from, &mut stdout);
        tokio::pin!(there, back);
        tokio::select! {
            done = &mut back => done,
            done = &mut there => match done {
                Ok(()) => back.await,
                Err(error) => Err(error),
            },
        }
    });
    runtime.shutdown_background();
    done.map_err(name)
}

async fn pass<R, W>(from: &mut R, to: &mut W) -> io::Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..count]).await?;
        to.flush().await?;
    }
}
