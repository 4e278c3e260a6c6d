//! The bytes of a connection over a stream of frames, the same code on both sides.
//!
//! Each direction is data frames and then [`Input::End`], and ends by itself: a connection may be half closed.
//! A stream that ends without that was cut, which is never taken for the connection's own end.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::Instant,
};

use crate::{
    Input,
    frame::{self, Channel, Frame},
};

/// How much is read from the connection at once.
const PIECE: usize = 32 * 1024;

/// Carries bytes both ways until both directions have ended, or nothing has come for `idle`. What is read
/// from the connection goes out on the channel `sends`.
///
/// # Errors
///
/// `UnexpectedEof` if the stream was cut, `InvalidData` if the other side broke the protocol, `TimedOut` if
/// nothing came; otherwise the connection's own error. Dropping the stream then tells the other side.
pub async fn carry<C, S>(connection: C, stream: S, sends: Channel, idle: Duration) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from, mut to) = tokio::io::split(connection);
    let (mut reader, mut writer) = tokio::io::split(stream);
    let began = Instant::now();
    let last = AtomicU64::new(0);
    let note = || {
        let now = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        last.store(now, Ordering::Relaxed);
    };
    let out = async {
        let mut piece = vec![0; PIECE];
        loop {
            let count = from.read(&mut piece).await?;
            note();
            if count == 0 {
                return frame::write_message(&mut writer, &Input::End).await;
            }
            frame::write_data(&mut writer, sends, &piece[..count]).await?;
            writer.flush().await?;
        }
    };
    let back = async {
        loop {
            match frame::read(&mut reader).await? {
                Some(Frame::Data(_, bytes)) => {
                    note();
                    to.write_all(&bytes).await?;
                }
                Some(Frame::Message(message)) => match frame::decode(&message)? {
                    Input::End => return to.shutdown().await,
                    _ => return Err(io::ErrorKind::InvalidData.into()),
                },
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    };
    let quiet = async {
        loop {
            let until = began + Duration::from_millis(last.load(Ordering::Relaxed)) + idle;
            if until <= Instant::now() {
                return io::Error::from(io::ErrorKind::TimedOut);
            }
            tokio::time::sleep_until(until).await;
        }
    };
    tokio::select! {
        both = async { tokio::try_join!(out, back) } => both.map(drop),
        error = quiet => Err(error),
    }?;
    // Nothing is to come, but the stream is only let go of once the other side has had all of it.
    writer.shutdown().await?;
    let rest = async { while reader.read(&mut [0; 64]).await.is_ok_and(|count| count > 0) {} };
    let _ = tokio::time::timeout(Duration::from_secs(10), rest).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    /// Both ends of a connection that is carried over a stream.
    fn carried(
        idle: Duration,
    ) -> (DuplexStream, DuplexStream, tokio::task::JoinHandle<[io::Result<()>; 2]>) {
        let ((here, a), (b, there)) = (duplex(1000), duplex(1000));
        let (left, right) = duplex(5000);
        let one = tokio::spawn(carry(a, left, Channel::Out, idle));
        let other = tokio::spawn(carry(b, right, Channel::In, idle));
        let both = tokio::spawn(async { [one.await.unwrap(), other.await.unwrap()] });
        (here, there, both)
    }

    #[tokio::test]
    async fn each_direction_ends_by_itself() {
        let (mut here, mut there, both) = carried(LONG);
        let sent: Vec<u8> = (0..300_000_u32).map(|n| n as u8).collect();
        let echo = tokio::spawn(async move {
            let mut got = Vec::new();
            there.read_to_end(&mut got).await.unwrap();
            // The other direction is still open.
            there.write_all(b"got it all").await.unwrap();
            got
        });
        here.write_all(&sent).await.unwrap();
        here.shutdown().await.unwrap();
        let mut answer = String::new();
        here.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "got it all");
        assert!(echo.await.unwrap() == sent);
        assert!(both.await.unwrap().iter().all(Result::is_ok));
    }

    #[tokio::test]
    async fn a_cut_is_no_end() {
        let ((mut here, a), (left, mut right)) = (duplex(1000), duplex(1000));
        let carrying = tokio::spawn(carry(a, left, Channel::Out, LONG));
        frame::write_data(&mut right, Channel::In, b"some").await.unwrap();
        let mut some = [0; 4];
        here.read_exact(&mut some).await.unwrap();
        drop(right);
        let error = carrying.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_is_no_end_is_refused() {
        let ((_here, a), (left, mut right)) = (duplex(1000), duplex(1000));
        let carrying = tokio::spawn(carry(a, left, Channel::Out, LONG));
        frame::write_message(&mut right, &Input::Detach).await.unwrap();
        let error = carrying.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_quiet_for_too_long_is_let_go() {
        let (mut here, _there, both) = carried(Duration::from_secs(10));
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs(8)).await;
        here.write_all(b"x").await.unwrap();
        let [one, _] = both.await.unwrap();
        assert_eq!(one.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_secs(18));
    }
}
