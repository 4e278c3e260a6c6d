//! The command line, each call a process of its own.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod borrowed;
mod catalog;
mod egress;
mod exec;
mod files;
mod forward;
mod hosts;
mod life;
mod looking;
mod processes;
mod snapshots;
mod support;
