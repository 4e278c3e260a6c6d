//! Patterns of hosts and ports.

use std::net::IpAddr;

/// The ports of a pattern that names none: those of HTTP and HTTPS.
const USUAL_PORTS: [u16; 2] = [80, 443];

/// One pattern: `host`, `*.domain`, an address; each perhaps with `:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    /// As it was written.
    pub(super) text: String,
    host: Host,
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    Name(String),
    /// All names that end in a dot and this.
    Below(String),
    Address(IpAddr),
}

impl Pattern {
    /// Understands a pattern, or says what is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{text:?} is no pattern of a host: {why}");
        let (host, port) = split(text).ok_or_else(|| wrong("the port must be 1 to 65535"))?;
        let host = if let Ok(address) = host.parse() {
            Host::Address(address)
        } else if host == "*" {
            return Err(wrong("it is every host; allow the network instead"));
        } else if let Some(domain) = host.strip_prefix("*.") {
            Host::Below(name(domain).ok_or_else(|| wrong("no domain follows `*.`"))?)
        } else {
            let why = "a name has letters, digits, `-`, `_` and dots (others as `xn--…`), and only `*.` \
                       at its beginning stands for more";
            Host::Name(name(host).ok_or_else(|| wrong(why))?)
        };
        Ok(Self { text: text.to_owned(), host, port })
    }

    /// Whether it is about this host, as [`canonical`] has it, and this port.
    pub(super) fn matches(&self, host: &str, literal: Option<IpAddr>, port: u16) -> bool {
        let host = match (&self.host, literal) {
            (Host::Address(wanted), Some(literal)) => *wanted == literal,
            (Host::Name(wanted), None) => wanted == host,
            (Host::Below(domain), None) => host.strip_suffix(domain.as_str()).is_some_and(|rest| {
                rest.len() > 1 && rest.ends_with('.') && !rest.starts_with('.')
            }),
            _ => false,
        };
        host && self.port.map_or(USUAL_PORTS.contains(&port), |wanted| wanted == port)
    }
}

/// A host as patterns are compared with: in lower case, without the dot of the root, an address in its usual
/// form. `None` for what can be neither.
pub(super) fn canonical(host: &str) -> Option<String> {
    match host.parse::<IpAddr>() {
        Ok(address) => Some(address.to_string()),
        Err(_) => name(host.strip_suffix('.').unwrap_or(host)),
    }
}

/// A name in lower case, if it is one.
fn name(text: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let labels = || text.split('.').all(|label| (1..=63).contains(&label.len()));
    let is_one = text.len() <= 253 && text.chars().all(plain) && labels();
    is_one.then(|| text.to_ascii_lowercase())
}

/// Host and port. An IPv6 address with a port is in brackets.
fn split(text: &str) -> Option<(&str, Option<u16>)> {
    let number = |port: &str| {
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        port.parse().ok().filter(|port| digits && *port != 0)
    };
    if let Some(rest) = text.strip_prefix('[') {
        let Some((host, rest)) = rest.split_once(']') else { return Some((text, None)) };
        return match rest.strip_prefix(':') {
            Some(port) => Some((host, Some(number(port)?))),
            None if rest.is_empty() => Some((host, None)),
            None => Some((text, None)),
        };
    }
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => Some((host, Some(number(port)?))),
        _ => Some((text, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_no_host_is_refused_with_the_reason() {
        for (text, says) in [
            ("", "letters, digits"),
            ("*", "allow the network"),
            ("*:443", "allow the network"),
            ("*.", "no domain"),
            ("a.*.org", "at its beginning"),
            ("https://crates.io", "port"),
            ("crates.io/x", "letters"),
            ("crates.io:0", "port"),
            ("crates.io:http", "port"),
            ("crates.io:+80", "port"),
            ("user@crates.io", "letters"),
            ("a..b", "letters"),
            ("bücher.example", "xn--"),
            ("[::1", "letters"),
            ("10.0.0.0/8", "letters"),
            ("-o x", "letters"),
        ] {
            let why = Pattern::parse(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
        for text in ["crates.io", "*.crates.io:8443", "10.0.0.1", "::1", "[::1]:80", "a_b-c.d:1"] {
            Pattern::parse(text).unwrap();
        }
    }
}
