//! The guest's own end: at its time, at its lease's, or on request. Nobody outside has to be alive.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    base::now_ms,
    guest::{Deadlines, Guest},
    kill, sys,
};

/// The wall clock may be set, the machine may sleep, and what runs may end: look again after this at the
/// latest.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How long children that were killed may take to end.
const LAST_CHILDREN: Duration = Duration::from_secs(2);

/// Ends the guest when its time has come; waits for ever if it has none.
pub(crate) async fn watch(guest: Arc<Guest>) {
    let mut deadlines = guest.deadlines.subscribe();
    loop {
        let current = *deadlines.borrow_and_update();
        let left = current.left(now_ms()).into_iter().chain(guest.idle_left()).min();
        let Some(left) = left else {
            let _ = deadlines.changed().await;
            continue;
        };
        if left.is_zero() {
            shut_down(&guest).await;
        }
        // A millisecond is what the clock is read to.
        let pause = left.min(LOOK_AGAIN).max(Duration::from_millis(1));
        let _ = tokio::time::timeout(pause, deadlines.changed()).await;
    }
}

impl Deadlines {
    /// How long until the earlier of the two.
    fn left(self, now: u64) -> Option<Duration> {
        let first = self.expires_at.into_iter().chain(self.lease_until).min()?;
        Some(Duration::from_millis(first.saturating_sub(now)))
    }
}

/// Kills everything and ends the program.
pub(crate) async fn shut_down(guest: &Guest) -> ! {
    if !guest.alone {
        // The first process of a namespace takes the others with it; here they must be found.
        kill::all(guest).await;
        // Whoever is first here need not be one that reaps orphans.
        let begin = Instant::now();
        while let Ok(ended) = sys::wait_any(false) {
            if ended.is_none() && begin.elapsed() > LAST_CHILDREN {
                break;
            }
            if ended.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    if let Some(path) = &guest.listen_path {
        let _ = std::fs::remove_file(path);
    }
    sys::exit_now(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_deadline_counts() {
        let both = Deadlines { expires_at: Some(2000), lease_until: Some(1500) };
        assert_eq!(both.left(1000), Some(Duration::from_millis(500)));
        assert_eq!(both.left(9000), Some(Duration::ZERO));
        assert_eq!(Deadlines::default().left(0), None);
    }
}
