//! Carrying bytes between standard input and output and a guest's socket.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use super::io::{input, output};

const BUFFER: usize = 64 * 1024;

/// Carries bytes both ways until the guest's side has ended.
pub(super) fn relay(mut socket: UnixStream) -> io::Result<()> {
    let (mut input, mut output) = (input()?, output()?);
    let mut there = socket.try_clone()?;
    // The end of our input is passed on; the end of theirs is the end.
    std::thread::Builder::new().spawn(move || {
        let _ = pass(&mut input, &mut there);
        let _ = there.shutdown(Shutdown::Write);
    })?;
    pass(&mut socket, &mut output)
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
