//! When missing images are fetched, and who is told how far that is.

use std::{fmt, sync::Arc};

/// When an image is fetched from its registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PullPolicy {
    /// Never: a missing image is an error.
    Never,
    /// When the engine does not have it.
    #[default]
    IfMissing,
    /// Each time a sandbox is made from it, so that it is the newest.
    Always,
}

/// How far the fetching of an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PullProgress {
    /// The image.
    pub image: String,
    /// The layer, where it is about one.
    pub layer: Option<String>,
    /// What the engine does, in its words.
    pub status: String,
    /// How much of that is done, in bytes.
    pub done: Option<u64>,
    /// Of how much.
    pub total: Option<u64>,
}

/// What is told of progress.
#[derive(Clone)]
pub(crate) struct Watcher(pub(crate) Arc<dyn Fn(&PullProgress) + Send + Sync>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
