//! Taking in a directory: its list first, then the contents of what is not here yet.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, Permissions},
    io::{self, BufWriter, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, mknodat, utimensat};
use sandbox_core::{Error, ErrorKind, Result};

use super::{
    io::{Answers, read},
    sources::{self, Source, Sources},
};
use crate::{
    error::at,
    message::{Answer, Entry, EntryKind, Listed, Populated},
};

const OPERATION: &str = "populate the workspace";
/// The most that one workspace may hold, in files and directories.
const MOST: usize = 5_000_000;
/// How many wanted files are named in one message.
const BATCH: usize = 4096;
/// Set-user-id and the like are not for files that come from elsewhere.
const MODES: u32 = 0o1777;

pub(super) fn populate(
    state: &Path,
    origin: &str,
    input: &mut impl Read,
    answers: &Answers,
) -> Result<Answer> {
    let broken = |error| Error::io(OPERATION, "the connection", error);
    let list = listed(input)?;
    let sources = Sources::of(state);
    let name = sources::name(&list)?;
    let at_last = |source: Source| Ok(Answer::Populated(Populated::At(source.tree())));
    if let Some(source) = sources.find(&name) {
        return at_last(source);
    }
    let before = sources.latest(origin);
    let known = before.as_ref().map(known).unwrap_or_default();
    let made = sources.begin(&name)?;
    let mut fill = || {
        let wanted =
            lay_out(&list, &made, before.as_ref(), &known).map_err(at(OPERATION, &made.tree()))?;
        for batch in wanted.chunks(BATCH) {
            let batch = Answer::Populated(Populated::Wanted(batch.to_vec()));
            answers.say(&batch).map_err(broken)?;
        }
        answers.say(&Answer::Populated(Populated::Send)).map_err(broken)?;
        for index in wanted {
            let Some(entry) = list.get(index as usize) else { continue };
            receive(entry, &made, input)?;
        }
        settle(&list, &made).map_err(at(OPERATION, &made.tree()))?;
        let written = File::create(made.list()).and_then(|file| {
            let mut file = BufWriter::new(file);
            serde_json::to_writer(&mut file, &list)?;
            file.flush()?;
            fs::write(made.origin(), origin)
        });
        written.map_err(at(OPERATION, &made.list()))?;
        sources.finish(&made, &name)
    };
    let filled: Result<Source> = fill();
    match filled {
        Ok(source) => at_last(source),
        Err(error) => {
            sources.discard(&made)?;
            Err(error)
        }
    }
}

/// Reads the list, and takes it for nothing but a list of what is in one directory.
fn listed(input: &mut impl Read) -> Result<Vec<Entry>> {
    let mut list: Vec<Entry> = Vec::new();
    let mut directories: HashSet<PathBuf> = HashSet::new();
    let mut paths: HashSet<PathBuf> = HashSet::new();
    loop {
        let Listed(more) =
            read(input).map_err(|error| Error::io(OPERATION, "the list of files", error))?;
        if more.is_empty() {
            break;
        }
        for mut entry in more {
            entry.mode &= MODES;
            let plain = entry.path.components().all(|part| matches!(part, Component::Normal(_)));
            let top = list.is_empty();
            let placed = match entry.path.parent() {
                None => top && entry.kind == EntryKind::Directory,
                Some(parent) => !top && directories.contains(parent),
            };
            if !plain || !placed || !paths.insert(entry.path.clone()) {
                let message = format!("{:?} is out of place in the list", entry.path);
                return Err(Error::new(ErrorKind::InvalidSpec, OPERATION, message));
            }
            if entry.kind == EntryKind::Directory {
                directories.insert(entry.path.clone());
            }
            list.push(entry);
            if list.len() > MOST {
                let message = format!("the workspace holds more than {MOST} files");
                return Err(Error::new(ErrorKind::LimitExceeded, OPERATION, message));
            }
        }
    }
    if list.is_empty() {
        return Err(Error::new(ErrorKind::InvalidSpec, OPERATION, "the list is empty"));
    }
    Ok(list)
}

/// The files of one that was taken in before.
fn known(source: &Source) -> HashMap<PathBuf, Entry> {
    let list: Vec<Entry> = File::open(source.list())
        .ok()
        .and_then(|file| serde_json::from_reader(io::BufReader::new(file)).ok())
        .unwrap_or_default();
    list.into_iter().map(|entry| (entry.path.clone(), entry)).collect()
}

/// Makes everything but the contents of what is not here yet; says what that is.
fn lay_out(
    list: &[Entry],
    made: &Source,
    before: Option<&Source>,
    known: &HashMap<PathBuf, Entry>,
) -> io::Result<Vec<u32>> {
    let mut wanted = Vec::new();
    for (index, entry) in list.iter().enumerate() {
        let path = made.tree().join(&entry.path);
        match &entry.kind {
            EntryKind::Directory => {
                let top = entry.path.as_os_str().is_empty();
                let path = if top { made.tree() } else { path };
                fs::DirBuilder::new().mode(0o700).create(path)?;
            }
            EntryKind::Link { to } => symlink(to, &path)?,
            EntryKind::Fifo => mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?,
            EntryKind::File { .. } => {
                let same = before.filter(|_| known.get(&entry.path) == Some(entry));
                let linked = same
                    .map(|before| fs::hard_link(before.tree().join(&entry.path), &path))
                    .is_some_and(|linked| linked.is_ok());
                if !linked {
                    wanted.push(u32::try_from(index).map_err(io::Error::other)?);
                }
            }
        }
    }
    Ok(wanted)
}

fn receive(entry: &Entry, made: &Source, input: &mut impl Read) -> Result<()> {
    let EntryKind::File { size, .. } = entry.kind else { return Ok(()) };
    let path = made.tree().join(&entry.path);
    let write = |input: &mut dyn Read| {
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
        let copied = io::copy(&mut input.take(size), &mut file)?;
        if copied < size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.set_permissions(Permissions::from_mode(entry.mode))
    };
    write(input).map_err(at(OPERATION, &path))?;
    stamp(&path, entry).map_err(at(OPERATION, &path))
}

/// Modes and times of directories and of what has no contents; from below, as each entry changes the time
/// of its directory.
fn settle(list: &[Entry], made: &Source) -> io::Result<()> {
    for entry in list.iter().rev() {
        let path = made.tree().join(&entry.path);
        match entry.kind {
            EntryKind::File { .. } => continue,
            EntryKind::Link { .. } => {}
            _ => fs::set_permissions(&path, Permissions::from_mode(entry.mode))?,
        }
        stamp(&path, entry)?;
    }
    Ok(())
}

fn stamp(path: &Path, entry: &Entry) -> io::Result<()> {
    let nanoseconds = 1_000_000_000;
    let time = Timespec {
        tv_sec: entry.modified.div_euclid(nanoseconds),
        tv_nsec: entry.modified.rem_euclid(nanoseconds) as _,
    };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
