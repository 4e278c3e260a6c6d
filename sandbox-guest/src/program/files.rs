//! File operations that are one answer, and listings.

use std::{
    ffi::OsString,
    fs::{self, Metadata, ReadDir},
    io,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use sandbox_guest::{
    Bytes, Done, Entry, Failure, FailureKind, FileInfo, FileKind, FileRequest, Response, frame,
    mux::Stream,
};

use super::{
    base::{failure, system},
    guest::Guest,
    spawn::absolute,
    tree_copy, tree_remove,
};

/// Entries of one message.
const BATCH: usize = 512;

type Answer = Result<Response, Failure>;

/// Renames what the filesystem cannot: another mount's, or a directory of an overlay's lower layers. A
/// copy appears as a whole under the new name; then the old one goes.
fn move_over(from: &Path, to: &Path) -> io::Result<()> {
    let name = to.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let copy = to.with_file_name(format!(".{name}.moving-{}", std::process::id()));
    tree_copy::copy(from, &copy).map_err(io::Error::other)?;
    if let Err(error) = fs::rename(&copy, to) {
        let _ = tree_remove::remove_all(&copy);
        return Err(error);
    }
    tree_remove::remove_all(from)
}

/// Where a request's path leads.
pub(crate) fn locate(guest: &Guest, path: &[u8]) -> Result<PathBuf, Failure> {
    if path.is_empty() || path.contains(&0) {
        let message = "a path must not be empty or contain a NUL byte";
        return Err(failure(FailureKind::Invalid, message));
    }
    Ok(PathBuf::from(OsString::from_vec(absolute(guest, path))))
}

/// The failure of a file operation, with the path.
pub(crate) fn failed(verb: &str, path: &Path, error: &io::Error) -> Failure {
    system(&format!("{verb} {}", path.display()), error)
}

/// What is known when a worker is lost.
pub(crate) fn lost() -> Failure {
    failure(FailureKind::System, "the guest could not do the work")
}

/// Anything but reading, writing and listing.
pub(crate) async fn simple(guest: &Arc<Guest>, request: FileRequest) -> Answer {
    let here = Arc::clone(guest);
    guest.pool.run(move || work(&here, &request)).await.unwrap_or_else(|| Err(lost()))
}

fn work(guest: &Guest, request: &FileRequest) -> Answer {
    let done = Response::Done(Done::default());
    match request {
        FileRequest::Stat { path, follow } => {
            let path = locate(guest, path)?;
            let metadata = if *follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
            let metadata = metadata.map_err(|error| failed("look at", &path, &error))?;
            return Ok(Response::File(info(&path, &metadata)));
        }
        FileRequest::MakeDir { path, parents, mode } => {
            make_dir(&locate(guest, path)?, *parents, mode.unwrap_or(0o755))?;
        }
        FileRequest::Remove { path, recursive } => remove(&locate(guest, path)?, *recursive)?,
        FileRequest::Rename { from, to } => {
            let (from, to) = (locate(guest, from)?, locate(guest, to)?);
            let renamed = match fs::rename(&from, &to) {
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                    move_over(&from, &to)
                }
                renamed => renamed,
            };
            renamed.map_err(|error| {
                let verb = format!("rename {} to", from.display());
                failed(&verb, &to, &error)
            })?;
        }
        FileRequest::Symlink { target, path } => {
            let path = locate(guest, path)?;
            let target = Path::new(std::ffi::OsStr::from_bytes(target));
            std::os::unix::fs::symlink(target, &path)
                .map_err(|error| failed("make the symbolic link", &path, &error))?;
        }
        FileRequest::SetMode { path, mode } => {
            let path = locate(guest, path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))
                .map_err(|error| failed("set the mode of", &path, &error))?;
        }
        FileRequest::Canonicalize { path } => {
            let path = locate(guest, path)?;
            let led = fs::canonicalize(&path).map_err(|error| failed("follow", &path, &error))?;
            return Ok(Response::Path(Bytes::from(led.into_os_string().into_vec())));
        }
        _ => {
            let message = "the guest does not know this file request";
            return Err(failure(FailureKind::Unsupported, message));
        }
    }
    Ok(done)
}

fn make_dir(path: &Path, parents: bool, mode: u32) -> Result<(), Failure> {
    let failed = |error: io::Error| failed("make the directory", path, &error);
    if parents {
        if path.is_dir() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
    }
    match fs::create_dir(path) {
        // Another made it at the same time.
        Err(error) if parents && error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(());
        }
        made => made.map_err(failed)?,
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777)).map_err(failed)
}

fn remove(path: &Path, recursive: bool) -> Result<(), Failure> {
    let removed = if recursive {
        tree_remove::remove_all(path)
    } else {
        fs::symlink_metadata(path).and_then(|metadata| {
            if metadata.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) }
        })
    };
    removed.map_err(|error| failed("remove", path, &error))
}

/// Sends a directory's entries; the last message is returned.
pub(crate) async fn list(
    guest: &Arc<Guest>,
    path: &[u8],
    stream: &mut Stream,
) -> io::Result<Answer> {
    let path = match locate(guest, path) {
        Ok(path) => path,
        Err(failure) => return Ok(Err(failure)),
    };
    let mut listing = None;
    loop {
        let at = path.clone();
        let worked = guest.pool.run(move || next_batch(&at, listing)).await;
        match worked.unwrap_or_else(|| Err(lost())) {
            Ok((entries, more)) => {
                if !entries.is_empty() {
                    frame::write_message(stream, &Response::Entries(entries)).await?;
                }
                if more.is_none() {
                    return Ok(Ok(Response::Done(Done::default())));
                }
                listing = more;
            }
            Err(failure) => return Ok(Err(failure)),
        }
    }
}

/// Some entries, and the listing unless it is at its end.
fn next_batch(
    path: &Path,
    listing: Option<ReadDir>,
) -> Result<(Vec<Entry>, Option<ReadDir>), Failure> {
    let failed = |error: io::Error| failed("list", path, &error);
    let mut listing = match listing {
        Some(listing) => listing,
        None => fs::read_dir(path).map_err(failed)?,
    };
    let mut entries = Vec::new();
    while entries.len() < BATCH {
        let Some(entry) = listing.next() else { return Ok((entries, None)) };
        let entry = entry.map_err(failed)?;
        // What went away meanwhile is no entry any more.
        let Ok(metadata) = entry.metadata() else { continue };
        let name = Bytes::from(entry.file_name().into_vec());
        entries.push(Entry { name, info: info(&entry.path(), &metadata) });
    }
    Ok((entries, Some(listing)))
}

/// Metadata as the wire has it.
pub(crate) fn info(path: &Path, metadata: &Metadata) -> FileInfo {
    let kind = metadata.file_type();
    let kind = if kind.is_file() {
        FileKind::File
    } else if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_symlink() {
        FileKind::Symlink
    } else {
        FileKind::Other
    };
    let target = (kind == FileKind::Symlink).then(|| fs::read_link(path).ok()).flatten();
    FileInfo {
        kind,
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
        target: target.map(|target| Bytes::from(target.into_os_string().into_vec())),
    }
}

/// Refuses what has no contents to read or replace.
pub(crate) fn check_readable(path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let kind = metadata.file_type();
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        return Ok(());
    };
    Err(failure(FailureKind::WrongType, format!("{} is {what}", path.display())))
}
