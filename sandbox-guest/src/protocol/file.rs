//! Files. Paths are bytes; relative ones begin at the workspace.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// A file operation; see each for its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileRequest {
    /// A file's contents: [`super::Response::File`], data frames, [`super::Response::Done`].
    Read {
        /// The file; symbolic links are followed.
        path: Bytes,
        /// Where to begin.
        #[serde(default)]
        offset: u64,
        /// How much at most; to the end if it is not given.
        #[serde(default)]
        length: Option<u64>,
    },
    /// Write a file: the data frames that follow, up to [`super::Input::End`]. Answered by
    /// [`super::Response::Done`]. Unless `append` is set, the file is replaced as a whole at the end, or
    /// not at all.
    Write {
        /// The file; symbolic links are followed.
        path: Bytes,
        /// Permission bits of a new file; 0644 if not given. An existing one keeps its own.
        #[serde(default)]
        mode: Option<u32>,
        /// Add to the end instead of replacing.
        #[serde(default)]
        append: bool,
        /// Make missing directories above it.
        #[serde(default)]
        parents: bool,
    },
    /// Metadata: [`super::Response::File`].
    Stat {
        /// What.
        path: Bytes,
        /// Whether to follow a symbolic link.
        #[serde(default)]
        follow: bool,
    },
    /// A directory's entries, in no order: [`super::Response::Entries`] until
    /// [`super::Response::Done`].
    List {
        /// The directory.
        path: Bytes,
    },
    /// Make a directory: [`super::Response::Done`].
    MakeDir {
        /// The directory.
        path: Bytes,
        /// Missing ones above it too; then it may exist already.
        #[serde(default)]
        parents: bool,
        /// Permission bits; 0755 if not given.
        #[serde(default)]
        mode: Option<u32>,
    },
    /// Remove a file, a link, or an empty directory: [`super::Response::Done`].
    Remove {
        /// What.
        path: Bytes,
        /// A directory with all that is in it.
        #[serde(default)]
        recursive: bool,
    },
    /// Rename, replacing a file of that name: [`super::Response::Done`].
    Rename {
        /// From.
        from: Bytes,
        /// To.
        to: Bytes,
    },
    /// Make a symbolic link: [`super::Response::Done`].
    Symlink {
        /// What it says.
        target: Bytes,
        /// Where it is.
        path: Bytes,
    },
    /// Set permission bits: [`super::Response::Done`].
    SetMode {
        /// Of what; symbolic links are followed.
        path: Bytes,
        /// The bits.
        mode: u32,
    },
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, socket or device.
    #[serde(other)]
    Other,
}

/// A file's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// What it is.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// Permission bits, with set-user-id, set-group-id and sticky.
    pub mode: u32,
    /// The owner's number inside the sandbox.
    pub uid: u32,
    /// The group's.
    pub gid: u32,
    /// The last change of the contents, in milliseconds since the Unix epoch.
    pub modified_ms: i64,
    /// What a symbolic link says.
    #[serde(default)]
    pub target: Option<Bytes>,
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name, without a slash.
    pub name: Bytes,
    /// Its own metadata: a symbolic link is not followed.
    pub info: FileInfo,
}

/// See [`super::Response::Done`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Done {
    /// How many bytes were moved, where some were.
    pub bytes: u64,
}
