//! The append-only history of every sandbox.

mod file;
mod memory;

use std::{any::Any, fmt};

use async_trait::async_trait;
use jiff::Timestamp;

use crate::{
    Consumer, EventId, EventKind, Known, Name, OwnerId, Result, SandboxEvent, SandboxId, TurnId,
};

pub use file::FileJournal;
pub use memory::MemoryJournal;

/// Keeps histories, in order and without gaps, and the names of live sandboxes.
///
/// A journal is one owner's. Many processes may use it at once, if it says so; then all of this holds
/// between them too.
#[async_trait]
pub trait Journal: Send + Sync + fmt::Debug {
    /// The mark that instances made from this journal carry.
    fn owner(&self) -> OwnerId;

    /// Adds a record; it is durable when this returns. Gives it its `seq`, time and id.
    ///
    /// # Errors
    ///
    /// `Journal` if it could not be written: then it is not there, not even in part.
    async fn append(&self, record: Draft) -> Result<SandboxEvent>;

    /// A sandbox's records after this `seq`, in order; none if the sandbox is unknown.
    ///
    /// # Errors
    ///
    /// `Journal` if a record cannot be read; the message says where.
    async fn read(&self, sandbox: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>>;

    /// Every sandbox that has a record, oldest first.
    ///
    /// # Errors
    ///
    /// `Journal` if they cannot be listed.
    async fn sandboxes(&self) -> Result<Vec<SandboxId>>;

    /// The sandboxes that are not known to have come to their end, oldest first: all that matter to
    /// somebody who opens a journal with a long past. May name some that have.
    ///
    /// # Errors
    ///
    /// `Journal` if they cannot be listed.
    async fn live(&self) -> Result<Vec<SandboxId>>;

    /// Notes that a sandbox has come to its end, so that [`live`](Self::live) need not name it.
    ///
    /// # Errors
    ///
    /// `Journal` if it cannot be written.
    async fn retire(&self, sandbox: &SandboxId) -> Result<()>;

    /// Waits for the right to change a sandbox's life. The lock ends when it is dropped, or when the
    /// process that has it ends.
    ///
    /// # Errors
    ///
    /// `Journal` if it cannot be had at all.
    async fn lock(&self, sandbox: &SandboxId) -> Result<JournalLock>;

    /// Takes a name for a sandbox: `None` if it was free, or was this sandbox's already; else the
    /// sandbox that has it. Of many at once, one gets it.
    ///
    /// # Errors
    ///
    /// `Journal` if it cannot be found out.
    async fn claim(&self, name: &Name, sandbox: &SandboxId) -> Result<Option<SandboxId>>;

    /// The sandbox that has a name.
    ///
    /// # Errors
    ///
    /// `Journal` if it cannot be found out.
    async fn resolve(&self, name: &Name) -> Result<Option<SandboxId>>;

    /// Gives a name back, if it is still this sandbox's.
    ///
    /// # Errors
    ///
    /// `Journal` if it cannot be written.
    async fn release(&self, name: &Name, sandbox: &SandboxId) -> Result<()>;
}

/// The right to change a sandbox's life, until it is dropped.
#[derive(Debug)]
pub struct JournalLock(#[allow(dead_code, reason = "held for its drop")] Box<dyn HeldLock>);

/// Anything that unlocks when it is dropped.
pub trait HeldLock: Any + Send + Sync + fmt::Debug {}

impl<T: Any + Send + Sync + fmt::Debug> HeldLock for T {}

impl JournalLock {
    /// A lock that ends with this value.
    pub fn new(held: impl HeldLock) -> Self {
        Self(Box::new(held))
    }
}

/// A record that has no place in the history yet.
#[derive(Debug, Clone)]
pub struct Draft {
    /// The sandbox that it is about.
    pub sandbox: SandboxId,
    /// The turn of the call that caused it.
    pub turn: Option<TurnId>,
    /// On whose behalf.
    pub consumer: Consumer,
    /// What happened.
    pub kind: EventKind,
}

impl Draft {
    /// Whether it must survive the machine's fall, and not only the process's.
    ///
    /// What a sandbox is and has must: losing it would lose the sandbox. That a process started or ended
    /// need not, since no process survives the machine's fall either; and waiting for the disk twice per
    /// command would cost more than the command.
    #[must_use]
    pub fn must_reach_disk(&self) -> bool {
        !matches!(
            self.kind,
            EventKind::Known(
                Known::ProcessStarted { .. }
                    | Known::ProcessExited { .. }
                    | Known::FileOperation { .. }
                    | Known::PortForwarded { .. }
                    | Known::EgressAllowed { .. }
                    | Known::EgressDenied { .. }
            )
        )
    }

    fn into_event(self, seq: u64) -> SandboxEvent {
        SandboxEvent {
            id: EventId::new(),
            sandbox_id: self.sandbox,
            seq,
            at: Timestamp::now(),
            turn: self.turn,
            consumer: self.consumer,
            kind: self.kind,
        }
    }
}
