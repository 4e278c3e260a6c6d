//! Names of hosts, as `ssh` takes them, and nothing that it would take for anything else.

use sandbox_core::{Error, ErrorKind, Result};

/// No name is longer.
const MOST: usize = 512;

/// A destination: a host's name, address or alias in the configuration of `ssh`, perhaps with a user
/// before it (`me@host`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Address(String);

impl Address {
    /// Takes a name that can be nothing but one.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if it begins like an option, or has characters that no name has.
    pub(crate) fn parse(name: &str) -> Result<Self> {
        let invalid = |why: &str| {
            let message = format!("{name:?} is no host: {why}");
            Err(Error::new(ErrorKind::InvalidSpec, "choose a host", message))
        };
        let (user, host) = match name.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, name),
        };
        let plain = |c: char| c.is_alphanumeric() || "._-:[]%+".contains(c);
        if name.len() > MOST {
            return invalid("it is too long");
        }
        for part in user.into_iter().chain([host]) {
            if part.is_empty() {
                return invalid("something is missing");
            }
            if part.starts_with('-') {
                return invalid("it begins like an option");
            }
            if let Some(strange) = part.chars().find(|c| !plain(*c)) {
                return invalid(&format!("there is no {strange:?} in a name"));
            }
        }
        Ok(Self(name.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names() {
        for name in ["build1", "me@build1.example.org", "10.0.0.1", "fe80::1%eth0", "a_b", "hôte"]
        {
            assert_eq!(Address::parse(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn what_ssh_would_take_for_something_else_is_refused() {
        let long = "a".repeat(600);
        for name in [
            "-oProxyCommand=touch /tmp/x",
            "me@-oProxyCommand=x",
            "-l@host",
            "",
            "@host",
            "me@",
            "a b",
            "a;b",
            "a\nb",
            "$(x)",
            "a/b",
            "'a",
            &long,
        ] {
            let error = Address::parse(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{name:?}");
        }
    }
}
