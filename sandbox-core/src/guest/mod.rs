//! The core's side of the conversation with a guest.

mod attachment;
mod link;
mod pipe;

pub(crate) use attachment::{Attachment, Item, Taken};
pub(crate) use link::{Link, answered, broken, failed, garbage, response, unexpected};
pub(crate) use pipe::Pipe;
