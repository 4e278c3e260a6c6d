//! What a process wrote to one channel, addressed by offsets counted from its start.

use std::{collections::VecDeque, fs::File, io, os::unix::fs::FileExt};

use sandbox_guest::{DEFAULT_WINDOW, KeptOutput, Output};

/// A log longer than this goes to a file.
const IN_MEMORY: u64 = 256 * 1024;

/// The bytes of a channel that are still kept, and how many there ever were.
#[derive(Debug)]
pub(crate) struct Log {
    begin: u64,
    end: u64,
    limit: u64,
    /// Whether the oldest bytes give way to new ones; else the writer waits.
    rolling: bool,
    store: Store,
}

#[derive(Debug)]
enum Store {
    Memory(VecDeque<u8>),
    /// A ring: the byte at offset `o` is at `o % limit`.
    File(File),
}

impl Log {
    pub(crate) fn new(output: Output) -> Self {
        let (limit, rolling) = match output {
            Output::Keep { limit } => (limit, true),
            _ => (DEFAULT_WINDOW, false),
        };
        Self { begin: 0, end: 0, limit, rolling, store: Store::Memory(VecDeque::new()) }
    }

    /// The offset of the oldest byte that is kept.
    pub(crate) fn begin(&self) -> u64 {
        self.begin
    }

    /// How many bytes there ever were.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// What is kept of it.
    pub(crate) fn kept(&self) -> KeptOutput {
        KeptOutput { begin: self.begin, end: self.end, limit: self.limit }
    }

    /// How many bytes of the sandbox's disk it takes at most.
    pub(crate) fn disk(&self) -> u64 {
        match &self.store {
            Store::Memory(_) => 0,
            Store::File(_) => self.limit.min(self.end),
        }
    }

    /// How many bytes of memory it takes.
    pub(crate) fn memory(&self) -> u64 {
        match &self.store {
            Store::Memory(bytes) => bytes.len() as u64,
            Store::File(_) => 0,
        }
    }

    /// How many bytes it takes before the writer must wait.
    pub(crate) fn room(&self) -> u64 {
        if self.rolling { u64::MAX } else { self.limit.saturating_sub(self.end - self.begin) }
    }

    /// Adds bytes, also where there is no room: the caller bounds that.
    pub(crate) fn push(&mut self, data: &[u8]) {
        if self.rolling && self.end - self.begin + data.len() as u64 > IN_MEMORY.min(self.limit) {
            self.push_rolling(data);
            return;
        }
        self.end += data.len() as u64;
        match &mut self.store {
            Store::Memory(bytes) => bytes.extend(data),
            Store::File(_) => self.begin = self.end,
        }
    }

    fn push_rolling(&mut self, data: &[u8]) {
        if self.limit > IN_MEMORY && matches!(self.store, Store::Memory(_)) {
            self.spill();
        }
        let end = self.end + data.len() as u64;
        let kept = data.len().min(usize::try_from(self.limit).unwrap_or(usize::MAX));
        let data = &data[data.len() - kept..];
        match &mut self.store {
            Store::Memory(bytes) => {
                let limit = self.limit.min(IN_MEMORY) as usize;
                bytes.drain(..(bytes.len() + data.len()).saturating_sub(limit).min(bytes.len()));
                bytes.extend(data);
                self.begin = end - bytes.len() as u64;
            }
            Store::File(file) => {
                let written = write_ring(file, self.limit, end - kept as u64, data);
                // Where there is no space, what was kept is no longer whole.
                self.begin = if written.is_ok() {
                    self.begin.max(end.saturating_sub(self.limit))
                } else {
                    end
                };
            }
        }
        self.end = end;
    }

    /// Moves what is kept to a file; without one, memory keeps a shorter tail.
    fn spill(&mut self) {
        let Store::Memory(bytes) = &self.store else { return };
        let Ok(file) = unnamed_file() else { return };
        let (front, back) = bytes.as_slices();
        let middle = self.begin + front.len() as u64;
        let written = write_ring(&file, self.limit, self.begin, front)
            .and_then(|()| write_ring(&file, self.limit, middle, back));
        if written.is_ok() {
            self.store = Store::File(file);
        }
    }

