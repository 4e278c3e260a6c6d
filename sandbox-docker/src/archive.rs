//! Archives, which is how files get into containers. They are made while they are sent: no more of one
//! than a few pieces is ever in memory.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;

/// A piece of an archive.
const PIECE: usize = 128 * 1024;

/// Pieces that wait to be sent.
const PIECES: usize = 8;

/// Whose the files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Owner {
    pub(crate) const ROOT: Self = Self { uid: 0, gid: 0 };
}

/// An archive in the making.
pub(crate) struct Archive<W: Write>(tar::Builder<W>);

impl<W: Write> Archive<W> {
    pub(crate) fn new(to: W) -> Self {
        let mut builder = tar::Builder::new(to);
        builder.follow_symlinks(false);
        Self(builder)
    }

    pub(crate) fn dir(&mut self, path: &str, mode: u32, owner: Owner) -> io::Result<()> {
        let mut header = header(tar::EntryType::Directory, mode, owner, 0);
        self.0.append_data(&mut header, format!("{path}/"), io::empty())
    }

    pub(crate) fn file(
        &mut self,
        path: &str,
        mode: u32,
        owner: Owner,
        contents: &[u8],
    ) -> io::Result<()> {
        let mut header = header(tar::EntryType::Regular, mode, owner, 0);
        header.set_size(contents.len() as u64);
        self.0.append_data(&mut header, path, contents)
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        let mut header = header(tar::EntryType::Symlink, 0o777, Owner::ROOT, 0);
        self.0.append_link(&mut header, path, target)
    }

    /// A directory of this host and all below it, links as links. `seen` is told of each.
    pub(crate) fn tree(
        &mut self,
        source: &Path,
        at: &str,
        owner: Owner,
        seen: &mut dyn FnMut(Seen<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut tree = Tree { archive: &mut self.0, owner, links: HashMap::new(), seen };
        // Iterative, as a tree may be deeper than a stack.
        let mut left = vec![(source.to_owned(), PathBuf::from(at))];
        while let Some((path, name)) = left.pop() {
            let below = tree.entry(&path, &name).map_err(|error| about(&path, &error))?;
            left.extend(below.into_iter().rev().map(|entry| (path.join(&entry), name.join(entry))));
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> io::Result<W> {
        self.0.into_inner()
    }
}

/// What a walk has seen.
pub(crate) struct Seen<'a> {
    pub(crate) name: &'a Path,
    pub(crate) metadata: &'a fs::Metadata,
    /// Of a file, what is in it.
    pub(crate) hash: u64,
}

struct Tree<'a, W: Write> {
    archive: &'a mut tar::Builder<W>,
    owner: Owner,
    /// The first name of a file that has several.
    links: HashMap<(u64, u64), PathBuf>,
    seen: &'a mut dyn FnMut(Seen<'_>) -> io::Result<()>,
}

impl<W: Write> Tree<'_, W> {
    /// Adds one entry; returns the names in a directory.
    fn entry(&mut self, path: &Path, name: &Path) -> io::Result<Vec<std::ffi::OsString>> {
        let metadata = fs::symlink_metadata(path)?;
        let kind = metadata.file_type();
        let mode = metadata.mode() & 0o7777;
        let make = |entry, owner| header(entry, mode, owner, metadata.mtime());
        let mut names = Vec::new();
        let mut hash = 0;
        if kind.is_dir() {
            let mut header = make(tar::EntryType::Directory, self.owner);
            self.archive.append_data(&mut header, name.join(""), io::empty())?;
            for entry in fs::read_dir(path)? {
                names.push(entry?.file_name());
            }
            names.sort_unstable();
        } else if kind.is_symlink() {
            let mut header = make(tar::EntryType::Symlink, self.owner);
            self.archive.append_link(&mut header, name, fs::read_link(path)?)?;
        } else if kind.is_fifo() {
            let mut header = make(tar::EntryType::Fifo, self.owner);
            self.archive.append_data(&mut header, name, io::empty())?;
        } else if kind.is_file() {
            let identity = (metadata.dev(), metadata.ino());
            if metadata.nlink() > 1
                && let Some(first) = self.links.get(&identity)
            {
                let mut header = make(tar::EntryType::Link, self.owner);
                self.archive.append_link(&mut header, name, first)?;
            } else {
                let mut header = make(tar::EntryType::Regular, self.owner);
                header.set_size(metadata.len());
                let mut exact = Exact::new(fs::File::open(path)?, metadata.len());
                self.archive.append_data(&mut header, name, &mut exact)?;
                hash = exact.hash.finish();
                if metadata.nlink() > 1 {
                    self.links.insert(identity, name.to_owned());
                }
            }
        } else {
            // A socket or a device is nothing that could be copied.
            return Ok(names);
        }
        (self.seen)(Seen { name, metadata: &metadata, hash })?;
        Ok(names)
    }
}

