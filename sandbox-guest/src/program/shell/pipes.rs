//! The pipes between a shell and its keeper.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use rustix::{
    io::{Errno, ioctl_fionbio, ioctl_fionread, read, write},
    pipe::{PipeFlags, pipe_with},
};

/// How much is read at once.
pub(super) const CHUNK: usize = 64 * 1024;

/// A pipe that a shell opens by name to write to.
#[derive(Debug)]
pub(super) struct Source {
    reader: OwnedFd,
    /// Ours, by which it is opened; as long as there is one, the pipe does not end.
    name: Option<OwnedFd>,
}

impl Source {
    pub(super) fn new() -> io::Result<Self> {
        let (reader, name) = pipe_with(PipeFlags::CLOEXEC)?;
        ioctl_fionbio(&reader, true)?;
        Ok(Self { reader, name: Some(name) })
    }

    /// The number by which the shell opens it.
    pub(super) fn number(&self) -> RawFd {
        self.name.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// To be waited on.
    pub(super) fn reader(&self) -> &OwnedFd {
        &self.reader
    }

    /// A handle for somebody to write to it without opening it.
    pub(super) fn writer(&self) -> io::Result<OwnedFd> {
        match &self.name {
            Some(name) => name.try_clone(),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Nobody opens it any more.
    pub(super) fn close(&mut self) {
        self.name = None;
    }

    /// How much is in it now.
    pub(super) fn waiting(&self) -> usize {
        ioctl_fionread(&self.reader).map_or(0, |count| count as usize)
    }

    /// Reads what is there: `Some(0)` at its end, `None` if there is nothing now.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Option<usize> {
        match read(&self.reader, buffer) {
            Ok(count) => Some(count),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => Some(0),
        }
    }
}

/// A pipe that a shell reads from, and what waits for room in it.
#[derive(Debug)]
pub(super) struct Target {
    /// Ours, if it is opened by name: so that it has a reader until the shell has opened it.
    name: Option<OwnedFd>,
    writer: Option<OwnedFd>,
    pending: Vec<u8>,
    written: usize,
    /// How many bytes were written in all, or given up because nobody reads.
    taken: u64,
    ended: bool,
}

impl Target {
    /// A pipe, and its other end.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        ioctl_fionbio(&writer, true)?;
        let pending = Vec::new();
        let target =
            Self { name: None, writer: Some(writer), pending, written: 0, taken: 0, ended: false };
        Ok((target, reader))
    }

    /// One that is opened by name.
    pub(super) fn named() -> io::Result<Self> {
        let (mut target, reader) = Self::new()?;
        target.name = Some(reader);
        Ok(target)
    }

    /// The number by which the shell opens it.
    pub(super) fn number(&self) -> Option<RawFd> {
        self.name.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// To be waited on, if something waits for room.
    pub(super) fn waits(&self) -> Option<&OwnedFd> {
        self.writer.as_ref().filter(|_| self.pending.len() > self.written)
    }

    /// How much waits.
    pub(super) fn pending(&self) -> usize {
        self.pending.len() - self.written
    }

    /// How many bytes were written in all, or given up because nobody reads.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.written);
        self.written = 0;
        self.pending.extend_from_slice(bytes);
        self.flush();
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.flush();
    }

    /// Writes what there is room for.
    pub(super) fn flush(&mut self) {
        let before = self.pending();
        while let Some(writer) = self.waits() {
            match write(writer, &self.pending[self.written..]) {
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.writer = None,
            }
        }
        if self.writer.is_none() {
            self.written = self.pending.len();
        }
        self.taken += (before - self.pending()) as u64;
        if self.ended && self.pending() == 0 {
            self.writer = None;
        }
    }
}
