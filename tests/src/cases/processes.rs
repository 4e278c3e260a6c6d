//! TBD
use super::cases;
cases!("processes";);
