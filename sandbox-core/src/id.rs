//! The names of things.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Error, ErrorKind, Result};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A new one. Later ones sort after earlier ones.
            #[must_use]
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(format!(concat!($prefix, "{}"), Uuid::now_v7().simple()))
            }

            /// As text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                let valid = text.strip_prefix($prefix).is_some_and(|rest| {
                    rest.len() == 32
                        && rest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
                });
                if valid {
                    Ok(Self(text.to_owned()))
                } else {
                    let message =
                        format!(concat!("{:?} is not an id of the form ", $prefix, "…"), text);
                    Err(Error::new(ErrorKind::InvalidSpec, "parse id", message))
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;

            fn try_from(text: String) -> Result<Self> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }
    )*};
}

ids! {
    /// A sandbox, for all its life and after it: `sbx_` and a UUIDv7.
    SandboxId = "sbx_";
    /// What a backend made for a sandbox: `ins_` and a UUIDv7. Chosen by the manager beforehand, so that
    /// what is half made can be found.
    InstanceId = "ins_";
    /// A snapshot: `snp_` and a UUIDv7.
    SnapshotId = "snp_";
    /// A process that the harness started: `prc_` and a UUIDv7, or the hash of its key.
    ProcessId = "prc_";
    /// An event: `evt_` and a UUIDv7.
    EventId = "evt_";
    /// A state directory's manager; what it makes carries this mark: `own_` and a UUIDv7.
    OwnerId = "own_";
}

impl ProcessId {
    /// The one process of a sandbox that this key stands for, as long as its processes live: `since` says
    /// since when.
    pub(crate) fn of_key(sandbox: &SandboxId, since: u64, key: &str) -> Self {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        for part in [sandbox.as_str().as_bytes(), &since.to_be_bytes(), key.as_bytes()] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let hash = hash.finalize();
        let hex: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self(format!("prc_{hex}"))
    }
}

macro_rules! texts {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// This one.
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            /// As text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

texts! {
    /// A turn of the model; the harness names it as it likes.
    TurnId;
}

/// A backend: `bwrap`, `docker`, `ssh`, or a third party's.
///
/// The spelling that profiles use, `ext.bwrap`, means the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct BackendId(String);

impl BackendId {
    /// This one.
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        match text.strip_prefix("ext.") {
            Some(short) => Self(short.to_owned()),
            None => Self(text),
        }
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As profiles and statuses spell it: `ext.bwrap`.
    #[must_use]
    pub fn extension(&self) -> String {
        format!("ext.{}", self.0)
    }
}

impl fmt::Display for BackendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<String> for BackendId {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl From<BackendId> for String {
    fn from(id: BackendId) -> Self {
        id.0
    }
}

/// A sandbox's name: 1 to 64 ASCII letters, digits, `-`, `_` and `.`, beginning with a letter or digit.
///
/// Narrow on purpose, so that it can be a file's, a host's and a container's name unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: String| {
            let message = format!(
                "{text:?} cannot be a sandbox's name: {why}; use 1 to 64 letters, digits, '-', '_' or \
                 '.', beginning with a letter or digit"
            );
            Err(Error::new(ErrorKind::InvalidSpec, "name", message))
        };
        if text.is_empty() || text.len() > 64 {
            return refuse(format!("it has {} characters", text.len()));
        }
        if !text.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            return refuse("it begins with something else".into());
        }
        if let Some(bad) = text.chars().find(|c| !(c.is_ascii_alphanumeric() || "-_.".contains(*c)))
        {
            return refuse(format!("{bad:?} is in it"));
        }
        if text.starts_with("sbx_") {
            return refuse("it looks like an id".into());
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_time_and_survive_serde() {
        let (a, b) = (SandboxId::new(), SandboxId::new());
        assert!(a < b);
        let json = serde_json::to_string(&a).unwrap();
        assert_eq!(serde_json::from_str::<SandboxId>(&json).unwrap(), a);
        assert!("sbx_../../etc/passwd".parse::<SandboxId>().is_err());
        assert!(a.as_str().parse::<SnapshotId>().is_err());
    }

    #[test]
    fn a_backend_has_two_spellings() {
        assert_eq!(BackendId::new("ext.bwrap"), BackendId::new("bwrap"));
        assert_eq!(BackendId::new("bwrap").extension(), "ext.bwrap");
        let read: BackendId = serde_json::from_str("\"ext.docker\"").unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), "\"docker\"");
    }

    #[test]
    fn a_name_with_a_slash_is_refused_with_the_reason() {
        let error = "a/b".parse::<Name>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        assert!(error.to_string().contains("'/' is in it"), "{error}");
        for bad in ["", ".", "-rf", "sbx_1", &"x".repeat(65), "ä"] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
        for good in ["main", "a.b-c_D", "0"] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
    }
}
