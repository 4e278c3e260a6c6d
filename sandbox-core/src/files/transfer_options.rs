//! What is asked of an upload or a download, and what came of it.

use std::{fmt, path::PathBuf, sync::Arc};

/// What becomes of something that is at the destination already.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// A file is replaced by a file. A directory takes in a directory: what has the same path is
    /// replaced, what has none stays, directories that are there keep their modes. A file never takes the
    /// place of a directory, nor a directory that of a file.
    #[default]
    Merge,
    /// It goes, all of it. At once where the filesystem can exchange two files or directories, otherwise
    /// right before.
    Replace,
    /// It stays, and the transfer fails.
    Refuse,
}

/// What becomes of symbolic links that lead outside of what is downloaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutsideLinks {
    /// The download fails and names the link.
    #[default]
    Refuse,
    /// They are left out.
    Skip,
    /// They are made. Whoever follows such a link later may end up anywhere on this host.
    AllowPointingAnywhereOnThisHost,
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes of contents.
    pub bytes: u64,
    /// Files, links and directories.
    pub files: u64,
    /// How many bytes it will be, where that is known: of a single file.
    pub total: Option<u64>,
}

/// What was transferred.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transferred {
    /// Bytes of contents, holes included.
    pub bytes: u64,
    /// Files, links and directories.
    pub files: u64,
    /// How many things were left out.
    pub skipped: u64,
    /// The first thousand of them, from the directory on that was transferred.
    pub skipped_paths: Vec<PathBuf>,
}

/// Who is told of the progress.
#[derive(Clone, Default)]
pub(super) struct Listener(Option<Arc<Tell>>);

type Tell = dyn Fn(&Progress) + Send + Sync;

impl Listener {
    pub(super) fn tell(&self, progress: &Progress) {
        if let Some(tell) = &self.0 {
            tell(progress);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "set" } else { "none" })
    }
}

/// How something is uploaded.
#[derive(Debug, Clone, Default)]
pub struct UploadOptions {
    pub(super) existing: Existing,
    pub(super) skip_special: bool,
    pub(super) listener: Listener,
}

impl UploadOptions {
    /// What is there is merged with; devices, FIFOs and sockets fail the upload.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// If something is at the destination.
    #[must_use]
    pub fn existing(mut self, existing: Existing) -> Self {
        self.existing = existing;
        self
    }

    /// Leaves out devices, FIFOs and sockets instead of failing.
    #[must_use]
    pub fn skip_special(mut self) -> Self {
        self.skip_special = true;
        self
    }

    /// Tells how far it is, again and again; the last time when all of it has been sent. It must not
    /// block.
    #[must_use]
    pub fn progress(mut self, tell: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.listener = Listener(Some(Arc::new(tell)));
        self
    }
}

/// How something is downloaded.
#[derive(Debug, Clone)]
pub struct DownloadOptions {
    pub(super) existing: Existing,
    pub(super) skip_special: bool,
    pub(super) links: OutsideLinks,
    pub(super) max_files: u64,
    pub(super) max_bytes: u64,
    pub(super) listener: Listener,
}

impl Default for DownloadOptions {
    fn default() -> Self {
        Self {
            existing: Existing::default(),
            skip_special: false,
            links: OutsideLinks::default(),
            max_files: 2_000_000,
            max_bytes: 64 * 1024 * 1024 * 1024,
            listener: Listener::default(),
        }
    }
}

impl DownloadOptions {
    /// What is there is merged with; devices, FIFOs, sockets and links that lead outside fail the
    /// download, and so do more than two million files or 64 GiB.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// If something is at the destination.
    #[must_use]
    pub fn existing(mut self, existing: Existing) -> Self {
        self.existing = existing;
        self
    }

    /// Leaves out devices, FIFOs and sockets instead of failing.
    #[must_use]
    pub fn skip_special(mut self) -> Self {
        self.skip_special = true;
        self
    }

    /// What becomes of symbolic links that lead outside of what is downloaded: absolute ones, ones that go
    /// up further than that, and ones that go up after a name, which could be another link's.
    #[must_use]
    pub fn outside_links(mut self, links: OutsideLinks) -> Self {
        self.links = links;
        self
    }

    /// How many files, links and directories it may be.
    #[must_use]
    pub fn max_files(mut self, files: u64) -> Self {
        self.max_files = files;
        self
    }

    /// How many bytes of contents it may be, holes included.
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Tells how far it is, again and again; the last time before it is put in its place. It must not
    /// block for long.
    #[must_use]
    pub fn progress(mut self, tell: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.listener = Listener(Some(Arc::new(tell)));
        self
    }
}
