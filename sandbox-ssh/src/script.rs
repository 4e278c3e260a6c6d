//! The few lines of shell that a host has to run before our own program is there. They take any POSIX
//! shell, behind any login shell: the script is one word in single quotes.

/// Says what the host is, and then waits for the end of its input, which is the end of the connection.
pub(crate) const ANCHOR: &str = "echo; echo sandbox-anchor; uname -s; uname -m; echo \"$HOME\"; \
     echo \"${XDG_CACHE_HOME:-}\"; echo sandbox-anchored; exec cat >/dev/null";

/// Puts a program into a directory, under a name that tells what is in it. Whoever comes first does; the
/// others wait for it, but not for ever.
const UPLOAD: &str = "umask 077; mkdir -p \"$1\" && cd \"$1\" || exit 71; n=0; \
     until mkdir \"$2.lock\" 2>/dev/null; do [ -x \"$2\" ] && { echo sandbox-there; exit 0; }; \
     n=$((n+1)); [ $n -gt 60 ] && break; sleep 1; done; \
     trap \"rmdir $2.lock 2>/dev/null\" 0; \
     [ -x \"$2\" ] && { echo sandbox-there; exit 0; }; echo sandbox-send; \
     cat > \"$2.new.$$\"; if [ \"$(wc -c < \"$2.new.$$\")\" -eq \"$3\" ]; \
     then chmod 700 \"$2.new.$$\" && mv -f \"$2.new.$$\" \"$2\" && echo sandbox-put; \
     else rm -f \"$2.new.$$\"; exit 72; fi";

/// The command that runs [`ANCHOR`].
pub(crate) fn anchor() -> String {
    format!("exec /bin/sh -c '{ANCHOR}'")
}

/// The command that puts a program there: after it says `sandbox-send` it wants the program's bytes.
pub(crate) fn upload(dir: &str, name: &str, size: usize) -> String {
    format!("exec /bin/sh -c '{UPLOAD}' sh {} {} {size}", quoted(dir), quoted(name))
}

/// The command that runs a program with one argument.
pub(crate) fn run(program: &str, argument: &str) -> String {
    format!("exec {} {}", quoted(program), quoted(argument))
}

/// Text as one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Output, Stdio},
    };

    use super::*;

    fn shell(text: &str, input: &[u8]) -> Output {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = shell.stdin.take().unwrap().write_all(input);
        shell.wait_with_output().unwrap()
    }

    #[test]
    fn a_program_is_put_there_whole_or_not_at_all() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("it's here/below");
        let text = dir.to_str().unwrap();
        let half = shell(&upload(text, "p-1", 20), b"#!/bin/sh\n");
        assert_eq!(half.status.code(), Some(72));
        assert!(std::fs::read_dir(&dir).unwrap().next().is_none());
        let whole = b"#!/bin/sh\necho $1 x\n";
        let put = shell(&upload(text, "p-1", whole.len()), whole);
        assert_eq!(String::from_utf8_lossy(&put.stdout), "sandbox-send\nsandbox-put\n");
        let again = shell(&upload(text, "p-1", whole.len()), b"");
        assert_eq!(String::from_utf8_lossy(&again.stdout), "sandbox-there\n");
        let ran = shell(&run(dir.join("p-1").to_str().unwrap(), "a  'b"), b"");
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "a 'b x\n");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn the_anchor_tells_what_the_host_is() {
        let said = shell(&anchor(), b"");
        let said = String::from_utf8_lossy(&said.stdout);
        assert!(said.starts_with("\nsandbox-anchor\nLinux\n"), "{said}");
        assert!(said.ends_with("\nsandbox-anchored\n"), "{said}");
    }

    #[test]
    fn single_quotes_stay_for_the_login_shell() {
        assert!(!ANCHOR.contains('\'') && !UPLOAD.contains('\''));
    }
}
