//! Reading a file or a tree, piece by piece.

use std::{
    collections::HashMap,
    ffi::{CStr, OsStr},
    fs::File,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat, seek,
        statat,
    },
    io::Errno,
};

use super::{MAX_DEPTH, Totals};
use crate::{
    Bytes, Failure, FailureKind, TreeMeta, TreeRecord,
    frame::{self, Channel},
};

/// Data of one frame: with its head it fits one packet of the connection.
const PIECE: u64 = (64 * 1024 - frame::HEAD) as u64;

/// How much is gathered before it is handed out.
const GATHER: usize = 256 * 1024;

/// How many files with several names are remembered; of more, each name becomes a file of its own.
const MAX_LINKED: usize = 16 * 1024;

/// How a [`Source`] puts its pieces.
#[derive(Debug, Clone, Copy)]
pub struct SourceOptions {
    /// Leave out devices, FIFOs and sockets instead of failing.
    pub skip_special: bool,
    /// The channel of its data.
    pub channel: Channel,
    /// How a record becomes a frame.
    pub encode: fn(TreeRecord) -> io::Result<Vec<u8>>,
}

/// A file or tree being read.
#[derive(Debug)]
pub struct Source {
    root: Option<(File, Stat)>,
    shown: PathBuf,
    options: SourceOptions,
    levels: Vec<Level>,
    file: Option<Reading>,
    /// Of what is being read, from the root on.
    path: Vec<u8>,
    linked: HashMap<(u64, u64), Vec<u8>>,
    totals: Totals,
}

#[derive(Debug)]
struct Level {
    entries: Dir,
    /// How long the path was above it.
    above: usize,
}

#[derive(Debug)]
struct Reading {
    file: File,
    at: u64,
    end: u64,
    /// Up to where there is no hole.
    data_to: u64,
}

impl Source {
    /// Opens a file or a directory; a symbolic link is followed.
    ///
    /// # Errors
    ///
    /// The system's, and what is neither, with the path.
    pub fn open(path: &Path, options: SourceOptions) -> Result<Self, Failure> {
        let failed = |error| Failure::system(&format!("read {}", path.display()), &error);
        // A FIFO must hold up nobody.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::options()
            .read(true)
            .custom_flags(flags.bits() as i32)
            .open(path)
            .map_err(failed)?;
        let stat = fstat(&file).map_err(|error| failed(error.into()))?;
        if !matches!(kind(&stat), FileType::RegularFile | FileType::Directory) {
            let message = format!("{} is neither a file nor a directory", path.display());
            return Err(Failure::new(FailureKind::WrongType, message));
        }
        Ok(Self {
            root: Some((file, stat)),
            shown: path.to_owned(),
            options,
            levels: Vec::new(),
            file: None,
            path: Vec::new(),
            linked: HashMap::new(),
            totals: Totals::default(),
        })
    }

