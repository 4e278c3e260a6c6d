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
    /// Where a path leads when every link in it is followed: [`super::Response::Path`].
    Canonicalize {
        /// What.
        path: Bytes,
    },
    /// Send a file or a tree: [`super::Response::Tree`] records and data frames, up to
    /// [`TreeRecord::End`]; then [`super::Response::Done`].
    Download {
        /// The file or directory; a symbolic link is followed.
        path: Bytes,
        /// Leave out devices, FIFOs and sockets instead of failing.
        #[serde(default)]
        skip_special: bool,
    },
    /// Take a file or a tree: [`super::Input::Tree`] records and data frames, up to
    /// [`TreeRecord::End`]. Answered by [`super::Response::Done`]. All of it appears at the end, or
    /// nothing.
    Upload {
        /// What it becomes here.
        path: Bytes,
        /// If something is there.
        #[serde(default)]
        existing: Existing,
    },
    /// Tell what changes: [`super::Response::Done`] once nothing is missed any more, then
    /// [`super::Response::Events`] until the client lets go of the stream.
    Watch {
        /// The file or directory; a symbolic link is followed.
        path: Bytes,
        /// The directories below it too, those that are made later as well.
        #[serde(default)]
        recursive: bool,
    },
}

/// What becomes of something that is where a file or tree is to be put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Existing {
    /// A file is replaced by a file. A directory takes in a directory: what has the same path is
    /// replaced, what has none stays.
    #[default]
    Merge,
    /// It goes.
    Replace,
    /// It stays, and the request fails.
    Refuse,
}

/// A piece of a file or tree on its way. A directory's record is followed by those of its entries and by
/// [`TreeRecord::Leave`]; a file's by its data frames and holes. Names are single parts of a path; the
/// first record, which is the thing itself, has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TreeRecord {
    /// A directory begins.
    Directory {
        /// In the directory that was begun last.
        name: Bytes,
        /// Mode and time.
        meta: TreeMeta,
    },
    /// The directory that was begun last and is not complete is complete.
    Leave,
    /// A file begins; it ends where another record than a hole comes.
    File {
        /// In the directory that was begun last.
        name: Bytes,
        /// Mode and time.
        meta: TreeMeta,
        /// Its size when it was opened, in bytes.
        size: u64,
    },
    /// The file goes on with so many zeros that take no place.
    Hole {
        /// In bytes.
        length: u64,
    },
    /// A symbolic link.
    Symlink {
        /// In the directory that was begun last.
        name: Bytes,
        /// Mode and time.
        meta: TreeMeta,
        /// What it says.
        target: Bytes,
    },
    /// Another name of a file that came before.
    Link {
        /// In the directory that was begun last.
        name: Bytes,
        /// The file's path from the first record on.
        to: Bytes,
    },
    /// Something that is left out, as was asked for.
    Skipped {
        /// Its path from the first record on.
        path: Bytes,
    },
    /// That is all.
    End,
}

/// What else is kept of a file of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TreeMeta {
    /// Permission bits.
    pub mode: u32,
    /// The last change of the contents, in seconds since the Unix epoch.
    pub seconds: i64,
    /// And nanoseconds.
    pub nanos: u32,
}

/// Something that happened to a file that is watched. Paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FileEvent {
    /// There is a new file of this name, perhaps instead of another.
    Created(Bytes),
    /// Its contents or metadata changed.
    Modified(Bytes),
    /// It is gone.
    Removed(Bytes),
    /// It has another name now.
    Renamed {
        /// The old one.
        from: Bytes,
        /// The new one.
        to: Bytes,
    },
    /// More happened than was kept: look for yourself.
    Overflow,
    /// What was watched is gone, and so is the watch.
    End,
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
