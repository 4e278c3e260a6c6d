//! What the suite does not ask of every backend: faults, and what is Docker's own. On the engine and the
//! images that `scripts/containers` provides; engines that are killed or have a full disk are this test's own.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod archives;
mod borrowed;
mod direct;
mod engine;
mod faults;
mod hardening;
mod images;
mod pool;
mod reach;
mod registry;
