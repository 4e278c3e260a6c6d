//! What differs between two stacks of overlay layers, told without a mount: only what the layers that the
//! two do not share have in them is looked at.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::{CStr, CString, OsString},
    io::{self, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FileType, Stat, fstat};

use super::{
    base::errno_text,
    layers::{Found, LayerDir, Layers, find, names},
    mounts,
};

/// As many bytes as a path may have for the kernel; what is deeper cannot be named.
const LONGEST: usize = 4095;
/// A sandbox that changed more than this has its say refused.
const MOST: usize = 2_000_000;
/// Likewise, in bytes.
const MOST_BYTES: usize = 256 * 1024 * 1024;

/// One overlay: where it is seen, and what it is made of, topmost first.
#[derive(Default)]
struct Part {
    at: Vec<u8>,
    now: Vec<PathBuf>,
    then: Vec<PathBuf>,
    both: Vec<PathBuf>,
    /// Where something else is mounted.
    hidden: Vec<PathBuf>,
    /// Directories that the set-up makes.
    made: Vec<PathBuf>,
    /// The mode of the whole's root then, if no layer says.
    root_mode: Option<u32>,
}

/// Reads the parts from arguments (pairs of a word and its value) and writes each change to standard
/// output: a letter, the path, a zero byte.
pub(crate) fn main(arguments: &[OsString]) -> Result<(), String> {
    let mut parts: Vec<Part> = Vec::new();
    for pair in arguments.chunks(2) {
        let [word, value] = pair else { return Err("a word without a value".to_owned()) };
        if word == "part" {
            parts.push(Part { at: value.as_bytes().to_vec(), ..Part::default() });
            continue;
        }
        let part = parts.last_mut().ok_or("something comes before its part")?;
        let path = PathBuf::from(value);
        match word.as_bytes() {
            b"now" => part.now.push(path),
            b"then" => part.then.push(path),
            b"both" => part.both.push(path),
            b"hidden" => part.hidden.push(path),
            b"made" => part.made.push(path),
            b"root-mode" => {
                let mode = value.to_str().and_then(|mode| u32::from_str_radix(mode, 8).ok());
                part.root_mode = Some(mode.ok_or("the root's mode is no number")?);
            }
            _ => return Err(format!("an unknown word: {}", word.display())),
        }
    }
    let mut output = Output { writer: io::stdout().lock(), count: 0, bytes: 0 };
    for part in &parts {
        let mut at = Vec::new();
        compare(part, &mut output, &mut at).map_err(|error| {
            let path = Path::new(std::ffi::OsStr::from_bytes(&at)).display();
            format!("look for changes in {path}: {}", errno_text(&error))
        })?;
    }
    output.writer.flush().map_err(|error| errno_text(&error))
}

struct Output<W> {
    writer: W,
    count: usize,
    bytes: usize,
}

impl<W: Write> Output<W> {
    fn tell(&mut self, kind: u8, path: &[u8]) -> io::Result<()> {
        self.count += 1;
        self.bytes += path.len() + 2;
        if self.count > MOST || self.bytes > MOST_BYTES {
            return Err(io::Error::other(format!("there are more than {MOST} changes")));
        }
        self.writer.write_all(&[&[kind], path, &[0]].concat())
    }
}

/// A directory that is to be looked into.
struct Visit {
    /// Below the layers' roots.
    path: CString,
    now: Vec<usize>,
    then: Vec<usize>,
    both: Vec<usize>,
    /// Whether what both share is not seen now…
    now_ended: bool,
    /// … or was not then.
    then_ended: bool,
}

