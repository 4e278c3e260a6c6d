//! What a workspace was when it was copied, kept in the container itself: so that it can be told later
//! what the sandbox has changed.

use std::{io, os::unix::fs::MetadataExt};

use crate::{
    archive::Seen,
    container::OWN,
    listing::{Entry, Kind},
};

/// A list of a copied workspace in the making.
pub(crate) struct Baseline {
    since: i64,
    text: Vec<u8>,
}

/// Longer ones are not kept: then there is nothing to compare with.
const MOST: usize = 64 * 1024 * 1024;

impl Baseline {
    /// Of what was changed after `since` the contents are told too: the time alone cannot tell a change
    /// within the same second.
    pub(crate) fn begin(since: i64) -> Self {
        Self { since, text: Vec::new() }
    }

    /// Where it lies in the container.
    pub(crate) fn path() -> String {
        format!("{OWN}/baseline")
    }

    pub(crate) fn add(&mut self, seen: &Seen<'_>) -> io::Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let metadata = seen.metadata;
        let kind = Kind::of(metadata.file_type());
        let hash = (kind == Kind::File && metadata.mtime() >= self.since).then_some(seen.hash);
        let size = if kind == Kind::Directory { 0 } else { metadata.len() };
        let mode = if kind == Kind::Link { 0o777 } else { metadata.mode() & 0o7777 };
        let entry = Entry { kind, mode, size, mtime: metadata.mtime(), hash };
        let name = seen.name.as_os_str().as_bytes();
        entry.write(&[b"/", name].concat(), &mut self.text);
        if self.text.len() > MOST {
            return Err(io::Error::other("the workspace has too many files"));
        }
        Ok(())
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.text
    }
}
