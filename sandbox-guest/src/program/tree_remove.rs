//! Removing a directory tree, for the harness's tools.

use std::path::Path;

pub(crate) use sandbox_guest::tree::remove_all;

use super::base::errno_text;

/// Removes a file or a tree.
pub(crate) fn remove(path: &Path) -> Result<(), String> {
    remove_all(path).map_err(|error| format!("remove {}: {}", path.display(), errno_text(&error)))
}