    /// Appends to `into` what is kept from `offset` on, at most `most` bytes of it.
    pub(crate) fn copy(&self, offset: u64, most: usize, into: &mut Vec<u8>) -> io::Result<usize> {
        let skip = offset.saturating_sub(self.begin);
        let count = (self.end - self.begin).saturating_sub(skip).min(most as u64) as usize;
        match &self.store {
            Store::Memory(bytes) => {
                let (front, back) = bytes.as_slices();
                let skip = skip as usize;
                let first = &front[skip.min(front.len())..];
                let first = &first[..count.min(first.len())];
                into.extend_from_slice(first);
                let back = &back[skip.saturating_sub(front.len())..];
                into.extend_from_slice(&back[..count - first.len()]);
            }
            Store::File(file) => {
                let start = into.len();
                into.resize(start + count, 0);
                let at = (self.begin + skip) % self.limit;
                let first = count.min((self.limit - at) as usize);
                let (one, two) = into[start..].split_at_mut(first);
                file.read_exact_at(one, at)?;
                file.read_exact_at(two, 0)?;
            }
        }
        Ok(count)
    }

    /// Forgets what was taken, up to `offset`; a log that rolls keeps it.
    pub(crate) fn taken(&mut self, offset: u64) {
        if !self.rolling {
            self.forget(offset);
        }
    }

    fn forget(&mut self, offset: u64) {
        let Store::Memory(bytes) = &mut self.store else { return };
        let count = offset.min(self.end).saturating_sub(self.begin) as usize;
        if count == bytes.len() {
            // A burst's memory is not kept for the next one.
            if bytes.capacity() > 64 * 1024 { *bytes = VecDeque::new() } else { bytes.clear() }
        } else {
            bytes.drain(..count);
        }
        self.begin += count as u64;
    }
}

fn write_ring(file: &File, limit: u64, offset: u64, data: &[u8]) -> io::Result<()> {
    let at = offset % limit;
    let first = data.len().min((limit - at) as usize);
    file.write_all_at(&data[..first], at)?;
    file.write_all_at(&data[first..], 0)
}

/// A file that has no name and goes with its descriptor.
fn unnamed_file() -> io::Result<File> {
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
    for directory in ["/var/tmp", "/tmp"] {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(fd) = open(directory, flags, Mode::RUSR | Mode::WUSR) {
            return Ok(fd.into());
        }
    }
    Ok(memfd_create("sandbox-output", MemfdFlags::CLOEXEC)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(log: &Log, offset: u64) -> Vec<u8> {
        let mut into = Vec::new();
        log.copy(offset, usize::MAX, &mut into).unwrap();
        into
    }

    #[test]
    fn a_stream_keeps_what_is_not_taken() {
        let mut log = Log::new(Output::Stream);
        log.push(b"hello ");
        log.push(b"world");
        assert_eq!(text(&log, 0), b"hello world");
        log.taken(6);
        assert_eq!(log.begin(), 6);
        assert_eq!(text(&log, 0), b"world");
        assert_eq!(text(&log, 8), b"rld");
        assert_eq!(log.room(), DEFAULT_WINDOW - 5);
        log.taken(1000);
        assert_eq!((log.begin(), log.end()), (11, 11));
    }

    #[test]
    fn a_kept_log_has_the_newest_bytes_in_memory_and_in_a_file() {
        for limit in [10, 100_000, IN_MEMORY, IN_MEMORY + 7, 1_000_000] {
            let mut log = Log::new(Output::Keep { limit });
            let all: Vec<u8> = (0..3_000_000_u32).map(|n| (n * 7 / 5) as u8).collect();
            for chunk in all.chunks(12_345) {
                log.push(chunk);
                log.taken(log.end());
            }
            assert_eq!(log.end(), all.len() as u64);
            assert_eq!(log.end() - log.begin(), limit, "limit {limit}");
            assert!(text(&log, 0) == all[all.len() - limit as usize..], "limit {limit}");
            assert_eq!(text(&log, log.end() - 5), all[all.len() - 5..]);
        }
    }

    #[test]
    fn a_kept_log_of_nothing_keeps_nothing() {
        let mut log = Log::new(Output::Keep { limit: 0 });
        log.push(b"gone");
        assert_eq!((log.begin(), log.end()), (4, 4));
        assert!(text(&log, 0).is_empty());
    }
}
