//! What is told of a workspace on its way to a host.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::address::Address;

/// How far the sending of a workspace to a host is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UploadProgress {
    /// The host, as it was named.
    pub host: String,
    /// The directory of this machine.
    pub directory: PathBuf,
    /// How many files have been sent.
    pub files: u64,
    /// Of how many; not known before the host has said what it does not have.
    pub total_files: Option<u64>,
    /// How much has been sent, in bytes.
    pub done: u64,
    /// Of how much; not known before the host has said what it does not have.
    pub total: Option<u64>,
}

/// What is told of progress.
#[derive(Clone)]
pub(crate) struct Watcher(pub(crate) Arc<dyn Fn(&UploadProgress) + Send + Sync>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}

/// Counts what is sent, and tells it.
pub(crate) struct Telling {
    watcher: Option<Watcher>,
    progress: UploadProgress,
}

impl Telling {
    /// Nothing is sent yet, and the host has not been asked.
    pub(crate) fn begin(watcher: Option<Watcher>, host: &Address, directory: &Path) -> Self {
        let progress = UploadProgress {
            host: host.to_string(),
            directory: directory.to_owned(),
            files: 0,
            total_files: None,
            done: 0,
            total: None,
        };
        let telling = Self { watcher, progress };
        telling.tell();
        telling
    }

    /// So much is to be sent.
    pub(crate) fn wanted(&mut self, files: usize, bytes: u64) {
        self.progress.total_files = Some(files as u64);
        self.progress.total = Some(bytes);
        self.tell();
    }

    /// So much more of a file has been sent.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.progress.done = self.progress.done.saturating_add(bytes as u64);
        self.tell();
    }

    /// One more file has been sent as a whole.
    pub(crate) fn file_sent(&mut self) {
        self.progress.files += 1;
        self.tell();
    }

    fn tell(&self) {
        if let Some(watcher) = &self.watcher {
            (watcher.0)(&self.progress);
        }
    }
}
