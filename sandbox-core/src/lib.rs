//! Sandboxes for agent harnesses.
mod backend;
mod capabilities;
mod error;
mod guest_binaries;
mod id;
mod reachability;
mod spec;

pub use backend::{
    ByteStream, Found, GuestStream, Instance, InstanceState, Provision, SandboxBackend,
    SnapshotData, SnapshotRequest, SnapshotTaken, default_state_dir,
};
pub use capabilities::{Capabilities, Feature, Level, Support};
pub use error::{Error, ErrorKind, Result};
pub use guest_binaries::{GUEST_DIR_VARIABLE, GuestBinaries, GuestBinary};
pub use id::{
    BackendId, EventId, InstanceId, Name, OwnerId, ProcessId, SandboxId, SnapshotId, TurnId,
};
pub use reachability::{LocalReach, Reachability, ReachabilityReport};
pub use spec::{
    Access, Actor, Consumer, CreateSandbox, Limits, Mount, Network, Root, SandboxSpec,
};
