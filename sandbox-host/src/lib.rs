//! What is done on a Linux host to make sandboxes there, whoever asks for it: a harness on the same host,
//! or one elsewhere.

#[cfg(target_os = "linux")]
pub mod bwrap;
#[cfg(target_os = "linux")]
mod error;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(target_os = "linux")]
mod tree;
