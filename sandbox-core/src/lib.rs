//! Sandboxes for agent harnesses.
mod backend;
mod capabilities;
mod command;
mod error;
mod event;
mod exec;
mod files;
mod guest;
mod guest_binaries;
mod id;
mod info;
mod journal;
mod manager;
mod outcome;
mod reachability;
mod record;
mod sandbox;
mod sink;
mod spec;

pub use backend::{
    ByteStream, Change, ChangeKind, Found, GuestStream, Instance, InstanceState, Provision,
    SandboxBackend, SnapshotData, SnapshotRequest, SnapshotTaken, default_state_dir,
};
pub use capabilities::{Capabilities, Feature, Level, Support};
pub use command::{Command, DEFAULT_OUTPUT_LIMIT, TerminalSize};
pub use error::{Error, ErrorKind, Result};
pub use event::{EventKind, ForkedFrom, Known, SandboxEvent};
pub use exec::{Chunk, Process};
pub use files::{DirEntry, FileKind, Files, Metadata, READ_LIMIT};
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
pub use reachability::{LocalReach, Reachability, ReachabilityReport};
pub use record::{SandboxState, Snapshot};
pub use sandbox::Sandbox;
pub use sink::{ChannelSink, CollectSink, SinkError, Suppressed, Tee, TracingSink, TurnEventSink};
pub use spec::{
    Access, Actor, Consumer, CreateSandbox, Lifetime, Limits, Mount, Network, OnLost, Root,
    SandboxSpec,
};
