//! The remote-host backend: sandboxes on other Linux hosts, over SSH.
//!
//! [`SshBackend`] implements [`SandboxBackend`](sandbox_core::SandboxBackend). On this side it needs the
//! OpenSSH client (8.7 or newer) and whatever configuration, keys and agents let the user in; on the other
//! a POSIX shell and an account. Where the host has bubblewrap, sandboxes are what they are locally;
//! otherwise they are processes of the account, if that was accepted.
//!
//! ```no_run
//! # fn main() -> sandbox_core::Result<()> {
//! use sandbox_ssh::SshBackend;
//!
//! let backend = SshBackend::builder().host("build1").fallback("me@build2").build()?;
//! # Ok(()) }
//! ```
//!
//! Two other backends are the same with other settings: machines that are there for this and nothing else
//! ([`the_machines_are_the_sandboxes`](SshBackendBuilder::the_machines_are_the_sandboxes), `vm-packer`), and
//! sandboxes beside the services of a compose project ([`Compose`], `compose-ssh`).
//!
//! # What is done where
//!
//! 1. `master` connects: an `ssh` process of ours, which ends with us whatever happens. Sessions go through
//!    it (`channel`), in OpenSSH's own protocol; `links` has one with room for another session.
//! 2. `program` brings a small program of ours to the host, once for each version of it. It needs nothing
//!    there but a kernel, and does on the host what [`sandbox_host`] does locally.
//! 3. `workspace` brings the workspace's directory there; of what the host has already, nothing.
//! 4. `host` asks the program for what is to be done, one session for each question, and for the stream to a
//!    guest. Guests live on when the connection does not; a new one finds them.
//! 5. `refused` finds out why a host does not let us in.

mod address;
mod backend;
mod channel;
mod compose;
mod config;
mod error;
mod host;
mod instance;
mod kind;
mod links;
mod master;
mod placement;
mod program;
mod reach;
mod refused;
mod script;
mod settings;
mod snapshot;
mod upload;
mod workspace;

pub use backend::SshBackend;
pub use compose::Compose;
pub use config::SshBackendBuilder;
pub use upload::UploadProgress;
