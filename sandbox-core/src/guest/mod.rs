//! The core's side of the conversation with a guest.

mod attachment;
mod link;

pub(crate) use attachment::{Attachment, Item, StdinHalf};
pub(crate) use link::{Link, broken, failed, garbage, response, unexpected};
