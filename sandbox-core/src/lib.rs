//! Sandboxes for agent harnesses: one API for places in which an agent's commands run.
//!
//! A [`SandboxManager`] makes, finds and forks sandboxes; a [`Sandbox`] runs commands, reads and writes
//! files, and is snapshotted and rewound. Whatever happens is in an append-only history first, and is then
//! told to the [`TurnEventSink`] of the turn, which every call that changes something takes.
//!
//! The places themselves are made by backends, crates of their own that implement [`SandboxBackend`].
//!
//! ```no_run
//! # async fn turn(backend: impl sandbox_core::SandboxBackend + 'static) -> sandbox_core::Result<()> {
//! use sandbox_core::{ChannelSink, Command, CreateSandbox, SandboxManager, TurnId};
//!
//! let manager = SandboxManager::builder().backend(backend).build().await?;
//! let (sink, events) = ChannelSink::new(TurnId::new("turn-1"), 256);
//!
//! let sandbox = manager.acquire("main", CreateSandbox::new().workspace("."), &sink).await?;
//! let before = sandbox.snapshot("before the refactor", &sink).await?;
//! let run = sandbox.exec(Command::new("make"), &sink).await?;
//! if !run.outcome.is_success() {
//!     sandbox.rewind(&before.id, &sink).await?;
//! }
//! # drop(events);
//! # Ok(())
//! # }
//! ```
//!
//! # Cancellation
//!
//! A command whose future is dropped is killed with all that it started. A change of a sandbox's life
//! (snapshot, rewind, stop …) runs in a task of its own: when its future is dropped it is finished all the
//! same, or undone (`create`). Both end in the history.

mod backend;
mod capabilities;
mod command;
pub mod directories;
mod egress;
mod error;
mod event;
mod exec;
mod files;
mod forward;
mod guest;
mod guest_binaries;
mod id;
mod info;
mod journal;
mod manager;
mod outcome;
pub mod path_bytes;
mod process_info;
mod processes;
mod profile;
mod reachability;
mod record;
mod request;
mod route;
mod sandbox;
mod secret;
mod session;
mod shell;
mod signal;
mod sink;
mod spec;
mod stats;
mod status;
pub mod tools;
mod way;

pub use backend::{
    ByteStream, Change, ChangeKind, Found, GuestStream, Instance, InstanceState, Provision,
    SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, default_state_dir,
};
pub use capabilities::{Capabilities, Feature, Hosting, Isolation, Level, Support};
pub use command::{
    Command, DEFAULT_KEPT_OUTPUT, DEFAULT_OUTPUT_LIMIT, ProcessLimits, TerminalSize,
};
pub use error::{Error, ErrorKind, Result};
pub use event::{EventKind, ForkedFrom, Known, SandboxEvent};
pub use exec::{Chunk, Process, ProcessStdin};
pub use files::{
    DirEntry, DownloadOptions, Existing, FileEvent, FileKind, FileReader, FileWatch, Files,
    LIST_LIMIT, Metadata, OutsideLinks, Progress, READ_LIMIT, ReadDir, Transferred, UploadOptions,
};
pub use forward::{Forward, ForwardStats};
pub use guest_binaries::{GUEST_DIR_VARIABLE, GuestBinaries, GuestBinary};
pub use id::{
    BackendId, EventId, InstanceId, Name, OwnerId, ProcessId, SandboxId, SnapshotId, TurnId,
};
pub use info::{SandboxInfo, WORKSPACE};
pub use journal::{Draft, FileJournal, HeldLock, Journal, JournalLock, MemoryJournal};
pub use manager::{
    Leftover, LeftoverKind, ManagerBuilder, ReapPolicy, Retention, SandboxManager, Watch,
};
pub use outcome::{Captured, Outcome, Run};
pub use process_info::{
    KeptOutput, OutputPiece, OutputStream, ProcessEnd, ProcessInfo, ProcessState,
};
pub use processes::{Follow, ProcessRef};
pub use profile::{
    AccessRule, IsolationRule, NetworkDefault, NetworkRule, Period, Placement, Profile,
    ProfileCatalog, ProfileMetadata, ReachabilityHints, Resources, Route, SetupRule, TtlRule,
    WorkspaceModeRule, WorkspaceRule,
};
pub use reachability::{ContainerReach, LocalReach, Reachability, ReachabilityReport, SshReach};
pub use record::{SandboxState, Snapshot};
pub use request::{Actor, Consumer, CreateSandbox};
pub use route::Strategy;
pub use sandbox::Sandbox;
pub use sandbox_guest::Setup as GuestSetup;
pub use secret::{EnvSecrets, Secret, Secrets};
pub use shell::{SHELL_TEXT_LIMIT, Shell, ShellCommand, ShellOptions};
pub use sink::{ChannelSink, CollectSink, SinkError, Suppressed, Tee, TracingSink, TurnEventSink};
pub use spec::{
    Access, Lifetime, Limits, Mount, Network, OnLost, ProfileRef, Root, SandboxSpec, Setup,
    WorkspaceMode,
};
pub use stats::{Stats, Usage};
pub use status::SandboxStatus;
