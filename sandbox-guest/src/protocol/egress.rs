//! Connections to the outside from a sandbox without a network: its processes ask a proxy of the guest's,
//! and the harness decides, connects, and carries the bytes.

use serde::{Deserialize, Serialize};

/// A message of [`Request::Egress`](super::Request::Egress).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EgressRequest {
    /// Be told of each connection that a process wants. Answered by [`Response::Done`](super::Response::Done)
    /// once the proxy listens, and then by [`Response::Egress`](super::Response::Egress) for each one, until
    /// the stream is closed. Of several that serve, the newest is asked.
    Serve,
    /// The connection was made. From here on this stream [carries](crate::carry) its bytes.
    Connected {
        /// See [`EgressCall::id`].
        id: u64,
    },
    /// There will be none. Answered by [`Response::Done`](super::Response::Done).
    Refused {
        /// See [`EgressCall::id`].
        id: u64,
        /// Because it is not allowed; otherwise it could not be made.
        denied: bool,
        /// Why, for whoever asked.
        reason: String,
    },
}

/// A connection that a process of the sandbox wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressCall {
    /// Which; the guest has not used it before.
    pub id: u64,
    /// Where to: a name or an address, as the process wrote it.
    pub host: String,
    /// The port there.
    pub port: u16,
}
