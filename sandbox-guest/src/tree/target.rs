//! Writing a file or a tree, piece by piece, from a peer that may be hostile.

use std::{
    ffi::{CString, OsStr},
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, FileType, Mode, OFlags, RawMode, Timespec, Timestamps, fchmod, futimens, linkat,
        mkdirat, openat, statat, symlinkat, utimensat,
    },
    io::Errno,
};

use super::{MAX_DEPTH, Piece, Totals, install::Place, links::stays_inside, remove::remove_at};
use crate::{Existing, Failure, FailureKind, TreeMeta, TreeRecord};

/// How long the text of a symbolic link may be, in bytes; Linux takes no longer one.
const MAX_TARGET: usize = 4095;

/// How long a name may be, in bytes; likewise.
const MAX_NAME: usize = 255;

/// How long a path may be that is only told of.
const MAX_TOLD: usize = MAX_DEPTH * (MAX_NAME + 1);

/// How much of a path is shown in a message.
const MAX_TEXT: usize = 512;

/// Which symbolic links a [`Target`] makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// All.
    All,
    /// Those that stay inside the tree; others are refused.
    Inside,
    /// Those that stay inside the tree; others are left out.
    InsideOrSkip,
}

/// What a [`Target`] takes, and what it does with it.
#[derive(Debug, Clone, Copy)]
pub struct TargetOptions {
    /// If something is at the destination.
    pub existing: Existing,
    /// Make missing directories above it.
    pub parents: bool,
    /// The permission bits that are kept.
    pub modes: u32,
    /// Which symbolic links are made.
    pub links: Links,
    /// How many files, links and directories are taken.
    pub max_entries: u64,
    /// How many bytes of contents are taken, holes included.
    pub max_bytes: u64,
}

/// A file or tree being written. Dropped before [`Target::commit`], it leaves nothing.
#[derive(Debug)]
pub struct Target {
    place: Place,
    options: TargetOptions,
    open: Vec<OpenDirectory>,
    file: Option<OpenFile>,
    stage: Stage,
    /// Of the directory that is being filled, from the root on.
    path: Vec<u8>,
    totals: Totals,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Nothing,
    Begun,
    /// The thing itself is complete.
    Whole,
    Ended,
}

#[derive(Debug)]
struct OpenDirectory {
    directory: OwnedFd,
    meta: TreeMeta,
    /// How long the path was above it.
    above: usize,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    meta: TreeMeta,
    at: u64,
    /// What was written last was a hole.
    hole: bool,
    name: Vec<u8>,
}

impl Target {
    /// Prepares to write what will be `path`.
    ///
    /// # Errors
    ///
    /// The system's; that something is there which must not be. Nothing has been made, but for directories
    /// above it.
    pub fn create(path: &Path, options: TargetOptions) -> Result<Self, Failure> {
        Ok(Self {
            place: Place::find(path, options.existing, options.parents)?,
            options,
            open: Vec::new(),
            file: None,
            stage: Stage::Nothing,
            path: Vec::new(),
            totals: Totals::default(),
        })
    }

    /// What has been taken so far.
    #[must_use]
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Takes the next piece.
    ///
    /// # Errors
    ///
    /// What is refused, by its name; the system's; a limit that is met. The target is then of no more use.
    pub fn take(&mut self, piece: &Piece) -> Result<(), Failure> {
        match piece {
            Piece::Record(record) => self.record(record),
            Piece::Data(data) => self.data(data),
        }
    }

    fn record(&mut self, record: &TreeRecord) -> Result<(), Failure> {
        if let TreeRecord::Hole { length } = record {
            return self.hole(*length);
        }
        self.finish_file()?;
        match record {
            TreeRecord::Directory { name, meta } => self.directory(name, *meta),
            TreeRecord::Leave => self.leave(),
            TreeRecord::File { name, meta, .. } => self.file(name, *meta),
            TreeRecord::Symlink { name, meta, target } => self.symlink(name, *meta, target),
            TreeRecord::Link { name, to } => self.link(name, to),
            TreeRecord::Skipped { path } if path.len() <= MAX_TOLD => {
                // Of nothing there is no end either.
                self.count_entry()?;
                self.totals.entries -= 1;
                self.totals.skip(PathBuf::from(OsStr::from_bytes(path)));
                Ok(())
            }
            TreeRecord::End if self.stage == Stage::Whole => {
                self.stage = Stage::Ended;
                Ok(())
            }
            TreeRecord::End => Err(self.broken("ended too early")),
            _ => Err(self.broken("sent a record that makes no sense here")),
        }
    }

    fn data(&mut self, data: &[u8]) -> Result<(), Failure> {
        self.count_bytes(data.len() as u64)?;
        let Some(open) = &mut self.file else {
            return Err(self.broken("sent contents of no file"));
        };
        let written = open.file.write_all(data);
        open.at += data.len() as u64;
        open.hole = false;
        written.map_err(|error| self.file_failed(&error))
    }

