//! The core's side of the conversation with a guest.

use std::time::Duration;

mod attachment;
mod link;
mod pipe;

pub(crate) use attachment::{Attachment, Item, Taken};
pub(crate) use link::{Link, answered, broken, failed, garbage, response, unexpected};
pub(crate) use pipe::Pipe;

/// How long a cut connection is tried to be made anew. The guest waits longer.
pub(crate) const RECONNECT: Duration = Duration::from_secs(30);
