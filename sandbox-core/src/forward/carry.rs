//! One connection: what comes on either side is passed on to the other.

use std::io;

use sandbox_guest::{
    Input, Response,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};

/// How much is read from a client at once, in bytes.
const PIECE: usize = 32 * 1024;

/// A client's connection. It is reset when this is dropped before the service's end was passed on: the client
/// is not to take that for the end of what was said.
#[derive(Debug)]
pub(super) struct Local {
    socket: TcpStream,
    ended: bool,
}

impl Local {
    pub(super) fn new(socket: TcpStream) -> Self {
        // What is small and waits for an answer must not wait for more of it.
        let _ = socket.set_nodelay(true);
        Self { socket, ended: false }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.socket.set_zero_linger();
        }
    }
}

/// Passes on what comes on either side, until both have said all, or one breaks off.
///
/// # Errors
///
/// What broke it off.
pub(super) async fn carry(mut local: Local, mut stream: Stream) -> io::Result<()> {
    {
        let (mut from, mut to) = local.socket.split();
        let (mut reader, mut writer) = tokio::io::split(&mut stream);
        let mut inward = std::pin::pin!(pass_in(&mut from, &mut writer));
        let mut outward = std::pin::pin!(pass_out(&mut reader, &mut to));
        tokio::select! {
            all = &mut inward => {
                all?;
                outward.await?;
                local.ended = true;
            }
            all = &mut outward => {
                all?;
                local.ended = true;
                inward.await?;
            }
        }
    }
    stream.shutdown().await
}

/// Passes on what the client says, and that it has said all.
async fn pass_in(
    from: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece).await? {
            0 => return frame::write_message(writer, &Input::End).await,
            count => {
                frame::write_data(writer, Channel::In, &piece[..count]).await?;
                writer.flush().await?;
            }
        }
    }
}

/// Passes on what the service says, until it has said all.
async fn pass_out(
    reader: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    loop {
        match frame::read(reader).await? {
            Some(Frame::Data(Channel::Out, bytes)) => to.write_all(&bytes).await?,
            Some(Frame::Message(message)) => match frame::decode(&message)? {
                Response::Done(_) => return to.shutdown().await,
                Response::Failed(failure) => return Err(io::Error::other(failure)),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            },
            Some(Frame::Data(..)) => return Err(io::ErrorKind::InvalidData.into()),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
