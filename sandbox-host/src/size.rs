//! How much a directory measures.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// What a directory takes on disk, in bytes. A directory in it that its owner made unreadable, and that an
/// ordinary harness therefore cannot look into, counts as itself. What is removed meanwhile counts or does
/// not.
pub(crate) fn measure(top: &Path) -> io::Result<u64> {
    let mut total = 0_u64;
    // Of a file with several names, each name but the first costs nothing.
    let mut seen = HashSet::new();
    let mut next: Vec<PathBuf> = vec![top.to_owned()];
    while let Some(path) = next.pop() {
        let found = match fs::symlink_metadata(&path) {
            Err(error) if is_gone(&error) && path != top => continue,
            found => found?,
        };
        if found.nlink() < 2 || found.is_dir() || seen.insert((found.dev(), found.ino())) {
            total += found.blocks() * 512;
        }
        if found.is_dir() {
            match fs::read_dir(&path) {
                Ok(entries) => {
                    for entry in entries {
                        next.push(entry?.path());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(error) if is_gone(&error) && path != top => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(total)
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_names_counts_once_and_a_hole_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let empty = measure(dir.path()).unwrap();
        fs::write(dir.path().join("one"), vec![1; 64 * 1024]).unwrap();
        let one = measure(dir.path()).unwrap();
        assert!(one >= empty + 64 * 1024);
        fs::hard_link(dir.path().join("one"), dir.path().join("two")).unwrap();
        fs::File::create(dir.path().join("hole")).unwrap().set_len(1 << 30).unwrap();
        assert!(measure(dir.path()).unwrap() < one + 64 * 1024);
    }
}
