//! Sandboxes of the account beside the services of a compose project, which is brought up from the workspace
//! and taken down with the instance.
//!
//! The project's name is the instance's, so that what belongs to it is found whatever was broken off. What
//! was asked of compose is written down in the instance's directory before it is asked, and compose itself
//! carries the instance's mark like all of its processes: so one that was orphaned in the middle of its work
//! ends first, and then the project is taken down.

mod backend;
mod engine;
mod project;
mod run;
mod services;

pub(crate) use backend::ComposeHost;
