//! TBD
use super::cases;
cases!("files";);
