//! Bringing a directory of this machine to a host. Only what the host does not have is sent: first the
//! list of what there is, then the contents of the files that it asks for.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use sandbox_core::{Error, ErrorKind, Result};
use sandbox_host::message::{
    self, Answer, Entry, EntryKind, Isolation, Listed, Populated, Request,
};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};

use crate::{
    channel::Channel,
    error::{broken, nonsense},
    host::{Away, Host},
    links::Fault,
    upload::Telling,
};

const OPERATION: &str = "populate the workspace";
/// How many entries go into one message.
const BATCH: usize = 1000;
/// How much of a file is read at once.
const PIECE: usize = 256 * 1024;
/// How often to begin again because files changed while they were sent.
const TRIES: usize = 4;
/// What a workspace may hold; the host takes no more.
const MOST: usize = 5_000_000;

/// Brings a directory to a host; returns where it is there.
pub(crate) async fn bring(host: &Host, isolation: Isolation, directory: &Path) -> Result<PathBuf> {
    let mut away = Away::begin();
    let mut changed = 0;
    while changed < TRIES {
        let list = {
            let directory = directory.to_owned();
            blocking(move || list(&directory)).await?
        };
        match send(host, isolation, directory, &list).await {
            Ok(Some(path)) => return Ok(path),
            Ok(None) => changed += 1,
            Err(Fault::Link(error)) => away.wait(error).await?,
            Err(fault) => return Err(fault.into()),
        }
    }
    let message = format!(
        "the files of {} change all the while, so that they cannot be sent to {}; try again when nothing \
         writes there",
        directory.display(),
        host.address()
    );
    Err(Error::new(ErrorKind::Conflict, OPERATION, message).retryable(true))
}

/// `None` if a file was not any more what the list says.
async fn send(
    host: &Host,
    isolation: Isolation,
    directory: &Path,
    list: &[Entry],
) -> Result<Option<PathBuf>, Fault> {
    let origin = format!("{}:{}", machine(), directory.display());
    let channel = host.begin(OPERATION, isolation, Request::Populate { origin }).await?;
    let conversation = converse(host, directory, list, channel);
    conversation.await
}

async fn converse(
    host: &Host,
    directory: &Path,
    list: &[Entry],
    mut channel: Channel,
) -> Result<Option<PathBuf>, Fault> {
    let lost = |error| Fault::Link(broken(OPERATION, host.address(), error));
    let mut telling = Telling::begin(host.settings().on_upload.clone(), host.address(), directory);
    for batch in list.chunks(BATCH) {
        message::write(&mut channel, &Listed(batch.to_vec())).await.map_err(lost)?;
    }
    message::write(&mut channel, &Listed::default()).await.map_err(lost)?;
    let mut wanted = Vec::new();
    loop {
        match host.answer(OPERATION, &mut channel).await? {
            Answer::Populated(Populated::Wanted(more)) => wanted.extend(more),
            Answer::Populated(Populated::Send) => break,
            Answer::Populated(Populated::At(path)) => {
                telling.wanted(0, 0);
                return Ok(Some(path));
            }
            _ => return Err(nonsense(OPERATION, host.address(), "answers another question").into()),
        }
    }
    telling.wanted(wanted.len(), size(list, &wanted));
    // The host says meanwhile that it works, and perhaps that it cannot go on: both are to be read.
    let (mut from, mut to): (ReadHalf<Channel>, WriteHalf<Channel>) = tokio::io::split(channel);
    let sending = contents(directory, list, &wanted, &mut to, &mut telling);
    tokio::pin!(sending);
    let answer = async {
        loop {
            match message::read::<Answer>(&mut from, message::SMALL).await.map_err(lost)? {
                Some(Answer::Working) => {}
                Some(Answer::Failed(failure)) => {
                    return Err(Fault::Other(failure.into_error(OPERATION)));
                }
                Some(Answer::Populated(Populated::At(path))) => return Ok(path),
                Some(_) => {
                    let what = "answers another question";
                    return Err(nonsense(OPERATION, host.address(), what).into());
                }
                None => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
            }
        }
    };
    tokio::pin!(answer);
    let sent = tokio::select! {
        biased;
        sent = &mut sending => sent,
        early = &mut answer => return early.map(Some),
    };
    match sent {
        Ok(true) => answer.await.map(Some),
        Ok(false) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => match answer.await {
            // What the host said before it went tells more.
            Err(fault) => Err(fault),
            Ok(_) => Err(lost(error)),
        },
        Err(error) => Err(Error::io(OPERATION, directory.display().to_string(), error).into()),
    }
}

/// How much these files hold together.
fn size(list: &[Entry], wanted: &[u32]) -> u64 {
    let sizes = wanted.iter().filter_map(|index| match list.get(*index as usize)?.kind {
        EntryKind::File { size, .. } => Some(size),
        _ => None,
    });
    sizes.fold(0, u64::saturating_add)
}

