//! Lists of files, as the guest program tells them, and what differs between two.

use std::{collections::BTreeMap, ffi::OsString, fs::FileType, os::unix::ffi::OsStringExt};

use sandbox_core::{Change, ChangeKind, Error, ErrorKind, Result};

/// A sandbox with more files than this has its list refused.
pub(crate) const MOST_BYTES: u64 = 256 * 1024 * 1024;

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Link,
    Other,
}

impl Kind {
    pub(crate) fn of(kind: FileType) -> Self {
        if kind.is_dir() {
            Self::Directory
        } else if kind.is_file() {
            Self::File
        } else if kind.is_symlink() {
            Self::Link
        } else {
            Self::Other
        }
    }

    fn letter(self) -> char {
        match self {
            Self::File => 'f',
            Self::Directory => 'd',
            Self::Link => 'l',
            Self::Other => 'o',
        }
    }

    fn from_letter(letter: &str) -> Option<Self> {
        [Self::File, Self::Directory, Self::Link, Self::Other]
            .into_iter()
            .find(|kind| letter.chars().eq([kind.letter()]))
    }
}

/// A file, directory or link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) size: u64,
    /// In seconds: more is lost in a layer.
    pub(crate) mtime: i64,
    /// Of its contents, if its time alone is not enough.
    pub(crate) hash: Option<u64>,
}

impl Entry {
    /// The line of this path: its fields, the path, a zero byte.
    pub(crate) fn write(&self, path: &[u8], to: &mut Vec<u8>) {
        let hash = self.hash.map_or_else(|| "-".to_owned(), |hash| format!("{hash:x}"));
        let Self { kind, mode, size, mtime, .. } = self;
        let fields = format!("{} {mode:o} {size} {mtime} {hash} ", kind.letter());
        to.extend_from_slice(fields.as_bytes());
        to.extend_from_slice(path);
        to.push(0);
    }

    fn differs(&self, then: &Self) -> bool {
        if self.kind != then.kind || self.mode != then.mode {
            return true;
        }
        // A directory's size and time are those of its list of entries.
        if self.kind == Kind::Directory {
            return false;
        }
        let contents = match (self.hash, then.hash) {
            (Some(now), Some(then)) => now != then,
            _ => false,
        };
        self.size != then.size || self.mtime != then.mtime || contents
    }
}

/// What there is, by absolute path.
pub(crate) type Listing = BTreeMap<Vec<u8>, Entry>;

/// Reads lines; they may come from inside.
pub(crate) fn parse(text: &[u8]) -> Result<Listing> {
    let bad = || {
        let message = "the list of a sandbox's files makes no sense";
        Error::new(ErrorKind::Guest, "changes", message)
    };
    let mut found = Listing::new();
    let Some(text) = text.strip_suffix(&[0]) else {
        return if text.is_empty() { Ok(found) } else { Err(bad()) };
    };
    for line in text.split(|byte| *byte == 0) {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut word = || fields.next().and_then(|word| std::str::from_utf8(word).ok());
        let entry = (|| {
            let kind = Kind::from_letter(word()?)?;
            let mode = u32::from_str_radix(word()?, 8).ok()?;
            let size = word()?.parse().ok()?;
            let mtime = word()?.parse().ok()?;
            let hash = match word()? {
                "-" => None,
                hash => Some(u64::from_str_radix(hash, 16).ok()?),
            };
            Some(Entry { kind, mode, size, mtime, hash })
        })();
        let path = fields.next().filter(|path| path.starts_with(b"/"));
        let (Some(entry), Some(path)) = (entry, path) else { return Err(bad()) };
        found.insert(path.to_vec(), entry);
    }
    Ok(found)
}

/// What `now` has that `then` had not.
pub(crate) fn differences(then: &Listing, now: &Listing) -> Vec<Change> {
    let mut changes = Vec::new();
    for (path, entry) in now {
        match then.get(path) {
            None => changes.push(change(path, ChangeKind::Added)),
            Some(before) if entry.differs(before) => {
                changes.push(change(path, ChangeKind::Modified));
            }
            Some(_) => {}
        }
    }
    for path in then.keys() {
        // What is in a directory goes with it.
        let above = parent(path);
        let is_topmost = above.is_none_or(|above| {
            now.get(above).is_some_and(|entry| entry.kind == Kind::Directory) || above == b"/"
        });
        if !now.contains_key(path) && is_topmost {
            changes.push(change(path, ChangeKind::Deleted));
        }
    }
    changes
}

fn parent(path: &[u8]) -> Option<&[u8]> {
    let at = path.iter().rposition(|byte| *byte == b'/')?;
    match at {
        0 if path.len() > 1 => Some(b"/"),
        0 => None,
        at => Some(&path[..at]),
    }
}

fn change(path: &[u8], kind: ChangeKind) -> Change {
    Change { path: OsString::from_vec(path.to_vec()).into(), kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(lines: &[&str]) -> Listing {
        parse(&lines.iter().flat_map(|line| [line.as_bytes(), &[0]].concat()).collect::<Vec<_>>())
            .unwrap()
    }

    fn told(then: &[&str], now: &[&str]) -> Vec<String> {
        let name = |kind| match kind {
            ChangeKind::Added => 'A',
            ChangeKind::Modified => 'M',
            ChangeKind::Deleted => 'D',
        };
        differences(&listing(then), &listing(now))
            .iter()
            .map(|change| format!("{}{}", name(change.kind), change.path.display()))
            .collect()
    }

    #[test]
    fn what_differs_is_told() {
        let then = [
            "d 755 0 5 - /w",
            "f 644 3 5 - /w/a b",
            "f 644 3 5 aa /w/racy",
            "d 755 0 5 - /w/dir",
            "f 644 3 5 - /w/dir/x",
            "f 644 3 5 - /w/mode",
        ];
        let now = [
            "d 755 0 9 - /w",
            "f 644 3 6 - /w/a b",
            "f 644 3 5 ab /w/racy",
            "d 755 0 7 - /w/new",
            "f 644 0 7 - /w/new/x",
            "f 755 3 5 - /w/mode",
        ];
        assert_eq!(
            told(&then, &now),
            ["M/w/a b", "M/w/mode", "A/w/new", "A/w/new/x", "M/w/racy", "D/w/dir"]
        );
        assert!(told(&then, &then).is_empty());
    }

    #[test]
    fn what_was_a_directory_and_is_a_file_is_modified() {
        let then = ["d 755 0 5 - /a", "f 644 1 5 - /a/x"];
        assert_eq!(told(&then, &["f 644 1 5 - /a"]), ["M/a"]);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [&b"x"[..], b"f 644\0", b"f 644 1 1 - relative\0", b"f 9 1 1 - /a\0", b"\0\0"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        assert!(parse(b"").unwrap().is_empty());
    }

    #[test]
    fn names_may_be_anything() {
        let entry = Entry { kind: Kind::File, mode: 0o644, size: 1, mtime: -5, hash: Some(7) };
        let mut text = Vec::new();
        entry.write(b"/a b\n\xff", &mut text);
        assert_eq!(parse(&text).unwrap()[&b"/a b\n\xff"[..]], entry);
    }
}
