//! Making errors.

use std::io;

use sandbox_core::{Error, ErrorKind};

use crate::address::Address;

/// The link to a host does not carry what it should; another try may find it whole.
pub(crate) fn broken(operation: &'static str, host: &Address, error: io::Error) -> Error {
    let message = format!("the connection to {host} broke");
    Error::new(ErrorKind::Unavailable, operation, message).with_source(error)
}

/// What the host said makes no sense.
pub(crate) fn nonsense(operation: &'static str, host: &Address, what: &str) -> Error {
    Error::new(ErrorKind::Backend, operation, format!("{host} {what}"))
}

/// The last lines of what a program said, as text in one line.
pub(crate) fn last_words(said: &[u8]) -> String {
    const MOST: usize = 400;
    let text = String::from_utf8_lossy(said);
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
    let lines: Vec<String> =
        text.lines().map(clean).filter(|line| !line.trim().is_empty()).collect();
    let all = lines.join("; ");
    match all.char_indices().rev().nth(MOST) {
        Some((at, _)) => format!("…{}", &all[at..]),
        None => all,
    }
}
