//! What runs inside every sandbox, and the language in which it is spoken to.
//!
//! This library holds the wire protocol that the core and the guest program share, the set-up that a
//! backend hands to a guest at its start, and (with the default feature `bundled`) the guest program
//! itself as bytes. It knows nothing of bwrap, Docker or SSH.
//!
//! The protocol in one paragraph: both sides send an eight-byte [`preamble`], then speak yamux over the
//! byte stream ([`mux`]). Each request has a stream of its own. A stream carries [frames](frame): a
//! message (a [`Request`] or [`Response`], MessagePack maps that tolerate unknown fields) or data of one
//! channel. Process streams add windows and offsets, so that a cut connection loses and doubles nothing.

mod bundled;
mod carry;
mod content;
pub mod frame;
pub mod mux;
pub mod preamble;
mod protocol;
pub mod tree;

pub use bundled::bundled;
pub use carry::carry;
pub use content::ContentHash;
pub use protocol::{
    Bytes, DEFAULT_WINDOW, Done, EgressCall, EgressRequest, Entry, Existing, ExitStatus, Failure,
    FailureKind, FileEvent, FileInfo, FileKind, FileRequest, Hello, Input, KeptOutput,
    MAX_KEPT_OUTPUT, MountStep, Output, PROTOCOL_VERSION, ProcessExit, ProcessInfo, ProcessLimits,
    ProcessState, PtySize, Request, Response, SHELL_INPUT_WINDOW, Setup, ShellDone, ShellEvent,
    ShellRequest, Start, Started, Status, TreeMeta, TreeRecord, Welcome, errno_text,
};