    /// Puts what has come to its place.
    ///
    /// # Errors
    ///
    /// The system's, or something at the destination that is in the way; the destination is then as it was.
    /// Only where a directory is merged with one that others change meanwhile, some of it may have got there.
    pub fn commit(mut self) -> Result<Totals, Failure> {
        if self.stage != Stage::Ended {
            return Err(self.broken("ended too early"));
        }
        self.open.clear();
        self.place.install(self.options.existing)?;
        Ok(std::mem::take(&mut self.totals))
    }

    fn directory(&mut self, name: &[u8], meta: TreeMeta) -> Result<(), Failure> {
        if self.open.len() == MAX_DEPTH {
            let what = format!("more than {MAX_DEPTH} directories, one in another");
            return Err(self.limit(&what));
        }
        let new = self.admit(name, Some(FileType::Directory))?;
        let made = mkdirat(self.at(), &new, Mode::RWXU)
            .and_then(|()| openat(self.at(), &new, directory_flags(), Mode::empty()));
        let directory = made.map_err(|error| self.failed(name, &error.into()))?;
        let above = self.path.len();
        if !name.is_empty() {
            if above > 0 {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(name);
        }
        self.open.push(OpenDirectory { directory, meta, above });
        Ok(())
    }

    fn leave(&mut self) -> Result<(), Failure> {
        let Some(OpenDirectory { directory, meta, above }) = self.open.pop() else {
            return Err(self.broken("left a directory that was not begun"));
        };
        // Last, since every new entry changed the time.
        settle(directory.as_fd(), meta, self.options.modes)
            .map_err(|error| self.failed(b"", &error))?;
        self.path.truncate(above);
        if self.open.is_empty() {
            self.stage = Stage::Whole;
        }
        Ok(())
    }

    fn file(&mut self, name: &[u8], meta: TreeMeta) -> Result<(), Failure> {
        let new = self.admit(name, Some(FileType::RegularFile))?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = openat(self.at(), &new, flags, Mode::RUSR | Mode::WUSR);
        let file = made.map_err(|error| self.failed(name, &error.into()))?;
        let name = name.to_vec();
        self.file = Some(OpenFile { file: file.into(), meta, at: 0, hole: false, name });
        Ok(())
    }

    fn hole(&mut self, length: u64) -> Result<(), Failure> {
        self.count_bytes(length)?;
        let Some(open) = &mut self.file else {
            return Err(self.broken("sent a hole of no file"));
        };
        open.at += length;
        open.hole = true;
        let sought = open.file.seek(SeekFrom::Start(open.at));
        sought.map(drop).map_err(|error| self.file_failed(&error))
    }

    fn finish_file(&mut self) -> Result<(), Failure> {
        let Some(open) = &self.file else { return Ok(()) };
        let cut = if open.hole { open.file.set_len(open.at) } else { Ok(()) };
        let done = cut.and_then(|()| settle(open.file.as_fd(), open.meta, self.options.modes));
        done.map_err(|error| self.file_failed(&error))?;
        self.file = None;
        if self.open.is_empty() {
            self.stage = Stage::Whole;
        }
        Ok(())
    }

    fn symlink(&mut self, name: &[u8], meta: TreeMeta, target: &[u8]) -> Result<(), Failure> {
        if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
            return Err(self.refused(name, "a symbolic link whose text cannot be one"));
        }
        // The root is a directory: what is in it is at depth 0.
        let inside = stays_inside(target, self.open.len().saturating_sub(1));
        if !inside && self.options.links == Links::InsideOrSkip {
            // As if it were made: its name may be no worse than another's.
            self.admit(name, None)?;
            self.totals.entries -= 1;
            self.totals.skip(self.below(name));
            return Ok(());
        }
        if !inside && self.options.links == Links::Inside {
            let message = format!(
                "{}: a symbolic link to {}, which is outside of what is transferred; such links can be \
                 left out, or allowed",
                self.shown(name),
                text(target)
            );
            return Err(Failure::new(FailureKind::PermissionDenied, message));
        }
        let new = self.admit(name, None)?;
        symlinkat(OsStr::from_bytes(target), self.at(), &new)
            .and_then(|()| utimensat(self.at(), &new, &times(meta), AtFlags::SYMLINK_NOFOLLOW))
            .map_err(|error| self.failed(name, &error.into()))
    }

    fn link(&mut self, name: &[u8], to: &[u8]) -> Result<(), Failure> {
        let new = self.admit(name, None)?;
        let linked = self.find(to).and_then(|(directory, first)| {
            let directory = directory.as_ref().map_or(self.root(), AsFd::as_fd);
            let stat = statat(directory, &first, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(Errno::INVAL);
            }
            linkat(directory, &first, self.at(), &new, AtFlags::empty())
        });
        linked.map_err(|error| match error {
            Errno::INVAL | Errno::NOENT | Errno::LOOP | Errno::NOTDIR => {
                let what = format!("a hard link to {}, which is no file of it", text(to));
                self.refused(name, &what)
            }
            error => self.failed(name, &error.into()),
        })
    }

