//! One process that speaks to the proxy.

use std::{io, sync::Arc, time::Duration};

use sandbox_guest::{
    carry,
    frame::{self, Channel},
    mux::Stream,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use super::{
    Answer, Egress,
    head::{self, MAX_HEAD, Wanted},
};

/// How many connections there may be at once.
const MAX_CLIENTS: usize = 128;

/// How long a process may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a harness may take to answer. It gives up earlier by itself.
const ANSWER: Duration = Duration::from_secs(60);

/// How long a connection may be quiet.
const IDLE: Duration = Duration::from_secs(15 * 60);

/// Serves every process that connects, for ever.
pub(super) async fn accept(egress: Arc<Egress>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    let refusals = Arc::new(Semaphore::new(MAX_CLIENTS));
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            // Out of descriptors, most likely: some will come back.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            // Beyond as many again nothing is said either.
            if let Ok(place) = Arc::clone(&refusals).try_acquire_owned() {
                tokio::spawn(async move {
                    let why = format!("{MAX_CLIENTS} connections are open, which is the limit");
                    let _ = refuse(socket, 503, &why).await;
                    drop(place);
                });
            }
            continue;
        };
        let egress = Arc::clone(&egress);
        tokio::spawn(async move {
            let _ = serve(&egress, socket).await;
            drop(place);
        });
    }
}

async fn serve(egress: &Egress, mut socket: TcpStream) -> io::Result<()> {
    // What is small and waits for an answer must not wait for more of it.
    let _ = socket.set_nodelay(true);
    let mut bytes = Vec::new();
    let asked = tokio::time::timeout(PATIENCE, ask(&mut socket, &mut bytes)).await;
    let asked = asked.unwrap_or(Ok(Err((408, "the request took too long"))));
    let wanted = match asked? {
        Ok(wanted) => wanted,
        Err((status, why)) => return refuse(socket, status, why).await,
    };
    let (host, port) = (wanted.host.clone(), wanted.port);
    let answer = tokio::time::timeout(ANSWER, egress.ask(host, port)).await;
    match answer {
        Ok(Some(Answer::Connected(stream))) => connected(socket, stream, &wanted, &bytes).await,
        Ok(Some(Answer::Refused { denied, reason })) => {
            refuse(socket, if denied { 403 } else { 502 }, &reason).await
        }
        Ok(None) => refuse(socket, 503, "no harness is there that would let it out").await,
        Err(_) => refuse(socket, 504, "the harness has not answered").await,
    }
}

/// Reads what a process wants; what it has sent beyond that stays in `bytes`.
async fn ask(
    socket: &mut TcpStream,
    bytes: &mut Vec<u8>,
) -> io::Result<Result<Wanted, head::Refusal>> {
    loop {
        match head::parse(bytes) {
            Ok(Some((wanted, length))) => {
                bytes.drain(..length);
                return Ok(Ok(wanted));
            }
            Ok(None) => {}
            Err(refusal) => return Ok(Err(refusal)),
        }
        let room = (MAX_HEAD - bytes.len()) as u64;
        if socket.take(room).read_buf(bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Carries a connection that stands.
async fn connected(
    mut socket: TcpStream,
    mut stream: Stream,
    wanted: &Wanted,
    rest: &[u8],
) -> io::Result<()> {
    if wanted.tunnel {
        socket.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    }
    for first in [&wanted.first, rest] {
        frame::write_data(&mut stream, Channel::Out, first).await?;
    }
    stream.flush().await?;
    let carried = carry(&mut socket, stream, Channel::Out, IDLE).await;
    if carried.is_err() {
        // What was cut must not look like an end.
        let _ = socket.set_zero_linger();
    }
    carried
}

/// Tells a process why there is no connection.
async fn refuse(mut socket: TcpStream, status: u16, why: &str) -> io::Result<()> {
    let tell = async {
        socket.write_all(&response(status, why)).await?;
        socket.shutdown().await?;
        // What it still sends would otherwise make the answer be thrown away.
        let mut left = [0; 4096];
        for _ in 0..256 {
            if socket.read(&mut left).await? == 0 {
                break;
            }
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(5), tell).await.unwrap_or(Ok(()))
}

fn response(status: u16, why: &str) -> Vec<u8> {
    let phrase = match status {
        400 => "Bad Request",
        403 => "Forbidden",
        408 => "Request Timeout",
        431 => "Request Header Fields Too Large",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Gateway Timeout",
    };
    // One line of text, whatever is in it.
    let why: String = why.chars().filter(|c| !c.is_control()).take(500).collect();
    let body = format!("sandbox: {why}\n");
    format!(
        "HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_cannot_be_more_than_a_line() {
        let text = String::from_utf8(response(403, "a\r\nSet-Cookie: b\n")).unwrap();
        assert!(text.ends_with("\r\n\r\nsandbox: aSet-Cookie: b\n"), "{text:?}");
        assert!(text.starts_with("HTTP/1.1 403 Forbidden\r\n"));
        assert!(response(502, &"x".repeat(100_000)).len() < 1000);
    }
}
