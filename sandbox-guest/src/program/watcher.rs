//! What inotify says, as events with paths.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use sandbox_guest::{Bytes, Failure, FailureKind, FileEvent, tree::TEMPORARY};

use super::{base::failure, files::failed, transfer};

/// How many directories one watch looks at.
const MAX_DIRECTORIES: usize = 8192;

/// How many events are gathered before they are sent, roughly.
const GATHER: usize = 1024;

/// How many things are told of that were found in new directories before they were watched.
const MAX_FOUND: usize = 8192;

const BUFFER: usize = 32 * 1024;

/// A file or directory being watched.
pub(crate) struct Watcher {
    inotify: OwnedFd,
    /// What was asked for, and what is looked at for it: of a file, its directory.
    path: PathBuf,
    directory: PathBuf,
    recursive: bool,
    root: i32,
    directories: HashMap<i32, PathBuf>,
    /// The first half of a renaming, whose second half may come.
    half: Option<Half>,
    over: bool,
}

struct Half {
    cookie: u32,
    from: PathBuf,
    hidden: bool,
    directory: bool,
}

impl Watcher {
    /// Begins to watch.
    pub(crate) fn new(path: PathBuf, recursive: bool) -> Result<Self, Failure> {
        let metadata = fs::metadata(&path).map_err(|error| failed("watch", &path, &error))?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| failed("watch", &path, &error.into()))?;
        let directory = match path.parent() {
            Some(parent) if !metadata.is_dir() => parent.to_owned(),
            _ => path.clone(),
        };
        let recursive = recursive && metadata.is_dir();
        let mut watcher = Self {
            inotify,
            path,
            directory: directory.clone(),
            recursive,
            root: -1,
            directories: HashMap::new(),
            half: None,
            over: false,
        };
        // The directory itself may be named by a link.
        watcher.root =
            watcher.add(&directory, WatchFlags::ONLYDIR).map_err(|error| match error {
                Errno::NOSPC => too_many(&directory),
                error => failed("watch", &directory, &error.into()),
            })?;
        if recursive && !watcher.look_through(&directory, None) {
            return Err(too_many(&directory));
        }
        Ok(watcher)
    }

    /// What becomes readable when something happened.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.inotify.try_clone()
    }

    /// Whether what was watched is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// Whether a renaming is known only by half.
    pub(crate) fn has_half(&self) -> bool {
        self.half.is_some()
    }

    /// Takes a renaming whose second half did not come for a removal: it led outside.
    pub(crate) fn give_up_half(&mut self, events: &mut Vec<FileEvent>) {
        let Some(half) = self.half.take() else { return };
        if half.directory {
            let gone: Vec<i32> = self.below(&half.from).map(|(number, _)| number).collect();
            for number in gone {
                self.directories.remove(&number);
                let _ = inotify::remove_watch(&self.inotify, number);
            }
        }
        if !half.hidden {
            self.push(events, FileEvent::Removed(wire(&half.from)));
        }
    }

    /// Appends what happened; `true` if that was all, for now.
    pub(crate) fn collect(&mut self, events: &mut Vec<FileEvent>) -> bool {
        let Ok(descriptor) = self.descriptor() else {
            self.over = true;
            return true;
        };
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(descriptor, &mut buffer);
        while !self.over {
            if reader.is_buffer_empty() && events.len() >= GATHER {
                return false;
            }
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
                    self.happened(event.wd(), event.events(), event.cookie(), name, events);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Err(_) => self.over = true,
            }
        }
        true
    }

    fn happened(
        &mut self,
        number: i32,
        what: ReadFlags,
        cookie: u32,
        name: Option<&OsStr>,
        events: &mut Vec<FileEvent>,
    ) {
        if self.half.as_ref().is_some_and(|half| half.cookie != cookie) {
            self.give_up_half(events);
        }
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            // Directories may have been made, or moved, that nobody told of.
            if self.recursive {
                let directory = self.directory.clone();
                self.look_through(&directory, None);
            }
            return self.push(events, FileEvent::Overflow);
        }
        if what.contains(ReadFlags::IGNORED) {
            self.directories.remove(&number);
            self.over |= number == self.root;
            return;
        }
        let Some(directory) = self.directories.get(&number) else { return };
        let Some(name) = name else {
            return self.happened_to_directory(number, what, events);
        };
        let path = directory.join(name);
        if self.path != self.directory && path != self.path {
            return;
        }
        let hidden = is_hidden(name);
        let is_directory = what.contains(ReadFlags::ISDIR);
        if what.contains(ReadFlags::MOVED_FROM) {
            self.half = Some(Half { cookie, from: path, hidden, directory: is_directory });
        } else if what.contains(ReadFlags::MOVED_TO) {
            self.moved_to(&path, hidden, is_directory, events);
        } else if hidden {
            // Not told of.
        } else if what.contains(ReadFlags::CREATE) {
            self.appeared(&path, is_directory, events);
        } else if what.contains(ReadFlags::DELETE) {
            self.push(events, FileEvent::Removed(wire(&path)));
        } else {
            self.push(events, FileEvent::Modified(wire(&path)));
        }
    }

    /// Something happened to a directory itself; of those below, the directory above tells.
    fn happened_to_directory(&mut self, number: i32, what: ReadFlags, events: &mut Vec<FileEvent>) {
        if number != self.root || self.path != self.directory {
            return;
        }
        let path = wire(&self.path);
        if what.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) {
            self.over = true;
            self.push(events, FileEvent::Removed(path));
        } else {
            self.push(events, FileEvent::Modified(path));
        }
    }

    fn moved_to(&mut self, to: &Path, hidden: bool, directory: bool, events: &mut Vec<FileEvent>) {
        let Some(half) = self.half.take() else {
            if !hidden {
                self.appeared(to, directory, events);
            }
            return;
        };
        match (half.hidden, hidden) {
            (true, true) => {}
            (true, false) => self.appeared(to, directory, events),
            (false, true) => {
                self.half = Some(half);
                self.give_up_half(events);
            }
            (false, false) => {
                if directory {
                    let moved: Vec<(i32, PathBuf)> = self
                        .below(&half.from)
                        .filter_map(|(number, path)| {
                            let rest = path.strip_prefix(&half.from).ok()?;
                            // An empty rest would leave a slash at the end.
                            let path = if rest.as_os_str().is_empty() {
                                to.to_owned()
                            } else {
                                to.join(rest)
                            };
                            Some((number, path))
                        })
                        .collect();
                    self.directories.extend(moved);
                }
                let (from, to) = (wire(&half.from), wire(to));
                self.push(events, FileEvent::Renamed { from, to });
            }
        }
    }

    /// Something new: of a directory, what is in it by now may have come before it was watched.
    fn appeared(&mut self, path: &Path, directory: bool, events: &mut Vec<FileEvent>) {
        self.push(events, FileEvent::Created(wire(path)));
        if !directory || !self.recursive {
            return;
        }
        let watched = match self.add(path, WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW) {
            Ok(_) => self.look_through(path, Some(events)),
            // Gone again, or closed to us.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => true,
            Err(_) => false,
        };
        if !watched {
            self.push(events, FileEvent::Overflow);
        }
    }

    /// Watches all directories below one, and tells what is in them if it is asked to. `false` if that
    /// was too much.
    fn look_through(&mut self, directory: &Path, mut events: Option<&mut Vec<FileEvent>>) -> bool {
        let mut left = vec![directory.to_owned()];
        let mut found = 0;
        while let Some(directory) = left.pop() {
            // One that is closed to us, or gone, has nothing to tell.
            let Ok(entries) = fs::read_dir(&directory) else { continue };
            for entry in entries.flatten() {
                if is_hidden(&entry.file_name()) {
                    continue;
                }
                if let Some(events) = &mut events {
                    found += 1;
                    if found > MAX_FOUND {
                        return false;
                    }
                    self.push(events, FileEvent::Created(wire(&entry.path())));
                }
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                match self.add(&entry.path(), WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW) {
                    Ok(_) => left.push(entry.path()),
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => {}
                    Err(_) => return false,
                }
            }
        }
        true
    }

    fn add(&mut self, path: &Path, more: WatchFlags) -> rustix::io::Result<i32> {
        if self.directories.len() >= MAX_DIRECTORIES {
            return Err(Errno::NOSPC);
        }
        let what = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO;
        let number = inotify::add_watch(&self.inotify, path, what | more)?;
        self.directories.insert(number, path.to_owned());
        Ok(number)
    }

    /// The directories that are watched at a path and below it.
    fn below(&self, path: &Path) -> impl Iterator<Item = (i32, &PathBuf)> {
        let below = self.directories.iter().filter(move |(_, at)| at.starts_with(path));
        below.map(|(number, at)| (*number, at))
    }

    /// Adds an event, unless it says what the last one said.
    fn push(&self, events: &mut Vec<FileEvent>, event: FileEvent) {
        if events.last() != Some(&event) {
            events.push(event);
        }
    }
}

/// How large an event is in a message, roughly.
pub(crate) fn size(event: &FileEvent) -> usize {
    32 + match event {
        FileEvent::Created(path) | FileEvent::Modified(path) | FileEvent::Removed(path) => {
            path.len()
        }
        FileEvent::Renamed { from, to } => from.len() + to.len(),
        _ => 0,
    }
}

/// What the guest makes on its way to something else is nobody's business.
fn is_hidden(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(transfer::TEMPORARY.as_bytes()) || name.starts_with(TEMPORARY.as_bytes())
}

fn too_many(path: &Path) -> Failure {
    let message = format!(
        "{}: more directories than one watch looks at ({MAX_DIRECTORIES}), or than the system lets be \
         watched",
        path.display()
    );
    failure(FailureKind::LimitExceeded, message)
}

fn wire(path: &Path) -> Bytes {
    Bytes::from(path.as_os_str().as_bytes())
}
