//! Profiles: named, versioned recipes for sandboxes.

mod apply;
mod catalog;
mod check;
mod period;
mod schema;

pub(crate) use apply::{Prepared, prepare};
pub use catalog::ProfileCatalog;
pub use period::Period;
pub use schema::{
    AccessRule, IsolationRule, Metadata as ProfileMetadata, NetworkDefault, NetworkRule, Placement,
    Profile, ReachabilityHints, Resources, Route, SetupRule, TtlRule, WorkspaceModeRule,
    WorkspaceRule,
};
