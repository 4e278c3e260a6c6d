//! What a process says to the proxy first: which connection it wants. All of it is hostile.

use std::fmt::Write;

/// How long it may be, in bytes.
pub(super) const MAX_HEAD: usize = 8 * 1024;

/// How many header fields it may have.
const MAX_FIELDS: usize = 100;

/// Fields that are about the connection to the proxy, and the one that says what the URL says.
const NOT_PASSED_ON: [&str; 6] =
    ["connection", "host", "keep-alive", "proxy-authorization", "proxy-connection", "upgrade"];

/// A connection that a process wants.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) host: String,
    pub(super) port: u16,
    /// What goes to the server first: nothing for a tunnel, else the request as servers take it.
    pub(super) first: Vec<u8>,
    /// Whether the process waits to hear that the connection stands.
    pub(super) tunnel: bool,
}

/// Why it is none: a status, and a sentence for whoever wrote the program.
pub(super) type Refusal = (u16, &'static str);

/// Reads it, with its length; `None` if there is more to come.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Wanted, usize)>, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => return Ok(None),
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Err((431, "the request's head is too long for this proxy"));
        }
        Err(_) => return Err((400, "this is a proxy for HTTP, and that was no request")),
    };
    let (Some(method), Some(target), Some(version)) =
        (request.method, request.path, request.version)
    else {
        return Err((400, "the request has no first line"));
    };
    let bad = (400, "the request names no host and port that this proxy understands");
    if method == "CONNECT" {
        let (host, port) = authority(target, None).ok_or(bad)?;
        return Ok(Some((Wanted { host, port, first: Vec::new(), tunnel: true }, length)));
    }
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
    let (Some(_), Some(rest)) = (scheme, target.get(7..)) else {
        return Err((400, "ask for an http:// URL, or for a tunnel with CONNECT"));
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (named, path) = rest.split_at(end);
    let (host, port) = authority(named, Some(80)).ok_or(bad)?;
    // The connection is this request's alone: the next one may be for another host.
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut head = String::new();
    let _ = write!(head, "{method} {slash}{path} HTTP/1.{version}\r\n");
    let _ = write!(head, "Host: {named}\r\nConnection: close\r\n");
    let mut first = head.into_bytes();
    for field in request.headers.iter() {
        if NOT_PASSED_ON.iter().all(|name| !field.name.eq_ignore_ascii_case(name)) {
            first.extend_from_slice(field.name.as_bytes());
            first.extend_from_slice(b": ");
            first.extend_from_slice(field.value);
            first.extend_from_slice(b"\r\n");
        }
    }
    first.extend_from_slice(b"\r\n");
    Ok(Some((Wanted { host, port, first, tunnel: false }, length)))
}

/// `host:port`, `[::1]:port`; without a port where there is one to fall back on.
fn authority(text: &str, default: Option<u16>) -> Option<(String, u16)> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        host.parse::<std::net::Ipv6Addr>().ok()?;
        (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
    } else {
        match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if host.is_empty() || host.len() > 253 || !host.chars().all(plain) {
        return None;
    }
    let port = match port {
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok()?,
        Some(_) => return None,
        None => default?,
    };
    (port != 0).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wanted(text: &str) -> (Wanted, usize) {
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn a_tunnel_names_host_and_port() {
        let text = "CONNECT example.org:443 HTTP/1.1\r\nHost: other\r\n\r\n";
        let (tunnel, length) = wanted(&format!("{text}and more"));
        assert_eq!((tunnel.host.as_str(), tunnel.port, tunnel.tunnel), ("example.org", 443, true));
        assert!(tunnel.first.is_empty());
        assert_eq!(length, text.len());
        let (tunnel, _) = wanted("CONNECT [2001:db8::1]:8443 HTTP/1.1\r\n\r\n");
        assert_eq!((tunnel.host.as_str(), tunnel.port), ("2001:db8::1", 8443));
    }

    #[test]
    fn a_plain_request_goes_on_as_servers_take_it() {
        let (plain, _) = wanted(
            "POST http://example.org/a?b HTTP/1.1\r\nHost: evil\r\nProxy-Connection: keep-alive\r\n\
             Connection: keep-alive\r\nContent-Length: 3\r\nX: y\r\n\r\n",
        );
        assert_eq!((plain.host.as_str(), plain.port, plain.tunnel), ("example.org", 80, false));
        assert_eq!(
            String::from_utf8(plain.first).unwrap(),
            "POST /a?b HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\
             Content-Length: 3\r\nX: y\r\n\r\n"
        );
        let (root, _) = wanted("GET HTTP://h:81 HTTP/1.0\r\n\r\n");
        assert_eq!((root.host.as_str(), root.port), ("h", 81));
        assert!(root.first.starts_with(b"GET / HTTP/1.0\r\nHost: h:81\r\n"));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (text, status) in [
            ("\x16\x03\x01\x02\x00\x01\x00\x01\x03\x03", 400),
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("GET https://example.org/ HTTP/1.1\r\n\r\n", 400),
            ("GET http:///x HTTP/1.1\r\n\r\n", 400),
            ("GET http://user:word@example.org/ HTTP/1.1\r\n\r\n", 400),
            ("CONNECT example.org HTTP/1.1\r\n\r\n", 400),
            ("CONNECT example.org:0 HTTP/1.1\r\n\r\n", 400),
            ("CONNECT example.org:99999 HTTP/1.1\r\n\r\n", 400),
            ("CONNECT example.org:+80 HTTP/1.1\r\n\r\n", 400),
            ("CONNECT :443 HTTP/1.1\r\n\r\n", 400),
            ("CONNECT [::1:443 HTTP/1.1\r\n\r\n", 400),
            ("CONNECT a:b:443 HTTP/1.1\r\n\r\n", 400),
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap_err().0, status, "{text:?}");
        }
        let long = format!("GET http://h/ HTTP/1.1\r\nX: {}", "x".repeat(MAX_HEAD));
        assert_eq!(parse(long.as_bytes()).unwrap_err().0, 431);
        let many = format!("GET http://h/ HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_FIELDS + 1));
        assert_eq!(parse(many.as_bytes()).unwrap_err().0, 431);
        assert_eq!(parse(b"CONNECT example.org:443 HT").unwrap(), None);
    }

    proptest! {
        #[test]
        fn anything_is_taken_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn no_host_is_more_than_a_host(text in "\\PC{0,40}") {
            if let Ok(Some((wanted, _))) = parse(format!("CONNECT {text} HTTP/1.1\r\n\r\n").as_bytes()) {
                prop_assert!(wanted.host.chars().all(|c| c.is_ascii_alphanumeric() || "-._:".contains(c)));
            }
        }
    }
}