fn compare<W: Write>(part: &Part, output: &mut Output<W>, at: &mut Vec<u8>) -> io::Result<()> {
    at.clone_from(&part.at);
    let all: Vec<&Path> =
        part.now.iter().chain(&part.then).chain(&part.both).map(PathBuf::as_path).collect();
    let layers = Layers::open(&all)?;
    let (now, then) = (part.now.len(), part.now.len() + part.then.len());
    let mut hidden: HashSet<Vec<u8>> = HashSet::new();
    let mut made = hidden.clone();
    for (paths, set) in [(&part.hidden, &mut hidden), (&part.made, &mut made)] {
        for path in paths {
            // Mounts are put where the links of the lowest layer lead.
            let lowest = part.both.last().map(PathBuf::as_path);
            let real = lowest.and_then(|lowest| mounts::below(lowest, path).ok());
            let real = real.and_then(|real| Some(real.strip_prefix(lowest?).ok()?.to_owned()));
            for path in [Some(path.to_owned()), real].into_iter().flatten() {
                let bytes = path.as_os_str().as_bytes();
                set.insert(bytes.strip_prefix(b"/").unwrap_or(bytes).to_vec());
            }
        }
    }
    // What is above either is made along the way.
    let above: Vec<Vec<u8>> = hidden
        .iter()
        .chain(&made)
        .flat_map(|path| {
            let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
            ends.map(|(end, _)| path[..end].to_vec())
        })
        .collect();
    made.extend(above);
    let root = Visit {
        path: CString::default(),
        now: (0..now).collect(),
        then: (now..then).collect(),
        both: (then..all.len()).collect(),
        now_ended: false,
        then_ended: false,
    };
    let mode_of = |of: &[usize]| -> io::Result<Option<u32>> {
        let dirs = layers.dirs(c"", of)?;
        Ok(dirs.first().map(|dir| fstat(&dir.fd)).transpose()?.map(|stat| stat.st_mode & 0o7777))
    };
    let both = mode_of(&root.both)?;
    let mode_now = mode_of(&root.now)?.or(both);
    let mode_then = part.root_mode.or(mode_of(&root.then)?).or(both);
    if mode_now != mode_then {
        output.tell(b'M', if part.at.is_empty() { b"/" } else { &part.at })?;
    }
    let mut visits = vec![root];
    while let Some(visit) = visits.pop() {
        let look = Look { layers: &layers, part, hidden: &hidden, made: &made };
        at.clone_from(&part.at);
        at.push(b'/');
        at.extend_from_slice(visit.path.to_bytes());
        look.look(&visit, output, &mut visits)?;
    }
    Ok(())
}

struct Look<'a> {
    layers: &'a Layers,
    part: &'a Part,
    hidden: &'a HashSet<Vec<u8>>,
    made: &'a HashSet<Vec<u8>>,
}

impl Look<'_> {
    fn look<W: Write>(
        &self,
        visit: &Visit,
        output: &mut Output<W>,
        visits: &mut Vec<Visit>,
    ) -> io::Result<()> {
        let dirs = |of| self.layers.dirs(&visit.path, of);
        let (now, then, both) = (dirs(&visit.now)?, dirs(&visit.then)?, dirs(&visit.both)?);
        let mut all: BTreeSet<CString> = BTreeSet::new();
        let mut note = |name: &CStr| {
            all.insert(name.to_owned());
        };
        names(&now, &mut note)?;
        names(&then, &mut note)?;
        if visit.now_ended != visit.then_ended {
            names(&both, &mut note)?;
        }
        for name in all {
            let mut path = visit.path.to_bytes().to_vec();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            if self.hidden.contains(&path) {
                continue;
            }
            let shared = find(&both, &name)?;
            let (is, is_ended) = seen(&now, &name, &shared, visit.now_ended)?;
            let (was, was_ended) = seen(&then, &name, &shared, visit.then_ended)?;
            let made = self.made.contains(&path);
            let full = [&self.part.at[..], b"/", &path].concat();
            let deep = full.len() > LONGEST;
            if let Some(kind) = difference(is.stat.as_ref(), was.stat.as_ref(), made, deep) {
                output.tell(kind, &full)?;
            }
            if is.stat.as_ref().is_some_and(is_dir) && !deep {
                let was_dir = was.stat.as_ref().is_some_and(is_dir);
                let both_dir = shared.top.as_ref().is_some_and(is_dir);
                visits.push(Visit {
                    path: CString::new(path)?,
                    now: is.dirs,
                    then: if was_dir { was.dirs } else { Vec::new() },
                    both: if both_dir { shared.dirs } else { Vec::new() },
                    now_ended: is_ended,
                    then_ended: was_ended || !was_dir,
                });
            }
        }
        Ok(())
    }
}

/// What is under a name on one side.
struct Side {
    stat: Option<Stat>,
    /// Of the side's own layers.
    dirs: Vec<usize>,
}

/// With whether what both sides share is hidden there.
fn seen(own: &[LayerDir], name: &CStr, shared: &Found, ended: bool) -> io::Result<(Side, bool)> {
    let found = find(own, name)?;
    let ended = ended || found.ended;
    let stat = match &found.top {
        Some(stat) => Some(*stat),
        None if ended => None,
        None => shared.top,
    };
    Ok((Side { stat, dirs: found.dirs }, ended))
}

fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn difference(is: Option<&Stat>, was: Option<&Stat>, made: bool, deep: bool) -> Option<u8> {
    match (is, was) {
        (None, None) => None,
        (None, Some(_)) => Some(b'D'),
        (Some(is), None) => (!(made && is_dir(is))).then_some(b'A'),
        (Some(is), Some(was)) if is_dir(is) && is_dir(was) => {
            let by_set_up = made && is.st_mode & 0o7777 == 0o755;
            // What is in one that is too deep stays in the dark: it counts as changed.
            (is.st_mode != was.st_mode && !by_set_up || deep).then_some(b'M')
        }
        (Some(is), Some(was)) => {
            let of = |stat: &Stat| {
                (stat.st_mode, stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_rdev)
            };
            (of(is) != of(was)).then_some(b'M')
        }
    }
}
