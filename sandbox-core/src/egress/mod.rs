//! Where a sandbox without a network may connect to all the same.
//!
//! The sandbox itself has no way out. Its processes ask a proxy of the guest's for a connection to a host and
//! port; the guest tells the harness, which decides by the spec's patterns, connects from its own host, and
//! carries the bytes.

mod address;
mod pattern;
mod serve;

use std::{net::IpAddr, sync::Arc};

use pattern::Pattern;
pub(crate) use serve::{Told, serve};

/// How many patterns a spec may have.
const MAX_PATTERNS: usize = 256;

/// The patterns of a spec, understood.
#[derive(Debug, Clone)]
pub(crate) struct Rules(Arc<[Pattern]>);

/// A connection that is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// The host's name, or its address in the usual form.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The pattern that allows it.
    pub(crate) pattern: String,
    /// The address, if the pattern names that very address: it may then be one of a private network.
    pub(crate) literal: Option<IpAddr>,
}

impl Rules {
    /// Understands patterns; what is wrong with the first that is none.
    pub(crate) fn parse(patterns: &[String]) -> Result<Self, String> {
        if patterns.len() > MAX_PATTERNS {
            return Err(format!("{} patterns; {MAX_PATTERNS} is the most", patterns.len()));
        }
        let all: Result<Vec<_>, _> = patterns.iter().map(|text| Pattern::parse(text)).collect();
        Ok(Self(all?.into()))
    }

    /// Whether a process may connect there: it names what it wants as it likes.
    pub(crate) fn allow(&self, host: &str, port: u16) -> Option<Allowed> {
        let host = pattern::canonical(host)?;
        let literal = host.parse().ok();
        let found = self.0.iter().find(|pattern| pattern.matches(&host, literal, port))?;
        Some(Allowed { host, port, pattern: found.text.clone(), literal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(patterns: &[&str]) -> Rules {
        let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
        Rules::parse(&patterns).unwrap()
    }

    #[test]
    fn only_what_a_pattern_says_is_allowed() {
        let rules =
            rules(&["Crates.io", "*.example.org:8443", "10.0.0.7:5432", "[2001:db8::1]:443"]);
        for (host, port, allowed) in [
            ("crates.io", 443, true),
            ("CRATES.IO.", 80, true),
            ("crates.io", 22, false),
            ("static.crates.io", 443, false),
            ("evilcrates.io", 443, false),
            ("crates.io.evil.net", 443, false),
            ("a.example.org", 8443, true),
            ("b.a.example.org", 8443, true),
            ("example.org", 8443, false),
            ("a.example.org", 443, false),
            (".example.org", 8443, false),
            ("10.0.0.7", 5432, true),
            ("10.0.0.8", 5432, false),
            ("010.0.0.7", 5432, false),
            ("167772167", 5432, false),
            ("2001:DB8:0:0::1", 443, true),
            ("::ffff:10.0.0.7", 5432, false),
            ("", 443, false),
            ("crates.io\n", 443, false),
        ] {
            assert_eq!(rules.allow(host, port).is_some(), allowed, "{host}:{port}");
        }
        let allowed = rules.allow("Crates.IO", 443).unwrap();
        assert_eq!((allowed.host.as_str(), allowed.pattern.as_str()), ("crates.io", "Crates.io"));
        assert_eq!(allowed.literal, None);
        let literal = rules.allow("10.0.0.7", 5432).unwrap().literal;
        assert_eq!(literal, Some("10.0.0.7".parse().unwrap()));
    }

    #[test]
    fn too_many_patterns_are_refused() {
        let many: Vec<String> = (0..=MAX_PATTERNS).map(|n| format!("h{n}")).collect();
        assert!(Rules::parse(&many).unwrap_err().contains("256 is the most"));
    }
}
