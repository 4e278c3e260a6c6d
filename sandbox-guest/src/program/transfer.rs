//! Reading and writing files, in pieces, with constant memory.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use sandbox_guest::{
    Done, Failure, FailureKind, FileInfo, Input, Response,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::io::AsyncWriteExt;

use super::{
    base::failure,
    files::{check_readable, failed, info, locate, lost},
    guest::Guest,
};

/// Data of one frame: with its head it fits one packet of the connection.
const PIECE: usize = 64 * 1024 - frame::HEAD;

/// Frames that are read at once.
const PIECES: usize = 8;

/// What is gathered before it is written.
const GATHER: usize = 512 * 1024;

/// How long a chain of symbolic links may be.
const MAX_LINKS: usize = 40;

/// How the names of files begin that are not written to their ends.
pub(crate) const TEMPORARY: &str = ".sandbox-write-";

type Answer = Result<Response, Failure>;

/// A file being read.
struct Reader {
    file: File,
    path: PathBuf,
    left: u64,
    sent: u64,
}

impl Reader {
    fn open(path: PathBuf, offset: u64, length: Option<u64>) -> Result<(Self, FileInfo), Failure> {
        let failed = |error: io::Error| failed("read", &path, &error);
        // A FIFO must not hold up the worker.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let mut file =
            File::options().read(true).custom_flags(flags).open(&path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        check_readable(&path, &metadata)?;
        if offset > 0 {
            file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        }
        let info = info(&path, &metadata);
        Ok((Self { file, path, left: length.unwrap_or(u64::MAX), sent: 0 }, info))
    }

    /// The next frames, ready to be sent; none at the end.
    fn next(&mut self, frames: &mut Vec<u8>) -> Result<(), Failure> {
        frames.clear();
        for _ in 0..PIECES {
            let most = self.left.min(PIECE as u64);
            let start = frames.len();
            frames.extend_from_slice(&[0; frame::HEAD]);
            let count = (&mut self.file)
                .take(most)
                .read_to_end(frames)
                .map_err(|error| failed("read", &self.path, &error))?;
            if count == 0 {
                frames.truncate(start);
                break;
            }
            let head = frame::data_head(Channel::Out, count);
            frames[start..start + frame::HEAD].copy_from_slice(&head);
            self.left -= count as u64;
            self.sent += count as u64;
        }
        Ok(())
    }
}

/// Sends a file's contents; the last message is returned.
pub(crate) async fn read(
    guest: &Arc<Guest>,
    path: &[u8],
    offset: u64,
    length: Option<u64>,
    stream: &mut Stream,
) -> io::Result<Answer> {
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let opened = guest.pool.run(move || {
        let (mut reader, info) = Reader::open(path, offset, length)?;
        let mut frames = Vec::new();
        reader.next(&mut frames)?;
        Ok((reader, info, frames))
    });
    let (mut reader, info, mut frames) = match opened.await.unwrap_or_else(|| Err(lost())) {
        Ok(opened) => opened,
        Err(failure) => return Ok(Err(failure)),
    };
    stream.write_all(&frame::encode(&Response::File(info))?).await?;
    let mut spare = Vec::new();
    while !frames.is_empty() {
        guest.touch();
        if frames.len() < PIECE {
            // Short, and so the last.
            stream.write_all(&frames).await?;
            break;
        }
        // The next pieces are read while these are sent.
        let next = guest.pool.run(move || {
            let done = reader.next(&mut spare);
            (reader, spare, done)
        });
        let (sent, next) = tokio::join!(stream.write_all(&frames), next);
        sent?;
        let Some((same, filled, done)) = next else { return Ok(Err(lost())) };
        if let Err(failure) = done {
            return Ok(Err(failure));
        }
        reader = same;
        spare = std::mem::replace(&mut frames, filled);
    }
    Ok(Ok(Response::Done(Done { bytes: reader.sent })))
}

/// How a file is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteOptions {
    pub(crate) mode: Option<u32>,
    pub(crate) append: bool,
    pub(crate) parents: bool,
}

/// A file being written. Dropped before [`Writer::finish`], it leaves nothing.
struct Writer {
    file: File,
    path: PathBuf,
    temporary: Option<PathBuf>,
    /// Of a file that is replaced: mode and owner.
    replaces: Option<(u32, u32, u32)>,
    mode: u32,
}

