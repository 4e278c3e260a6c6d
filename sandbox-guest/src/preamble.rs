//! The eight bytes with which both sides begin: `SBXGUEST`'s short form and the protocol's version.
//!
//! They tell a guest from a shell's error message, a login banner or a wrong port before any of it is
//! taken for a frame.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::PROTOCOL_VERSION;

const MAGIC: [u8; 6] = *b"SBXGST";

/// Sends our preamble and checks the other side's.
///
/// # Errors
///
/// `InvalidData` if what arrives is not a guest's preamble (the message quotes it) or is of a protocol
/// version that is not ours; otherwise the stream's own error. The caller bounds the wait.
pub async fn exchange<S>(stream: &mut S) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut ours = [0; 8];
    ours[..6].copy_from_slice(&MAGIC);
    ours[6..].copy_from_slice(&PROTOCOL_VERSION.to_be_bytes());
    stream.write_all(&ours).await?;
    stream.flush().await?;

    let mut theirs = [0; 8];
    stream.read_exact(&mut theirs).await?;
    if theirs[..6] != MAGIC {
        let text = String::from_utf8_lossy(&theirs);
        let message = format!("not a sandbox guest: the stream begins with {text:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let version = u16::from_be_bytes([theirs[6], theirs[7]]);
    if version != PROTOCOL_VERSION {
        let message = format!(
            "the other side speaks guest protocol {version}, this one speaks {PROTOCOL_VERSION}: \
             use a core and a guest of the same release"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_sides_agree() {
        let (mut a, mut b) = tokio::io::duplex(64);
        let (left, right) = tokio::join!(exchange(&mut a), exchange(&mut b));
        left.unwrap();
        right.unwrap();
    }

    #[tokio::test]
    async fn a_banner_is_quoted() {
        let (mut a, mut b) = tokio::io::duplex(64);
        b.write_all(b"bash: sandbox-guest: not found").await.unwrap();
        let error = exchange(&mut a).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("bash: sa"), "{error}");
    }
}
