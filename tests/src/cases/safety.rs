//! TBD
use super::cases;
cases!("safety";);