impl Writer {
    fn open(path: &Path, options: WriteOptions) -> Result<Self, Failure> {
        let path = follow(path)?;
        let failed = |error: io::Error| failed("write", &path, &error);
        if options.parents
            && let Some(parent) = path.parent()
        {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        let existing = match fs::metadata(&path) {
            Ok(metadata) => {
                check_readable(&path, &metadata)?;
                Some(metadata)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        let mode = options.mode.unwrap_or(0o644) & 0o7777;
        let in_place = options.append || existing.as_ref().is_some_and(|file| !file.is_file());
        if in_place {
            let file = File::options()
                .append(true)
                .create(true)
                .mode(mode & 0o777)
                .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(&path)
                .map_err(failed)?;
            if existing.is_none() {
                file.set_permissions(fs::Permissions::from_mode(mode)).map_err(failed)?;
            }
            return Ok(Self { file, path, temporary: None, replaces: None, mode });
        }
        let temporary = temporary_beside(&path);
        let file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(failed)?;
        let replaces = existing.map(|file| (file.mode() & 0o7777, file.uid(), file.gid()));
        Ok(Self { file, path, temporary: Some(temporary), replaces, mode })
    }

    fn write(&mut self, data: &[u8]) -> Result<(), Failure> {
        self.file.write_all(data).map_err(|error| failed("write", &self.path, &error))
    }

    /// Puts the file in its place.
    fn finish(mut self) -> Result<(), Failure> {
        let Some(temporary) = self.temporary.take() else { return Ok(()) };
        let done = self.settle().and_then(|()| fs::rename(&temporary, &self.path));
        done.map_err(|error| {
            self.temporary = Some(temporary);
            failed("write", &self.path, &error)
        })
    }

    fn settle(&self) -> io::Result<()> {
        let mode = match self.replaces {
            Some((mode, uid, gid)) => {
                // Where it may not be given back, the writer owns it.
                let _ = std::os::unix::fs::fchown(&self.file, Some(uid), Some(gid));
                mode
            }
            None => self.mode,
        };
        self.file.set_permissions(fs::Permissions::from_mode(mode))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Where a path leads if its last part is a symbolic link, even to something that is not there yet.
fn follow(path: &Path) -> Result<PathBuf, Failure> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&path) else { return Ok(path) };
        path = match path.parent() {
            Some(parent) => parent.join(target),
            None => target,
        };
    }
    let message = format!("{}: too many symbolic links", path.display());
    Err(failure(FailureKind::Invalid, message))
}

fn temporary_beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = super::base::now_ms();
    path.with_file_name(format!("{TEMPORARY}{}-{time}-{count}", std::process::id()))
}

/// Writes what the client sends; the last message is returned. If the client goes away first, the file
/// is as it was.
pub(crate) async fn write(
    guest: &Arc<Guest>,
    path: &[u8],
    options: WriteOptions,
    stream: &mut Stream,
) -> io::Result<Answer> {
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let mut bytes = 0;
    let mut writer = None;
    loop {
        let (gathered, ended) = gather(stream).await?;
        guest.touch();
        bytes += gathered.len() as u64;
        let path = path.clone();
        let worked = guest.pool.run(move || {
            let mut writer = match writer {
                Some(writer) => writer,
                None => Writer::open(&path, options)?,
            };
            writer.write(&gathered)?;
            if ended { writer.finish().map(|()| None) } else { Ok(Some(writer)) }
        });
        match worked.await.unwrap_or_else(|| Err(lost())) {
            Ok(None) => return Ok(Ok(Response::Done(Done { bytes }))),
            Ok(more) => writer = more,
            Err(failure) => return Ok(Err(failure)),
        }
    }
}

/// Data up to an amount that is worth a write, and whether that is all.
async fn gather(stream: &mut Stream) -> io::Result<(Vec<u8>, bool)> {
    let mut gathered = Vec::new();
    loop {
        match frame::read(stream).await? {
            Some(Frame::Data(Channel::In, data)) => {
                if gathered.is_empty() {
                    gathered = data;
                } else {
                    gathered.extend(data);
                }
                if gathered.len() >= GATHER {
                    return Ok((gathered, false));
                }
            }
            Some(Frame::Message(message)) => {
                if matches!(frame::decode(&message)?, Input::End) {
                    return Ok((gathered, true));
                }
            }
            // Gone before the end.
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
