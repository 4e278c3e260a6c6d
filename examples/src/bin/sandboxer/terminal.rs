//! This process's own terminal and input.

use std::os::fd::AsFd;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use sandbox_core::{ProcessStdin, TerminalSize};
use tokio::io::AsyncReadExt;

/// The terminal's size, where standard input is one.
pub(crate) fn size() -> Option<TerminalSize> {
    let size = tcgetwinsize(std::io::stdin().as_fd()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0)
        .then_some(TerminalSize { rows: size.ws_row, cols: size.ws_col })
}

/// Passes keys on as they are pressed, until it is dropped.
#[derive(Debug)]
pub(crate) struct Raw(Option<Termios>);

impl Raw {
    /// Where standard input is no terminal, nothing is changed.
    pub(crate) fn begin() -> Self {
        let stdin = std::io::stdin();
        let Ok(before) = tcgetattr(stdin.as_fd()) else { return Self(None) };
        let mut raw = before.clone();
        raw.make_raw();
        let set = tcsetattr(stdin.as_fd(), OptionalActions::Now, &raw);
        Self(set.is_ok().then_some(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin().as_fd(), OptionalActions::Now, before);
        }
    }
}

/// Passes standard input on until it ends.
pub(crate) async fn feed(mut to: ProcessStdin) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count) = stdin.read(&mut buffer).await {
        if count == 0 {
            break;
        }
        to.write(&buffer[..count]).await;
    }
}
