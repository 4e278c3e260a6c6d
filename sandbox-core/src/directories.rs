//! For backends whose sandboxes and snapshots are directories of this host, however those are copied.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{Change, ChangeKind};

/// What one directory has that another had not, as [`SandboxBackend::changes`](crate::SandboxBackend::changes)
/// tells it; without another, all that it has. `shown` is where the directory is seen inside.
///
/// Takes time as a walk through both. What is closed even to its owner is left out.
///
/// # Errors
///
/// If one of them cannot be read.
pub fn compare(now: &Path, then: Option<&Path>, shown: &Path) -> io::Result<Vec<Change>> {
    let mut found = Vec::new();
    // Not by calls of its own: how deep a sandbox's directories are is up to the sandbox.
    let mut rest = vec![(now.to_owned(), then.map(Path::to_owned), shown.to_owned())];
    while let Some((now, then, shown)) = rest.pop() {
        for name in names(Some(&now))?.union(&names(then.as_deref())?) {
            let (path, old, shown) =
                (now.join(name), then.as_ref().map(|then| then.join(name)), shown.join(name));
            let (is, was) = (Looks::of(&path), old.as_deref().and_then(Looks::of));
            let kind = match (&is, &was) {
                (Some(is), Some(was)) if is == was => None,
                (Some(_), Some(_)) => Some(ChangeKind::Modified),
                (Some(_), None) => Some(ChangeKind::Added),
                (None, _) => Some(ChangeKind::Deleted),
            };
            found.extend(kind.map(|kind| Change { path: shown.clone(), kind }));
            if is.is_some_and(|is| is.is_dir()) {
                let old = old.filter(|_| was.is_some_and(|was| was.is_dir()));
                rest.push((path, old, shown));
            }
        }
    }
    Ok(found)
}

/// What a directory takes on disk, in bytes. What is removed meanwhile does not count.
///
/// # Errors
///
/// If it cannot be read.
pub fn size(dir: &Path) -> io::Result<u64> {
    let mut total = 0;
    let mut rest: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(path) = rest.pop() {
        let looked = fs::symlink_metadata(&path).and_then(|found| {
            let entries = if found.is_dir() { names(Some(&path))? } else { BTreeSet::new() };
            Ok((found.blocks() * 512, entries))
        });
        match looked {
            Ok((size, entries)) => {
                total += size;
                rest.extend(entries.into_iter().map(|name| path.join(name)));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && path != dir => {}
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// What tells one state of a file from another.
#[derive(PartialEq)]
struct Looks {
    mode: u32,
    /// A directory's own time and size tell of its entries.
    file: Option<(i64, i64, u64)>,
}

impl Looks {
    fn of(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        let file = (found.mtime(), found.mtime_nsec(), found.size());
        Some(Self { mode: found.mode(), file: (!found.is_dir()).then_some(file) })
    }

    fn is_dir(&self) -> bool {
        self.file.is_none()
    }
}

fn names(dir: Option<&Path>) -> io::Result<BTreeSet<OsString>> {
    let entries = match dir.map(fs::read_dir).transpose() {
        // Closed even to its owner: what is in it cannot be told.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
        entries => entries?,
    };
    entries.into_iter().flatten().map(|entry| Ok(entry?.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (then, now) = (dir.path().join("then"), dir.path().join("now"));
        for (root, files) in [
            (&then, ["same", "changed", "gone/a", "was-a-file", "kept/x"].as_slice()),
            (&now, &["same", "changed", "new/a", "was-a-file/in", "kept/x"]),
        ] {
            for name in files {
                fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
                fs::write(root.join(name), "x").unwrap();
                let file = fs::File::open(root.join(name)).unwrap();
                file.set_modified(std::time::UNIX_EPOCH).unwrap();
            }
        }
        fs::write(now.join("changed"), "xy").unwrap();
        let told = |then: Option<&Path>| {
            let mut found = compare(&now, then, Path::new("/w")).unwrap();
            found.sort();
            let line = |change: Change| format!("{:?} {}", change.kind, change.path.display());
            found.into_iter().map(line).collect::<Vec<_>>()
        };
        assert_eq!(
            told(Some(&then)),
            [
                "Modified /w/changed",
                "Deleted /w/gone",
                "Added /w/new",
                "Added /w/new/a",
                "Modified /w/was-a-file",
                "Added /w/was-a-file/in"
            ]
        );
        assert_eq!(told(None).len(), 8);
        assert!(compare(&dir.path().join("nowhere"), None, Path::new("/w")).is_err());
    }

    #[test]
    fn a_size_is_what_it_takes_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let empty = size(dir.path()).unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        fs::write(dir.path().join("below/file"), vec![1; 100_000]).unwrap();
        let holes = fs::File::create(dir.path().join("holes")).unwrap();
        holes.set_len(1 << 30).unwrap();
        let full = size(dir.path()).unwrap();
        assert!(full >= empty + 100_000 && full < 1 << 20, "{empty} {full}");
        assert!(size(&dir.path().join("nowhere")).is_err());
    }
}