/// A file's first so many bytes, filled up with zeros should it have become shorter: the archive has said
/// how long it is.
struct Exact {
    file: fs::File,
    left: u64,
    ended: bool,
    hash: sandbox_guest::ContentHash,
}

impl Exact {
    fn new(file: fs::File, length: u64) -> Self {
        Self { file, left: length, ended: false, hash: sandbox_guest::ContentHash::default() }
    }
}

impl io::Read for Exact {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = &mut buffer[..most];
        let mut count = if self.ended { 0 } else { self.file.read(buffer)? };
        if count == 0 {
            self.ended = true;
            buffer.fill(0);
            count = most;
        }
        self.hash.write(&buffer[..count]);
        self.left -= count as u64;
        Ok(count)
    }
}

fn header(kind: tar::EntryType, mode: u32, owner: Owner, mtime: i64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner.uid.into());
    header.set_gid(owner.gid.into());
    header.set_size(0);
    header.set_mtime(u64::try_from(mtime).unwrap_or(0));
    header
}

fn about(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Makes an archive on a thread of its own and yields its pieces. What fails there is the stream's last
/// item.
pub(crate) fn pieces(
    make: impl FnOnce(&mut Archive<Pieces>) -> io::Result<()> + Send + 'static,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut archive = Archive::new(Pieces { to: sender.clone(), piece: Vec::new() });
        let made = make(&mut archive).and_then(|()| archive.finish()?.flush());
        if let Err(error) = made {
            let _ = sender.blocking_send(Err(error));
        }
    });
    futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    })
}

/// Gathers what is written into pieces.
pub(crate) struct Pieces {
    to: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece);
        // Whoever wanted it has gone.
        self.to.blocking_send(Ok(piece.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::fs::symlink};

    use futures::StreamExt;

    use super::*;

    const OWNER: Owner = Owner { uid: 1000, gid: 1000 };

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tree_is_told_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("empty")).unwrap();
        fs::write(root.join("file"), vec![7; 300_000]).unwrap();
        fs::hard_link(root.join("file"), root.join("same")).unwrap();
        symlink("/etc/shadow", root.join("link")).unwrap();
        let long = "long".repeat(50);
        fs::write(root.join(&long), "").unwrap();
        let stream =
            pieces(move |archive| archive.tree(&root, "workspace", OWNER, &mut |_| Ok(())));
        let pieces: Vec<Bytes> = stream.map(Result::unwrap).collect().await;
        assert!(pieces.len() > 1, "it comes in pieces");
        let bytes = pieces.concat();
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            assert_eq!(entry.header().uid().unwrap(), 1000);
            let name = entry.path().unwrap().display().to_string();
            let link = entry.link_name().unwrap().map(|target| target.display().to_string());
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents).unwrap();
            found.push((name, link.unwrap_or_default(), contents.len()));
        }
        let expected = [
            ("workspace/".to_owned(), "", 0),
            ("workspace/empty/".into(), "", 0),
            ("workspace/file".into(), "", 300_000),
            ("workspace/link".into(), "/etc/shadow", 0),
            (format!("workspace/{long}"), "", 0),
            ("workspace/same".into(), "workspace/file", 0),
        ];
        assert_eq!(found, expected.map(|(name, link, size)| (name, link.to_owned(), size)));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_cannot_be_read_is_named() {
        let stream =
            pieces(|archive| archive.tree(Path::new("/nope"), "x", OWNER, &mut |_| Ok(())));
        let last = stream.collect::<Vec<_>>().await.pop().unwrap();
        assert!(last.unwrap_err().to_string().contains("/nope"));
    }
}
