//! A digest of a directory, to show that nobody has touched it.

use std::{
    collections::hash_map::DefaultHasher,
    fs,
    hash::{Hash, Hasher},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Names, kinds, modes, owners, sizes and change times of all that is below a directory.
///
/// # Errors
///
/// If something cannot be looked at.
pub fn of(directory: &Path) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    visit(directory, &mut hasher)?;
    Ok(hasher.finish())
}

fn visit(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    path.hash(hasher);
    (metadata.mode(), metadata.uid(), metadata.gid(), metadata.len()).hash(hasher);
    (metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()).hash(hasher);
    if metadata.is_dir() {
        let mut entries: Vec<_> =
            fs::read_dir(path)?.map(|entry| entry.map(|e| e.path())).collect::<io::Result<_>>()?;
        entries.sort();
        for entry in entries {
            visit(&entry, hasher)?;
        }
    }
    Ok(())
}
