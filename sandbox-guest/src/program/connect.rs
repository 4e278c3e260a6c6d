//! A bridge between standard input and output and a Unix socket, for transports that offer only those.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
};

use super::base::errno_text;

const BUFFER: usize = 64 * 1024;

/// Carries bytes both ways until the socket's side has ended.
pub(crate) fn main(path: &Path) -> Result<(), String> {
    bridge(path).map_err(|error| format!("connect to {}: {}", path.display(), errno_text(&error)))
}

fn bridge(path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    let mut there = socket.try_clone()?;
    // Unbuffered: what comes in goes out at once.
    let mut stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    // The end of our input is passed on; the end of theirs is the end.
    std::thread::Builder::new().spawn(move || {
        let _ = pass(&mut stdin, &mut there);
        let _ = there.shutdown(Shutdown::Write);
    })?;
    match pass(&mut socket, &mut stdout) {
        Ok(()) => Ok(()),
        // Nobody listens any more. What they said last must arrive all the same, so this goes on until the
        // guest has seen the end of it.
        Err(_) => pass(&mut socket, &mut io::sink()),
    }
}

fn pass(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
