//! What every backend of `sandbox-core` must do, as a suite that any backend can run.
//!
//! A backend's test is a binary without the standard harness:
//!
//! ```no_run
//! use sandbox_conformance::Subject;
//! # fn my_backend(_: &std::path::Path) -> sandbox_core::Result<std::sync::Arc<dyn sandbox_core::SandboxBackend>> {
//! #     Err(sandbox_core::Error::unsupported("make", "an example"))
//! # }
//!
//! fn main() -> std::process::ExitCode {
//!     sandbox_conformance::main(vec![Subject::new("mine", my_backend)])
//! }
//! ```
//!
//! A backend does not choose its cases. A case says which [features](sandbox_core::Feature) it is about;
//! where the backend's probe says that this host has none of it, the case is skipped, with the probe's
//! evidence as the printed reason.

mod cases;
mod context;
pub mod cut;
pub mod decorate;
pub mod fake;
mod run;

pub use cases::{Case, all};
pub use context::{Check, Context, Failure, Subject};
pub use run::{Verdict, left_out, main, run_case};
