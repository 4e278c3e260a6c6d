//! The sandbox user's entry in a root directory that knows no such user.

use std::{
    fs,
    io::{self, Read},
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2},
    io::Errno,
};

use super::host::{HOME, INSIDE_ID};

/// No list of users is longer.
const MOST: u64 = 1024 * 1024;

/// The files of `/etc` that have to be another than the root's own, for programs to find out who they
/// are: `passwd` and `group`, each only where it lacks the sandbox's user or group.
pub(crate) fn missing(root: &Path) -> io::Result<Vec<(&'static str, String)>> {
    let id = INSIDE_ID.to_string();
    let user = format!("sandbox:x:{id}:{id}:sandbox:{HOME}:/bin/sh\n");
    let group = format!("sandbox:x:{id}:\n");
    let top = open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut found = Vec::new();
    for (name, line) in [("passwd", user), ("group", group)] {
        let mut text = read(&top, &format!("etc/{name}"))?;
        if text.lines().any(|line| line.split(':').nth(2) == Some(&id)) {
            continue;
        }
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&line);
        found.push((name, text));
    }
    Ok(found)
}

/// The text of a file below a root, whose links end there; empty if there is no such file.
fn read(root: &rustix::fd::OwnedFd, name: &str) -> io::Result<String> {
    // A FIFO of somebody's keeps nobody waiting.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = match openat2(root, name, flags, Mode::empty(), resolve) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(String::new()),
        file => fs::File::from(file?),
    };
    if !file.metadata()?.is_file() {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_added_where_none_is() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        let both = missing(&root).unwrap();
        assert_eq!(both[1], ("group", "sandbox:x:1000:\n".to_owned()));
        fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh").unwrap();
        fs::write(root.join("etc/group"), "users:x:1000:\n").unwrap();
        let one = missing(&root).unwrap();
        let text = "root:x:0:0::/:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n";
        assert_eq!(one, [("passwd", text.to_owned())]);
    }

    #[test]
    fn nothing_outside_the_root_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(dir.path().join("secret"), "secret:x:1:1::/:/bin/sh\n").unwrap();
        std::os::unix::fs::symlink("../../secret", root.join("etc/passwd")).unwrap();
        assert!(!missing(&root).unwrap()[0].1.contains("secret"));
    }
}
