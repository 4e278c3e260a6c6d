//! Files and trees on their way from one place to another, as records on a stream.
//!
//! Both the harness and the guest read trees ([`Source`]) and write them ([`Target`]). A target may be fed
//! by a hostile peer: a record names a single part of a path, each directory is made by the target and
//! held open, and nothing is opened through a link; so there is no path that could lead outside. What
//! arrives lies in a temporary place beside the destination, or in it, until all of it is there. No step
//! holds a tree or a file in memory.

mod install;
mod links;
mod merge;
mod remove;
mod source;
mod target;

pub use remove::{remove_all, remove_at};
pub use source::{Source, SourceOptions};
pub use target::{Links, Target, TargetOptions};

use std::path::PathBuf;

use crate::TreeRecord;

/// How many directories a tree may have, one in another. Each takes a descriptor while it is open.
pub const MAX_DEPTH: usize = 256;

/// How the names of things begin that are not complete yet.
pub const TEMPORARY: &str = ".sandbox-transfer-";

/// How many paths of things that were left out are kept.
pub const MAX_SKIPPED: usize = 1000;

/// A piece of a tree, as a [`Target`] takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// A record.
    Record(TreeRecord),
    /// Contents of the file that was begun last.
    Data(Vec<u8>),
}

impl Piece {
    /// What a piece costs beside its data, in bytes: roughly.
    pub const OVERHEAD: usize = 256;

    /// Whether no other follows.
    #[must_use]
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Record(TreeRecord::End))
    }
}

/// How much of a file or tree has passed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of contents, holes included.
    pub bytes: u64,
    /// Files, links and directories.
    pub entries: u64,
    /// How many were left out.
    pub skipped: u64,
    /// The first [`MAX_SKIPPED`] of them, from the root of the tree on.
    pub skipped_paths: Vec<PathBuf>,
}

impl Totals {
    fn skip(&mut self, path: PathBuf) {
        self.skipped += 1;
        if self.skipped_paths.len() < MAX_SKIPPED {
            self.skipped_paths.push(path);
        }
    }
}
