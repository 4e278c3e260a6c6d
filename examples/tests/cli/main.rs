//! The command line, each call a process of its own.
#![allow(clippy::unwrap_used, reason = "tests")]

mod catalog;
mod exec;
mod files;
mod life;
mod looking;
mod processes;
mod snapshots;
mod support;
