//! What is done on a Linux host to make sandboxes there, whoever asks for it: a harness on the same host,
//! or one elsewhere.
//!
//! [`bwrap`] and [`account`] are two ways to make them; both do what
//! [`SandboxBackend`](sandbox_core::SandboxBackend) asks for. A harness elsewhere brings the program
//! `sandbox-host` to the host, which is [`bundled`] into this library, and has it do the same:
//! [`message`] is how it asks.

#[cfg(target_os = "linux")]
pub mod account;
mod bundled;
#[cfg(target_os = "linux")]
pub mod bwrap;
#[cfg(target_os = "linux")]
mod changes;
#[cfg(target_os = "linux")]
mod cleanup;
#[cfg(all(feature = "program", target_os = "linux"))]
mod compose;
#[cfg(target_os = "linux")]
mod error;
pub mod message;
#[cfg(target_os = "linux")]
mod process;
#[cfg(all(feature = "program", target_os = "linux"))]
mod program;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod size;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(target_os = "linux")]
mod tool;
#[cfg(target_os = "linux")]
mod tree;

pub use bundled::bundled;
/// The program `sandbox-host`.
#[cfg(all(feature = "program", target_os = "linux"))]
pub use program::main;