    /// Its size, if it is a file.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        let (_, stat) = self.root.as_ref()?;
        (kind(stat) == FileType::RegularFile).then(|| size(stat))
    }

    /// What has been handed out so far.
    #[must_use]
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Appends the next frames; `false` once the last one is among them.
    ///
    /// # Errors
    ///
    /// The system's, and what cannot be sent, with the path.
    pub fn fill(&mut self, out: &mut Vec<u8>) -> Result<bool, Failure> {
        while out.len() < GATHER {
            if self.file.is_some() {
                self.piece(out)?;
            } else if let Some((file, stat)) = self.root.take() {
                self.begin(file, &stat, out)?;
            } else if !self.levels.is_empty() {
                self.next_entry(out)?;
            } else {
                self.put(TreeRecord::End, out)?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn begin(&mut self, file: File, stat: &Stat, out: &mut Vec<u8>) -> Result<(), Failure> {
        self.totals.entries += 1;
        if kind(stat) == FileType::Directory {
            let record = TreeRecord::Directory { name: Bytes::default(), meta: meta(stat) };
            self.put(record, out)?;
            return self.enter(file.into(), 0);
        }
        let size = size(stat);
        self.put(TreeRecord::File { name: Bytes::default(), meta: meta(stat), size }, out)?;
        let mut reading = Reading::new(file, stat);
        if size == 0 {
            // One of those that the system makes up while they are read.
            (reading.end, reading.data_to) = (u64::MAX, u64::MAX);
        }
        self.file = Some(reading);
        Ok(())
    }

    fn enter(&mut self, directory: OwnedFd, above: usize) -> Result<(), Failure> {
        if self.levels.len() == MAX_DEPTH {
            let message = format!(
                "{}: more than {MAX_DEPTH} directories, one in another",
                self.here().display()
            );
            return Err(Failure::new(FailureKind::LimitExceeded, message));
        }
        let entries = Dir::new(directory).map_err(|error| self.failed(&error.into()))?;
        self.levels.push(Level { entries, above });
        Ok(())
    }

    fn next_entry(&mut self, out: &mut Vec<u8>) -> Result<(), Failure> {
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        let entry = match level.entries.read() {
            Some(Ok(entry)) => entry,
            Some(Err(error)) => return Err(self.failed(&error.into())),
            None => {
                let above = level.above;
                self.levels.pop();
                self.path.truncate(above);
                return self.put(TreeRecord::Leave, out);
            }
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            return Ok(());
        }
        let above = self.path.len();
        if above > 0 {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name.to_bytes());
        let entered = match self.entry(name, above, out) {
            // It went away meanwhile.
            Err(failure) if failure.kind == FailureKind::NotFound => false,
            done => done?,
        };
        if !entered {
            self.path.truncate(above);
        }
        Ok(())
    }

    /// Puts an entry; `true` if it is a directory, whose entries come next.
    fn entry(&mut self, name: &CStr, above: usize, out: &mut Vec<u8>) -> Result<bool, Failure> {
        let Some(level) = self.levels.last() else { return Ok(false) };
        let failed = |error: Errno| self.failed(&error.into());
        let directory = level.entries.fd().map_err(failed)?;
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        let wire = Bytes::from(name.to_bytes());
        match kind(&stat) {
            FileType::Directory => {
                let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let inner = openat(directory, name, flags, Mode::empty()).map_err(failed)?;
                let stat = fstat(&inner).map_err(failed)?;
                self.put(TreeRecord::Directory { name: wire, meta: meta(&stat) }, out)?;
                self.enter(inner, above)?;
            }
            FileType::Symlink => {
                let target = readlinkat(directory, name, Vec::new()).map_err(failed)?;
                let target = Bytes::from(target.into_bytes());
                self.put(TreeRecord::Symlink { name: wire, meta: meta(&stat), target }, out)?;
            }
            FileType::RegularFile if self.linked.contains_key(&identity(&stat)) => {
                let to = self.linked.get(&identity(&stat)).map(Vec::as_slice);
                let to = Bytes::from(to.unwrap_or_default());
                self.put(TreeRecord::Link { name: wire, to }, out)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
                let file = openat(directory, name, flags, Mode::empty()).map_err(failed)?;
                let stat = fstat(&file).map_err(failed)?;
                if kind(&stat) != FileType::RegularFile {
                    return self.special(out);
                }
                if stat.st_nlink > 1 && self.linked.len() < MAX_LINKED {
                    self.linked.insert(identity(&stat), self.path.clone());
                }
                let size = size(&stat);
                self.put(TreeRecord::File { name: wire, meta: meta(&stat), size }, out)?;
                self.file = (size > 0).then(|| Reading::new(file.into(), &stat));
            }
            _ => return self.special(out),
        }
        self.totals.entries += 1;
        Ok(kind(&stat) == FileType::Directory)
    }

    /// Leaves something out, where it may be.
    fn special(&mut self, out: &mut Vec<u8>) -> Result<bool, Failure> {
        if !self.options.skip_special {
            let message = format!(
                "{} is a device, a FIFO or a socket, which is not transferred; it can be left out",
                self.here().display()
            );
            return Err(Failure::new(FailureKind::Unsupported, message));
        }
        self.totals.skip(PathBuf::from(OsStr::from_bytes(&self.path)));
        let path = Bytes::from(self.path.as_slice());
        self.put(TreeRecord::Skipped { path }, out)?;
        Ok(false)
    }

    /// Some of the file that is being read.
    fn piece(&mut self, out: &mut Vec<u8>) -> Result<(), Failure> {
        let Some(mut reading) = self.file.take() else { return Ok(()) };
        let hole = reading.hole().map_err(|error| self.failed(&error))?;
        if hole > 0 {
            self.totals.bytes += hole;
            self.put(TreeRecord::Hole { length: hole }, out)?;
        }
        let most = (reading.data_to - reading.at).min(PIECE);
        if most == 0 {
            return Ok(());
        }
        let start = out.len();
        out.extend_from_slice(&[0; frame::HEAD]);
        let count =
            (&mut reading.file).take(most).read_to_end(out).map_err(|error| self.failed(&error))?;
        if count == 0 {
            // It became shorter.
            out.truncate(start);
            return Ok(());
        }
        let head = frame::data_head(self.options.channel, count);
        out[start..start + frame::HEAD].copy_from_slice(&head);
        reading.at += count as u64;
        self.totals.bytes += count as u64;
        if reading.at < reading.end {
            self.file = Some(reading);
        }
        Ok(())
    }

    fn put(&self, record: TreeRecord, out: &mut Vec<u8>) -> Result<(), Failure> {
        let encoded = (self.options.encode)(record).map_err(|error| self.failed(&error))?;
        out.extend_from_slice(&encoded);
        Ok(())
    }

    fn here(&self) -> PathBuf {
        if self.path.is_empty() {
            return self.shown.clone();
        }
        self.shown.join(OsStr::from_bytes(&self.path))
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::system(&format!("read {}", self.here().display()), error)
    }
}

impl Reading {
    fn new(file: File, stat: &Stat) -> Self {
        let end = size(stat);
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        let sparse = blocks.saturating_mul(512) < end;
        Self { file, at: 0, end, data_to: if sparse { 0 } else { end } }
    }

    /// Goes past a hole, if one is here; its length.
    fn hole(&mut self) -> io::Result<u64> {
        if self.at < self.data_to || self.at >= self.end {
            return Ok(0);
        }
        let data = match seek(&self.file, SeekFrom::Data(self.at)) {
            Ok(data) => data.min(self.end),
            // Only a hole is left.
            Err(Errno::NXIO) => self.end,
            // Nobody knows of holes here.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                self.data_to = self.end;
                return Ok(0);
            }
            Err(error) => return Err(error.into()),
        };
        let length = data.saturating_sub(self.at);
        self.at = data;
        self.data_to = data;
        if data < self.end {
            self.data_to = seek(&self.file, SeekFrom::Hole(data))?.min(self.end);
            seek(&self.file, SeekFrom::Start(data))?;
        }
        Ok(length)
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// The same for all names of a file.
#[allow(clippy::unnecessary_cast, reason = "the types differ between systems")]
fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

#[allow(clippy::unnecessary_cast, reason = "the types differ between systems")]
fn meta(stat: &Stat) -> TreeMeta {
    TreeMeta {
        mode: Mode::from_raw_mode(stat.st_mode).bits() as u32 & 0o7777,
        seconds: stat.st_mtime as i64,
        nanos: stat.st_mtime_nsec as u32,
    }
}
