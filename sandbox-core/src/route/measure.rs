//! How fast the backends have been, remembered between processes.

use std::{
    collections::HashMap,
    fs, io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::BackendId;

/// A sandbox is made once and spoken to often: so many round trips count as much as one creation.
const ROUND_TRIPS: u64 = 50;

/// How much the newest measurement counts, in eighths; the older ones have the rest.
const NEWEST: u64 = 2;

/// For how long a backend that failed is tried last.
const SHUNNED: SignedDuration = SignedDuration::from_mins(10);

/// How fast the backends have been.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    /// One file for each backend; without a directory they are this process's alone.
    dir: Option<PathBuf>,
    known: Mutex<HashMap<BackendId, Measured>>,
}

/// How fast one has been, in microseconds, older measurements fading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Measured {
    creation_us: Option<u64>,
    round_trip_us: Option<u64>,
    failed_at: Option<Timestamp>,
}

impl Measurements {
    /// Kept in this directory.
    pub(crate) fn in_dir(dir: PathBuf) -> Self {
        Self { dir: Some(dir), known: Mutex::default() }
    }

    /// A sandbox was made.
    pub(crate) fn made(
        &self,
        backend: &BackendId,
        creation: Duration,
        round_trip: Option<Duration>,
    ) {
        self.change(backend, |measured| {
            measured.creation_us = Some(faded(measured.creation_us, creation));
            if let Some(round_trip) = round_trip {
                measured.round_trip_us = Some(faded(measured.round_trip_us, round_trip));
            }
            measured.failed_at = None;
        });
    }

    /// None could be made.
    pub(crate) fn failed(&self, backend: &BackendId) {
        self.change(backend, |measured| measured.failed_at = Some(Timestamp::now()));
    }

    /// The smaller, the sooner it is tried: those that were never measured, those that were by their
    /// speed, those that failed a short while ago.
    pub(crate) fn rank(&self, backend: &BackendId) -> (u8, u64) {
        let measured = self.read(backend);
        let shunned = measured
            .failed_at
            .is_some_and(|at| Timestamp::now().duration_since(at).abs() < SHUNNED);
        let score = measured.creation_us.map_or(0, |creation| {
            let trips = measured.round_trip_us.unwrap_or(0).saturating_mul(ROUND_TRIPS);
            creation.saturating_add(trips)
        });
        (if shunned { 1 } else { 0 }, score)
    }

    fn change(&self, backend: &BackendId, edit: impl FnOnce(&mut Measured)) {
        let mut measured = self.read(backend);
        edit(&mut measured);
        self.known().insert(backend.clone(), measured);
        if let Err(error) = self.write(backend, &measured) {
            tracing::warn!(%backend, %error, "how fast a backend is could not be written down");
        }
    }

    /// As the file says; what cannot be read was never measured.
    fn read(&self, backend: &BackendId) -> Measured {
        let written = self.path(backend).and_then(|path| fs::read(path).ok());
        let written = written.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        written.or_else(|| self.known().get(backend).copied()).unwrap_or_default()
    }

    /// As a whole or not at all; of two at once, the last one stays.
    fn write(&self, backend: &BackendId, measured: &Measured) -> io::Result<()> {
        let Some(path) = self.path(backend) else { return Ok(()) };
        if let Some(dir) = &self.dir {
            fs::create_dir_all(dir)?;
        }
        let new = path.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
        let written = fs::write(&new, serde_json::to_vec(measured)?);
        written.and_then(|()| fs::rename(&new, &path)).inspect_err(|_| {
            let _ = fs::remove_file(&new);
        })
    }

    fn path(&self, backend: &BackendId) -> Option<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let name = backend.as_str();
        let dir = self.dir.as_ref().filter(|_| !name.is_empty() && name.chars().all(plain))?;
        Some(dir.join(format!("{name}.json")))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<BackendId, Measured>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn faded(old: Option<u64>, new: Duration) -> u64 {
    let new = u64::try_from(new.as_micros()).unwrap_or(u64::MAX).max(1);
    match old {
        None => new,
        Some(old) => old / 8 * (8 - NEWEST) + new / 8 * NEWEST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_unmeasured_come_first_the_failed_last_and_the_fast_before_the_slow() {
        let dir = tempfile::tempdir().unwrap();
        let measurements = Measurements::in_dir(dir.path().join("m"));
        let [fast, slow, new, broken] = ["fast", "slow", "new", "broken"].map(BackendId::new);
        measurements.made(&slow, MS(500), Some(MS(2)));
        measurements.made(&fast, MS(40), Some(MS(1)));
        measurements.failed(&broken);
        // Another process reads the same.
        let again = Measurements::in_dir(dir.path().join("m"));
        let mut order = [&slow, &broken, &fast, &new];
        order.sort_by_key(|backend| again.rank(backend));
        assert_eq!(order, [&new, &fast, &slow, &broken]);
        again.made(&broken, MS(1), Some(MS(1)));
        assert_eq!(measurements.rank(&broken).0, 0, "what works again is not shunned any more");
    }

    #[test]
    fn many_round_trips_outweigh_a_fast_creation() {
        let measurements = Measurements::default();
        let [near, far] = ["near", "far"].map(BackendId::new);
        measurements.made(&near, MS(800), Some(MS(1)));
        measurements.made(&far, MS(100), Some(MS(40)));
        assert!(measurements.rank(&near) < measurements.rank(&far));
    }

    #[test]
    fn damage_is_no_measurement() {
        let dir = tempfile::tempdir().unwrap();
        let measurements = Measurements::in_dir(dir.path().to_owned());
        fs::write(dir.path().join("x.json"), "{").unwrap();
        assert_eq!(measurements.rank(&BackendId::new("x")), (0, 0));
        measurements.made(&BackendId::new("../x"), MS(1), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no file outside, none beside");
    }
}
