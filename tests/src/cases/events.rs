//! TBD
use super::cases;
cases!("events";);
