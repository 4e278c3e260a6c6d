//! Connections that are carried to a port of the sandbox's own loopback, and to nothing else.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use sandbox_guest::{
    Done, Failure, FailureKind, Input, Response, errno_text,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    sync::OwnedSemaphorePermit,
};

use super::{
    base::failure,
    guest::{Guest, MAX_FORWARDS},
};

/// How long a connection to the loopback may take: it is there at once, or its listener takes none.
const PATIENCE: Duration = Duration::from_secs(10);

/// How much is read from a service at once, in bytes.
const PIECE: usize = 32 * 1024;

/// Where services listen, in the order in which they are tried.
const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// A connection to a service in the sandbox.
pub(crate) struct Carried {
    socket: TcpStream,
    _place: OwnedSemaphorePermit,
}

/// Connects to a port of the loopback.
pub(crate) async fn connect(guest: &Guest, port: u16) -> Result<Carried, Failure> {
    let Ok(place) = Arc::clone(&guest.forwards).try_acquire_owned() else {
        let message = format!("{MAX_FORWARDS} connections are carried already, which is the limit");
        return Err(failure(FailureKind::LimitExceeded, message));
    };
    let mut first = None;
    for address in LOOPBACK {
        let to = SocketAddr::new(address, port);
        let error = match tokio::time::timeout(PATIENCE, TcpStream::connect(to)).await {
            Ok(Ok(socket)) => {
                // What is small and waits for an answer must not wait for more of it.
                let _ = socket.set_nodelay(true);
                return Ok(Carried { socket, _place: place });
            }
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        first.get_or_insert(error);
    }
    Err(first.map_or_else(|| failure(FailureKind::System, "no loopback"), |e| refused(port, &e)))
}

fn refused(port: u16, error: &io::Error) -> Failure {
    let (kind, why) = match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            (FailureKind::NotFound, "nothing listens there".to_owned())
        }
        io::ErrorKind::TimedOut => {
            (FailureKind::System, "what listens there takes no connection".to_owned())
        }
        _ => (FailureKind::System, errno_text(error)),
    };
    let message = format!("no connection to port {port} of the sandbox's loopback: {why}");
    Failure { kind, message, errno: error.raw_os_error() }
}

impl Carried {
    /// Passes on what comes on either side, until both have said all, or one lets go.
    pub(crate) async fn serve(mut self, mut stream: Stream) -> io::Result<()> {
        frame::write_message(&mut stream, &Response::Connected).await?;
        let sides = Sides::default();
        let carried = self.pass_on(&mut stream, &sides).await;
        if carried.is_err() && !sides.client_ended.load(Relaxed) {
            // The service is not to take this for the end of what was said.
            let _ = self.socket.set_zero_linger();
        }
        carried
    }

    async fn pass_on(&mut self, stream: &mut Stream, sides: &Sides) -> io::Result<()> {
        let (mut from, mut to) = self.socket.split();
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut inward = std::pin::pin!(sides.pass_in(&mut reader, &mut to));
        tokio::select! {
            gone = &mut inward => return gone.and(Err(io::ErrorKind::UnexpectedEof.into())),
            all = pass_out(&mut from, &mut writer) => all?,
        }
        sides.service_ended.store(true, Relaxed);
        if sides.service_is_deaf.load(Relaxed) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // The client may go on for as long as the service listens.
        inward.await?;
        writer.shutdown().await
    }
}

/// How far the two sides of a connection have come.
#[derive(Default)]
struct Sides {
    /// The client has said all.
    client_ended: AtomicBool,
    /// The service has said all.
    service_ended: AtomicBool,
    /// The service takes nothing more.
    service_is_deaf: AtomicBool,
}

impl Sides {
    /// Passes on what the client says, until it lets go. It says before that if that was all.
    async fn pass_in(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> io::Result<()> {
        loop {
            let ended = self.client_ended.load(Relaxed);
            let passed = match frame::read(reader).await? {
                None if ended => return Ok(()),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Frame::Data(Channel::In, _)) if self.service_is_deaf.load(Relaxed) => continue,
                Some(Frame::Data(Channel::In, bytes)) if !ended => to.write_all(&bytes).await,
                Some(Frame::Message(message)) if !ended => match frame::decode(&message)? {
                    Input::End => {
                        self.client_ended.store(true, Relaxed);
                        to.shutdown().await
                    }
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                },
                Some(_) => return Err(io::ErrorKind::InvalidData.into()),
            };
            match passed {
                Ok(()) => {}
                Err(error) if self.service_ended.load(Relaxed) => return Err(error),
                // It may have more to say. The client is read on, to see when it lets go.
                Err(_) => self.service_is_deaf.store(true, Relaxed),
            }
        }
    }
}

/// Passes on what the service says, and that it has said all.
async fn pass_out(
    from: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece).await {
            Ok(0) => return frame::write_message(writer, &Response::Done(Done::default())).await,
            Ok(count) => {
                frame::write_data(writer, Channel::Out, &piece[..count]).await?;
                writer.flush().await?;
            }
            Err(error) => {
                let message = "the service broke the connection off";
                let failed = Response::Failed(failure(FailureKind::System, message));
                frame::write_message(writer, &failed).await?;
                return Err(error);
            }
        }
    }
}
