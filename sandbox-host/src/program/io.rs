//! Standard input and output, as they are: what comes after a message is left there.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde::de::DeserializeOwned;

use crate::message::{self, Answer};

/// How often the program says that it still works.
const BEAT: Duration = Duration::from_secs(2);

/// Standard input.
pub(super) fn input() -> io::Result<File> {
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

/// Standard output, without a buffer.
pub(super) fn output() -> io::Result<File> {
    Ok(io::stdout().as_fd().try_clone_to_owned()?.into())
}

/// Reads a message and not a byte more.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > message::SMALL {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    let mut bytes = Vec::new();
    let read = from.take(length.into()).read_to_end(&mut bytes)?;
    if read != length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes)?)
}

/// Writes answers, and now and then, until the last one, that it still works.
pub(super) struct Answers {
    shared: Arc<Shared>,
}

struct Shared {
    output: Mutex<File>,
    ended: AtomicBool,
    end: Condvar,
}

impl Answers {
    pub(super) fn new() -> io::Result<Self> {
        let mut output = output()?;
        output.write_all(message::BEGIN)?;
        let output = Mutex::new(output);
        let shared =
            Arc::new(Shared { output, ended: AtomicBool::new(false), end: Condvar::new() });
        let beating = Arc::clone(&shared);
        std::thread::Builder::new().name("beat".into()).spawn(move || beating.beat())?;
        Ok(Self { shared })
    }

    /// An answer that more follow.
    pub(super) fn say(&self, answer: &Answer) -> io::Result<()> {
        let bytes = message::encode(answer)?;
        let mut output = self.shared.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&bytes)
    }

    /// The last answer.
    pub(super) fn end(self, answer: &Answer) -> io::Result<()> {
        let bytes = message::encode(answer)?;
        let mut output = self.shared.output.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.ended.store(true, Ordering::Relaxed);
        self.shared.end.notify_all();
        output.write_all(&bytes)
    }
}

impl Shared {
    fn beat(&self) {
        let Ok(bytes) = message::encode(&Answer::Working) else { return };
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let waited = self.end.wait_timeout(output, BEAT);
            output = waited.unwrap_or_else(PoisonError::into_inner).0;
            if self.ended.load(Ordering::Relaxed) || output.write_all(&bytes).is_err() {
                return;
            }
        }
    }
}