    /// The directory of a path in the tree, unless that is the root, and the last name.
    fn find(&self, path: &[u8]) -> rustix::io::Result<(Option<OwnedFd>, CString)> {
        let mut directory: Option<OwnedFd> = None;
        let mut name: Option<CString> = None;
        for part in path.split(|byte| *byte == b'/') {
            if let Some(name) = &name {
                let at = directory.as_ref().map_or(self.root(), AsFd::as_fd);
                directory = Some(openat(at, name, directory_flags(), Mode::empty())?);
            }
            name = Some(component(part).ok_or(Errno::INVAL)?);
        }
        Ok((directory, name.ok_or(Errno::INVAL)?))
    }

    /// Whether there may be another entry, of this name. The thing itself is of a kind that may come first.
    fn admit(&mut self, name: &[u8], first: Option<FileType>) -> Result<CString, Failure> {
        self.count_entry()?;
        if self.stage == Stage::Nothing {
            let Some(kind) = first.filter(|_| name.is_empty()) else {
                return Err(self.broken("did not begin with a file or a directory"));
            };
            self.stage = Stage::Begun;
            return self.place.begin(kind == FileType::Directory);
        }
        if self.open.is_empty() {
            return Err(self.broken("sent more than one thing"));
        }
        let what = "a name that is no single part of a path";
        component(name).ok_or_else(|| self.refused(name, what))
    }

    /// Where the next entry is made.
    fn at(&self) -> BorrowedFd<'_> {
        self.open.last().map_or(self.place.directory(), |open| open.directory.as_fd())
    }

    /// The tree's first directory.
    fn root(&self) -> BorrowedFd<'_> {
        self.open.first().map_or(self.place.directory(), |open| open.directory.as_fd())
    }

    fn count_entry(&mut self) -> Result<(), Failure> {
        self.totals.entries += 1;
        if self.totals.entries + self.totals.skipped > self.options.max_entries {
            let what = format!("more than {} files", self.options.max_entries);
            return Err(self.limit(&what));
        }
        Ok(())
    }

    fn count_bytes(&mut self, more: u64) -> Result<(), Failure> {
        self.totals.bytes = self.totals.bytes.saturating_add(more);
        if self.totals.bytes > self.options.max_bytes {
            let what = format!("more than {} bytes", self.options.max_bytes);
            return Err(self.limit(&what));
        }
        Ok(())
    }

    fn below(&self, name: &[u8]) -> PathBuf {
        Path::new(OsStr::from_bytes(&self.path)).join(OsStr::from_bytes(name))
    }

    /// The path of an entry, for messages: it may have anything in it.
    fn shown(&self, name: &[u8]) -> String {
        let mut path = self.path.clone();
        if !path.is_empty() && !name.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        if path.is_empty() {
            return self.place.shown().display().to_string();
        }
        format!("{} in {}", text(&path), self.place.shown().display())
    }

    fn refused(&self, name: &[u8], what: &str) -> Failure {
        let message = format!("{}: {what}; it is refused", self.shown(name));
        Failure::new(FailureKind::System, message)
    }

    /// Nothing may be there yet: what is, came twice.
    fn failed(&self, name: &[u8], error: &io::Error) -> Failure {
        if error.kind() == io::ErrorKind::AlreadyExists {
            return self.refused(name, "it came before, or cannot be told from what came before");
        }
        Failure::system(&format!("write {}", self.shown(name)), error)
    }

    fn file_failed(&self, error: &io::Error) -> Failure {
        let name = self.file.as_ref().map(|open| open.name.as_slice());
        Failure::system(&format!("write {}", self.shown(name.unwrap_or_default())), error)
    }

    fn limit(&self, what: &str) -> Failure {
        let message = format!("{}: {what}, which is the limit", self.place.shown().display());
        Failure::new(FailureKind::LimitExceeded, message)
    }

    fn broken(&self, what: &str) -> Failure {
        let message = format!("{}: who sends it {what}", self.place.shown().display());
        Failure::new(FailureKind::System, message)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.file = None;
        self.open.clear();
        if let Some((at, name)) = self.place.temporary() {
            let _ = remove_at(at, name);
        }
    }
}

/// A name for a message: it may have anything in it, and may be as long as it likes.
fn text(name: &[u8]) -> String {
    let shown = &name[..name.len().min(MAX_TEXT)];
    format!("{}{}", shown.escape_ascii(), if shown.len() < name.len() { "…" } else { "" })
}

/// A single part of a path.
fn component(name: &[u8]) -> Option<CString> {
    if name.is_empty()
        || name.len() > MAX_NAME
        || name == b"."
        || name == b".."
        || name.contains(&b'/')
    {
        return None;
    }
    CString::new(name).ok()
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn settle(file: BorrowedFd<'_>, meta: TreeMeta, modes: u32) -> io::Result<()> {
    let mode = meta.mode & modes & 0o7777;
    fchmod(file, Mode::from_raw_mode(mode as RawMode))?;
    Ok(futimens(file, &times(meta))?)
}

fn times(meta: TreeMeta) -> Timestamps {
    let time = Timespec { tv_sec: meta.seconds as _, tv_nsec: (meta.nanos % 1_000_000_000) as _ };
    Timestamps { last_access: time, last_modification: time }
}
