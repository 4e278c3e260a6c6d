//! One layer out of several: over whatever lies below, it shows what they show together.

use std::{
    collections::BTreeSet,
    ffi::{CString, OsStr, OsString},
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::fs::{CWD, FileType, Mode, Stat, fstat, mkdirat, mknodat, openat};

use super::{
    base::errno_text,
    layers::{LayerDir, Layers, find, make_clear, make_opaque, names},
    tree_copy::{Copy, Pair, directory_flags, raise_file_limit, settle},
    tree_remove,
};

/// Merges layers as often as the arguments say: a target that is not there yet and its sources, topmost
/// first, and again after a `--`. What is half done is removed.
pub(crate) fn main(arguments: &[OsString]) -> Result<(), String> {
    raise_file_limit();
    for words in arguments.split(|word| word == "--") {
        let [target, sources @ ..] = words else { return Err("nothing to merge".to_owned()) };
        let target = Path::new(target);
        let sources: Vec<&Path> = sources.iter().map(Path::new).collect();
        let mut path = Vec::new();
        merge(target, &sources, &mut path).map_err(|error| {
            let _ = tree_remove::remove(target);
            let path = target.join(OsStr::from_bytes(&path));
            format!("merge layers to {}: {}", path.display(), errno_text(&error))
        })?;
    }
    Ok(())
}

struct Level {
    dirs: Vec<LayerDir>,
    target: OwnedFd,
    stat: Stat,
    opaque: bool,
    /// What is still to be merged.
    names: Vec<CString>,
    /// How long the path was above this level.
    above: usize,
}

impl Level {
    fn new(dirs: Vec<LayerDir>, target: OwnedFd, opaque: bool, above: usize) -> io::Result<Self> {
        let top = dirs.first().ok_or(io::ErrorKind::NotFound)?;
        let stat = fstat(&top.fd)?;
        let mut all = BTreeSet::new();
        names(&dirs, |name| {
            all.insert(name.to_owned());
        })?;
        Ok(Self { dirs, target, stat, opaque, names: all.into_iter().collect(), above })
    }

    fn settle(&self) -> io::Result<()> {
        settle(&self.dirs[0].fd, &self.target, &self.stat)?;
        // The topmost layer's own say counts for it alone.
        if self.opaque { make_opaque(&self.target) } else { make_clear(&self.target) }
    }
}

fn merge(target: &Path, sources: &[&Path], failed: &mut Vec<u8>) -> io::Result<()> {
    let layers = Layers::open(sources)?;
    let all: Vec<usize> = (0..sources.len()).collect();
    mkdirat(CWD, target, Mode::RWXU)?;
    let root = openat(CWD, target, directory_flags(), Mode::empty())?;
    let mut copy = Copy::to(&root)?;
    let mut levels = vec![Level::new(layers.dirs(c"", &all)?, root, false, 0)?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            let Some(done) = levels.pop() else { break };
            done.settle()?;
            copy.path.truncate(done.above);
            continue;
        };
        let above = copy.descend(&name);
        match entry(&mut copy, level, &name, above) {
            Ok(Some(below)) => levels.push(below),
            Ok(None) => copy.path.truncate(above),
            Err(error) => {
                *failed = copy.path;
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Merges what is under one name; a directory is made, to be gone into next.
fn entry(
    copy: &mut Copy,
    level: &Level,
    name: &CString,
    above: usize,
) -> io::Result<Option<Level>> {
    let found = find(&level.dirs, name)?;
    let Some(stat) = found.top else {
        if found.ended {
            let mode = Mode::empty();
            mknodat(&level.target, name, FileType::CharacterDevice, mode, 0)?;
        }
        return Ok(None);
    };
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        let of = level.dirs.iter().filter(|dir| found.dirs.contains(&dir.layer));
        let dirs = of.map(|dir| dir.child(name)).collect::<io::Result<_>>()?;
        mkdirat(&level.target, name, Mode::RWXU)?;
        let target = openat(&level.target, name, directory_flags(), Mode::empty())?;
        return Level::new(dirs, target, found.ended, above).map(Some);
    }
    let holds = level.dirs.iter().find(|dir| Some(dir.layer) == found.layer);
    let holds = holds.ok_or(io::ErrorKind::NotFound)?;
    let pair = Pair { source: holds.fd.try_clone()?, target: level.target.try_clone()? };
    copy.entry(&pair, name)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_on_top_is_kept_and_what_hides_goes_on_hiding() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for path in ["low/both", "low/cut", "low/file-then-dir/x", "top/both", "top/cut", "top/new"]
        {
            fs::create_dir_all(at(path)).unwrap();
        }
        for (path, text) in [
            ("low/both/a", "low"),
            ("low/both/b", "low"),
            ("low/cut/hidden", "low"),
            ("top/both/a", "top"),
            ("top/cut/seen", "top"),
        ] {
            fs::write(at(path), text).unwrap();
        }
        let cut = fs::File::open(at("top/cut")).unwrap();
        if make_opaque(&cut).is_err() {
            eprintln!("skipped: no user attributes here");
            return;
        }
        let whiteout = |path: &str| {
            let kind = FileType::CharacterDevice;
            mknodat(CWD, at(path), kind, Mode::empty(), 0).is_ok()
        };
        if !(whiteout("low/gone") && whiteout("top/both/b")) {
            eprintln!("skipped: no whiteouts can be made here");
            return;
        }
        let words = ["out", "top", "low"].map(|name| at(name).into_os_string());
        main(&words).unwrap();
        let text = |path: &str| fs::read_to_string(at(path)).unwrap();
        assert_eq!((text("out/both/a"), text("out/cut/seen")), ("top".into(), "top".into()));
        assert!(!at("out/cut/hidden").exists() && at("out/new").is_dir());
        assert!(at("out/file-then-dir/x").is_dir());
        let layers = Layers::open(&[&at("out")]).unwrap();
        let root = layers.dirs(c"", &[0]).unwrap();
        for (name, is_dir, ended) in
            [(c"gone", false, true), (c"cut", true, true), (c"both", true, false)]
        {
            let found = find(&root, name).unwrap();
            assert_eq!((!found.dirs.is_empty(), found.ended), (is_dir, ended), "{name:?}");
        }
        let both = layers.dirs(c"both", &[0]).unwrap();
        let found = find(&both, c"b").unwrap();
        assert!(found.top.is_none() && found.ended);
    }
}
