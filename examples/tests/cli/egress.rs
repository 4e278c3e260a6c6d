//! Single hosts that a sandbox without a network may connect to.

use std::{
    io::{Read, Write},
    net::TcpListener,
};

use crate::support::on_each;

/// Asks the proxy for what an argument names.
const GET: &str = r#"
    use Socket; my ($at, $port) = $ENV{http_proxy} =~ m{^http://([\d.]+):(\d+)$} or die "no proxy\n";
    socket(my $s, PF_INET, SOCK_STREAM, 0) or die; connect($s, pack_sockaddr_in($port, inet_aton($at))) or die;
    syswrite $s, "GET $ARGV[0] HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"; print while <$s>;
"#;

#[test]
fn only_the_hosts_that_were_named_are_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.read(&mut [0; 4096]);
            let _ =
                stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello from here");
        }
    });
    on_each(|cli| {
        cli.create(
            "main",
            &["--egress", &format!("127.0.0.1:{port}"), "--egress", "*.example.org"],
        );
        let get = |url: &str| cli.run(&["exec", "main", "--", "perl", "-e", GET, url]).stdout;
        let said = get(&format!("http://127.0.0.1:{port}/"));
        assert!(said.ends_with("hello from here"), "{said}");
        let said = get("http://127.0.0.1:1/");
        assert!(said.starts_with("HTTP/1.1 403"), "{said}");
        let history = cli.run(&["history", "main"]).stdout;
        assert!(history.contains("egress_allowed"), "{history}");
        assert!(history.contains("egress_denied"), "{history}");
        cli.fails(1, &["create", "--egress", "not a host"]);
    });
}
