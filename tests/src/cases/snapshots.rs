//! TBD
use super::cases;
cases!("snapshots";);
