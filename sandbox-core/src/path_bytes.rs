//! Paths that need not be UTF-8, for `#[serde(with = "…")]`: text, or a list of bytes where they are none.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Bytes(Vec<u8>),
}

/// Writes a path.
///
/// # Errors
///
/// The serializer's own.
pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => to.serialize_str(text),
        None => path.as_os_str().as_bytes().serialize(to),
    }
}

/// Reads one.
///
/// # Errors
///
/// The deserializer's own, and for what is neither text nor bytes.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    Ok(match Written::deserialize(from)? {
        Written::Text(text) => text.into(),
        Written::Bytes(bytes) => OsString::from_vec(bytes).into(),
    })
}