/// Sends files' contents; says whether each was what the list says.
async fn contents(
    directory: &Path,
    list: &[Entry],
    wanted: &[u32],
    to: &mut WriteHalf<Channel>,
    telling: &mut Telling,
) -> io::Result<bool> {
    for index in wanted {
        let entry = list.get(*index as usize);
        let entry = entry.ok_or_else(|| io::Error::other("the host wants what is not there"))?;
        let EntryKind::File { size, .. } = entry.kind else {
            return Err(io::Error::other("the host wants what has no contents"));
        };
        let path = directory.join(&entry.path);
        let opened = {
            let (path, entry) = (path.clone(), entry.clone());
            tokio::task::spawn_blocking(move || open(&path, &entry))
                .await
                .map_err(io::Error::other)?
        };
        let Some(mut file) = opened? else { return Ok(false) };
        let mut left = size;
        while left > 0 {
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; PIECE.min(usize::try_from(left).unwrap_or(PIECE))];
                let count = file.read(&mut piece)?;
                piece.truncate(count);
                io::Result::Ok((file, piece))
            });
            let piece;
            (file, piece) = read.await.map_err(io::Error::other)??;
            if piece.is_empty() {
                return Ok(false);
            }
            to.write_all(&piece).await?;
            left -= piece.len() as u64;
            telling.sent(piece.len());
        }
        // Written to meanwhile, it may be a mixture.
        if as_listed(&file.metadata()?, &entry.path).as_ref() != Some(entry) {
            return Ok(false);
        }
        telling.file_sent();
    }
    to.flush().await?;
    Ok(true)
}

fn open(path: &Path, entry: &Entry) -> io::Result<Option<File>> {
    use std::os::unix::fs::OpenOptionsExt;
    // Something else may be there by now.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let same = as_listed(&file.metadata()?, &entry.path).as_ref() == Some(entry);
    Ok(same.then_some(file))
}

/// All that is in a directory, the directory itself first. What is neither a file, a directory, a link nor
/// a FIFO is left out.
fn list(directory: &Path) -> Result<Vec<Entry>> {
    let failed = |path: &Path, error| Error::io(OPERATION, path.display().to_string(), error);
    let top = fs::metadata(directory).map_err(|error| failed(directory, error))?;
    let mut found: Vec<Entry> = as_listed(&top, Path::new("")).into_iter().collect();
    let mut directories = vec![PathBuf::new()];
    while let Some(below) = directories.pop() {
        let path = directory.join(&below);
        let entries = match fs::read_dir(&path) {
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path != directory => continue,
            entries => entries.map_err(|error| failed(&path, error))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry.map_err(|error| failed(&path, error))?.file_name());
        }
        // The same list has the same name on the host.
        names.sort();
        for name in names {
            let (path, below) = (path.join(&name), below.join(&name));
            let looked = fs::symlink_metadata(&path);
            let metadata = match looked {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata.map_err(|error| failed(&path, error))?,
            };
            let entry = if metadata.is_symlink() {
                let to = fs::read_link(&path).map_err(|error| failed(&path, error))?;
                Some(entry(&metadata, &below, EntryKind::Link { to }))
            } else {
                as_listed(&metadata, &below)
            };
            if metadata.is_dir() {
                directories.push(below);
            }
            found.extend(entry);
            if found.len() > MOST {
                let message = format!("{} holds more than {MOST} files", directory.display());
                return Err(Error::new(ErrorKind::LimitExceeded, OPERATION, message));
            }
        }
    }
    Ok(found)
}

fn as_listed(metadata: &fs::Metadata, path: &Path) -> Option<Entry> {
    let kind = if metadata.is_dir() {
        EntryKind::Directory
    } else if metadata.is_file() {
        let changed = nanoseconds(metadata.ctime(), metadata.ctime_nsec());
        EntryKind::File { size: metadata.len(), changed }
    } else if metadata.file_type().is_fifo() {
        EntryKind::Fifo
    } else {
        return None;
    };
    Some(entry(metadata, path, kind))
}

fn entry(metadata: &fs::Metadata, path: &Path, kind: EntryKind) -> Entry {
    Entry {
        path: path.to_owned(),
        kind,
        // As the host takes them: set-user-id and the like stay here.
        mode: metadata.mode() & 0o1777,
        modified: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
    }
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// What tells this machine's directories from another's of the same name.
fn machine() -> String {
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    match id.trim() {
        "" => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        id => id.to_owned(),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        let message = "the work was broken off";
        Err(Error::new(ErrorKind::Backend, OPERATION, message).with_source(error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_everything_once_and_directories_first() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir_all(place.path().join("b/c")).unwrap();
        fs::write(place.path().join("b/c/file"), "12345").unwrap();
        fs::write(place.path().join("a"), "").unwrap();
        std::os::unix::fs::symlink("/nowhere", place.path().join("link")).unwrap();
        let found = list(place.path()).unwrap();
        let paths: Vec<&str> = found.iter().filter_map(|entry| entry.path.to_str()).collect();
        assert_eq!(paths, ["", "a", "b", "link", "b/c", "b/c/file"]);
        assert!(matches!(found[5].kind, EntryKind::File { size: 5, .. }));
        assert_eq!(found[3].kind, EntryKind::Link { to: "/nowhere".into() });
        assert_eq!(list(place.path()).unwrap(), found);
    }

    #[test]
    fn a_file_that_is_another_by_now_is_noticed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        fs::write(&path, "1").unwrap();
        let found = list(place.path()).unwrap();
        assert!(open(&path, &found[1]).unwrap().is_some());
        fs::write(&path, "22").unwrap();
        assert!(open(&path, &found[1]).unwrap().is_none());
        fs::remove_file(&path).unwrap();
        assert!(open(&path, &found[1]).unwrap().is_none());
    }
}
