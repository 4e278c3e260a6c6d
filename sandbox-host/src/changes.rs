//! What the guest program's tool `changes` tells.

use std::{ffi::OsString, os::unix::ffi::OsStringExt, process::Output};

use sandbox_core::{Change, ChangeKind, Error, ErrorKind, Result};

use crate::error::failed;

/// How it says that there are too many.
const TOO_MANY: &str = "there are more than";

/// What it said, or why it failed.
pub(crate) fn told(operation: &'static str, output: &Output) -> Result<Vec<Change>> {
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let message = format!("{} ({})", said.trim(), output.status);
        let kind = match said.contains(TOO_MANY) {
            true => ErrorKind::LimitExceeded,
            false => ErrorKind::Backend,
        };
        return Err(Error::new(kind, operation, message));
    }
    read(operation, &output.stdout)
}

/// What the helper wrote. It is ours, but what it looked at is not: nothing is taken for granted.
fn read(operation: &'static str, output: &[u8]) -> Result<Vec<Change>> {
    let broken = || failed(operation, "the helper's output is broken");
    let mut changes = Vec::new();
    for record in output.split_inclusive(|byte| *byte == 0) {
        let (kind, path) = record.split_first().ok_or_else(broken)?;
        let kind = match kind {
            b'A' => ChangeKind::Added,
            b'M' => ChangeKind::Modified,
            b'D' => ChangeKind::Deleted,
            _ => return Err(broken()),
        };
        let path = path.strip_suffix(&[0]).filter(|path| path.starts_with(b"/"));
        let path = OsString::from_vec(path.ok_or_else(broken)?.to_vec()).into();
        changes.push(Change { path, kind });
    }
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn records_are_read_whatever_their_paths() {
        let changes = read("changes", b"A/a\nb\0D/\xff\0").unwrap();
        assert_eq!(changes[0], Change { path: "/a\nb".into(), kind: ChangeKind::Added });
        assert_eq!(changes[1].path, PathBuf::from(OsString::from_vec(b"/\xff".to_vec())));
        assert!(read("changes", b"").unwrap().is_empty());
        for broken in [&b"A/a"[..], b"X/a\0", b"Aa\0", b"\0"] {
            assert!(read("changes", broken).is_err());
        }
    }
}
