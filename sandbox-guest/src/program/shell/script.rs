//! What a shell is told to do, and how it says that it has done it.
//!
//! A command is text for `eval`, with its input and output redirected to pipes of its own, which the shell
//! opens by their names in `/proc`: no marker is in any output, and what an earlier command left running
//! still writes to that one's pipes. Afterwards the shell writes `$?` to one more pipe, or ends.

use std::os::fd::RawFd;

/// How long a word is by which a command's end is known.
pub(super) const NONCE: usize = 32;

/// How many digits a status may have, and what is around them.
const RECORD: usize = NONCE + 16;

/// Where a command's input and output are: descriptors of this process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    pub(super) process: u32,
    /// `/dev/null` if there is none.
    pub(super) stdin: Option<RawFd>,
    pub(super) stdout: RawFd,
    pub(super) stderr: RawFd,
    pub(super) control: RawFd,
}

/// What the shell reads to run a text.
///
/// `\command` keeps a failing `eval` from ending the shell, and is neither an alias nor, with `printf`,
/// a function; `>|` holds whatever `noclobber` says. A shell that cannot say how it went ends, so that it
/// is not waited for.
pub(super) fn script(text: &[u8], nonce: &str, places: Places) -> Vec<u8> {
    let path = |fd: RawFd| format!("/proc/{}/fd/{fd}", places.process);
    let stdin = places.stdin.map_or_else(|| "/dev/null".to_owned(), path);
    let mut script = Vec::with_capacity(text.len() + 256);
    // The space keeps a dash at the text's beginning from being an option.
    script.extend_from_slice(b"\\command eval ' ");
    for byte in text {
        match byte {
            b'\'' => script.extend_from_slice(b"'\\''"),
            other => script.push(*other),
        }
    }
    let (stdout, stderr) = (path(places.stdout), path(places.stderr));
    let control = path(places.control);
    let rest = format!(
        "' <{stdin} >|{stdout} 2>|{stderr}\n\
         \\command printf '\\n{nonce} %s\\n' \"$?\" >|{control} || exit\n"
    );
    script.extend_from_slice(rest.as_bytes());
    script
}

/// What came through the pipe that shells tell of ends by. Anybody inside may write to it; what has not
/// the present command's word is nothing.
#[derive(Debug, Default)]
pub(super) struct Control {
    seen: Vec<u8>,
}

impl Control {
    /// Takes what came; the status, if this says that the command of this word has ended.
    pub(super) fn hear(&mut self, bytes: &[u8], nonce: &str) -> Option<i32> {
        self.seen.extend_from_slice(bytes);
        let status = self.find(nonce);
        // Only the beginning of a record can still be of use.
        let old = self.seen.len().saturating_sub(RECORD);
        self.seen.drain(..old);
        if status.is_some() {
            self.seen.clear();
        }
        status
    }

    fn find(&self, nonce: &str) -> Option<i32> {
        let begin = format!("\n{nonce} ");
        let at = self.seen.windows(begin.len()).position(|window| window == begin.as_bytes())?;
        let rest = &self.seen[at + begin.len()..];
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        std::str::from_utf8(&rest[..end]).ok()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_quoted() {
        let places = Places { process: 7, stdin: None, stdout: 4, stderr: 5, control: 6 };
        let script = script(b"echo 'a'\n# $x \xff", "word", places);
        let expected = b"\\command eval ' echo '\\''a'\\''\n# $x \xff' </dev/null \
                         >|/proc/7/fd/4 2>|/proc/7/fd/5\n\
                         \\command printf '\\nword %s\\n' \"$?\" >|/proc/7/fd/6 || exit\n";
        assert_eq!(script, expected);
    }

    #[test]
    fn an_end_is_known_by_its_word_wherever_it_is_split() {
        let wire = b"garbage\nother 0\n12 \nword 137\n";
        for at in 0..wire.len() {
            let mut control = Control::default();
            let (one, two) = wire.split_at(at);
            assert_eq!(control.hear(one, "word"), None);
            assert_eq!(control.hear(two, "word"), Some(137), "{at}");
        }
    }

    #[test]
    fn garbage_takes_no_memory() {
        let mut control = Control::default();
        let word = "0".repeat(NONCE);
        for _ in 0..1000 {
            assert_eq!(control.hear(&[b'0'; 500], &word), None);
            assert!(control.seen.len() <= RECORD);
        }
        let end = format!("\n{word} 3\n");
        assert_eq!(control.hear(end.as_bytes(), &word), Some(3));
    }
}
