//! The container backend: sandboxes that are containers of Docker, or of what speaks its language.
//!
//! [`DockerBackend`] implements [`SandboxBackend`](sandbox_core::SandboxBackend) over the Docker Engine
//! API (20.10 and newer). It reaches an engine as the `docker` program does: through a local socket, TCP
//! with TLS, or SSH.
//!
//! ```no_run
//! # fn main() -> sandbox_core::Result<()> {
//! use sandbox_docker::DockerBackend;
//!
//! let backend = DockerBackend::builder().image("debian:bookworm-slim").build()?;
//! # Ok(()) }
//! ```
//!
//! # How a sandbox is made
//!
//! 1. `pull` finds the image that the spec names, or has the engine fetch it with the credentials of
//!    Docker's own configuration (`auth`).
//! 2. `image` prepares it, once: a container that is never started is given the guest, the workspace and
//!    the sandbox's user, and kept as an image. So any Linux image serves, also one without a shell.
//! 3. `container` turns the spec into the container's settings; it touches nothing. No capability, no new
//!    privileges, the engine's default system-call filter and the guest's on top, no network, no
//!    directory of the host unless it is asked for, no log.
//! 4. `provision` takes a container of the pool or makes one. `launch` copies the workspace into it
//!    (`archive`), attaches to it and starts it. Its program is the guest, which reads from its standard
//!    input what it is for; that pipe is the first connection. Later ones are carried in by the guest's own
//!    `connect`, which the engine starts in the container. `stream` makes byte streams of both. Where a
//!    container's first process is one of this host that we may look into, its socket is connected to
//!    instead (`direct`, `process`).
//!
//! Everything of an instance is in its container, whose labels say whose it is (`instance`). A snapshot
//! is an image (`snapshot`), one layer on what its container was made from, until there are so many that
//! they are made into one (`flatten`). `changes` compares images by what a `helper` lists of them.

mod archive;
mod attach;
mod auth;
mod backend;
mod baseline;
mod changes;
mod config;
mod container;
mod contexts;
#[cfg(target_os = "linux")]
mod direct;
#[cfg(not(target_os = "linux"))]
#[path = "indirect.rs"]
mod direct;
mod error;
mod flatten;
mod helper;
mod image;
mod instance;
mod launch;
mod leaving;
mod life;
mod list;
mod listing;
mod look;
mod pool;
mod probe;
#[cfg(target_os = "linux")]
mod process;
mod provision;
mod pull;
mod pull_options;
mod shared;
mod snapshot;
mod stream;
mod sweep;

pub use backend::DockerBackend;
pub use config::DockerBackendBuilder;
pub use pool::PoolOptions;
pub use pull_options::{PullPolicy, PullProgress};
