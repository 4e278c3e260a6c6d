//! Files and trees that come and go, with constant memory. Reading and writing files takes place beside
//! the work of the connection, each waiting for the other only where it must.

use std::{io, sync::Arc};

use sandbox_guest::{
    Done, Existing, Failure, Input, Response,
    frame::{self, Channel, Frame},
    mux::Stream,
    tree::{Links, Piece, Source, SourceOptions, Target, TargetOptions},
};
use tokio::io::AsyncWriteExt;

use super::{
    files::{locate, lost},
    guest::Guest,
};

/// How much is gathered before it is written.
const GATHER: usize = 256 * 1024;

type Answer = Result<Response, Failure>;

/// Sends a file or a tree; the last message is returned.
pub(crate) async fn download(
    guest: &Arc<Guest>,
    path: &[u8],
    skip_special: bool,
    stream: &mut Stream,
) -> io::Result<Answer> {
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let options = SourceOptions {
        skip_special,
        channel: Channel::Out,
        encode: |record| frame::encode(&Response::Tree(record)),
    };
    let opened = guest.pool.run(move || fill(Source::open(&path, options)?, Vec::new()));
    let mut filled = opened.await.unwrap_or_else(|| Err(lost()));
    let mut spare = Vec::new();
    loop {
        guest.touch();
        let (source, frames, more) = match filled {
            Ok(filled) => filled,
            Err(failure) => return Ok(Err(failure)),
        };
        if !more {
            stream.write_all(&frames).await?;
            return Ok(Ok(Response::Done(Done { bytes: source.totals().bytes })));
        }
        // The next pieces are read while these are sent.
        let next = guest.pool.run(move || fill(source, spare));
        let (sent, next) = tokio::join!(stream.write_all(&frames), next);
        sent?;
        filled = next.unwrap_or_else(|| Err(lost()));
        spare = frames;
    }
}

fn fill(mut source: Source, mut frames: Vec<u8>) -> Result<(Source, Vec<u8>, bool), Failure> {
    frames.clear();
    let more = source.fill(&mut frames)?;
    Ok((source, frames, more))
}

/// Takes a file or a tree; the last message is returned. If the client goes away first, nothing is left.
pub(crate) async fn upload(
    guest: &Arc<Guest>,
    path: &[u8],
    existing: Existing,
    stream: &mut Stream,
) -> io::Result<Answer> {
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let options = TargetOptions {
        existing,
        parents: true,
        modes: 0o7777,
        links: Links::All,
        // The sandbox's own limits are what bounds it.
        max_entries: u64::MAX,
        max_bytes: u64::MAX,
    };
    let created = guest.pool.run(move || Target::create(&path, options)).await;
    let mut target = match created.unwrap_or_else(|| Err(lost())) {
        Ok(target) => target,
        Err(failure) => return Ok(Err(failure)),
    };
    let mut next = gather(stream).await;
    loop {
        guest.touch();
        let (pieces, ended) = match next {
            Ok(batch) => batch,
            Err(error) => {
                // The rest will not come: what has is removed.
                guest.pool.run(move || drop(target)).await;
                return Err(error);
            }
        };
        if ended {
            let done = guest.pool.run(move || take(target, pieces)?.commit());
            let totals = done.await.unwrap_or_else(|| Err(lost()));
            return Ok(totals.map(|totals| Response::Done(Done { bytes: totals.bytes })));
        }
        // The next pieces come in while these are written.
        let work = guest.pool.run(move || take(target, pieces));
        let (worked, following) = tokio::join!(work, gather(stream));
        target = match worked.unwrap_or_else(|| Err(lost())) {
            Ok(target) => target,
            Err(failure) => return Ok(Err(failure)),
        };
        next = following;
    }
}

fn take(mut target: Target, pieces: Vec<Piece>) -> Result<Target, Failure> {
    for piece in pieces {
        target.take(&piece)?;
    }
    Ok(target)
}

/// Pieces up to an amount that is worth the work, and whether those are all.
async fn gather(stream: &mut Stream) -> io::Result<(Vec<Piece>, bool)> {
    let (mut pieces, mut size) = (Vec::new(), 0);
    while size < GATHER {
        let piece = match frame::read(stream).await? {
            Some(Frame::Data(Channel::In, data)) => {
                size += data.len();
                Piece::Data(data)
            }
            Some(Frame::Message(message)) => match frame::decode(&message)? {
                Input::Tree(record) => Piece::Record(record),
                _ => continue,
            },
            // Gone before the end.
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        size += Piece::OVERHEAD;
        let ended = piece.is_end();
        pieces.push(piece);
        if ended {
            return Ok((pieces, true));
        }
    }
    Ok((pieces, false))
}
