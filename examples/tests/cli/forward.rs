//! Ports of a sandbox on this host's loopback.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
};

use serde_json::Value;

use crate::support::on_each;

/// Answers each line with the same in capitals.
const SERVICE: &str = r#"
    use Socket; $| = 1; socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
    bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die; listen($l, 5) or die;
    my ($port) = unpack_sockaddr_in(getsockname($l)); print "$port\n";
    while (accept(my $c, $l)) { select((select($c), $| = 1)[0]); print $c uc while <$c>; close $c }
"#;

#[test]
fn a_port_is_open_here_until_it_is_interrupted() {
    on_each(|cli| {
        cli.create("main", &[]);
        let spawned = cli.json(&["spawn", "main", "--", "perl", "-e", SERVICE]);
        let process = spawned["process_id"].as_str().unwrap();
        let port = || cli.run(&["logs", "main", process]).stdout;
        cli.until("a service", || port().ends_with('\n'));
        let port = port().trim_end().to_owned();
        let mut forward = cli.start(&["forward", "main", &format!("0:{port}")]);
        let mut line = String::new();
        BufReader::new(forward.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(told["port"].to_string(), port);
        let local = told["local"].as_str().unwrap();
        let ask = |said: &str| {
            let mut socket = TcpStream::connect(local)?;
            socket.write_all(said.as_bytes())?;
            socket.shutdown(std::net::Shutdown::Write)?;
            let mut back = String::new();
            socket.read_to_string(&mut back).map(|_| back)
        };
        assert_eq!(ask("hello\nagain\n").unwrap(), "HELLO\nAGAIN\n");
        let history = cli.run(&["history", "main"]).stdout;
        assert!(history.contains("port_forwarded"), "{history}");
        // What is refused is told, and the port goes on.
        cli.json(&["kill", "main", process]);
        cli.json(&["wait", "main", process]);
        assert!(!ask("nobody").is_ok_and(|said| !said.is_empty()));
        let mut said = BufReader::new(forward.stderr.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().contains("nothing listens there")));
        let pid = forward.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        assert_eq!(forward.wait().unwrap().code(), Some(0));
    });
}

#[test]
fn it_ends_with_the_sandbox_and_refuses_what_is_no_port() {
    on_each(|cli| {
        cli.create("main", &[]);
        let mut forward = cli.start(&["forward", "main", "0:8080"]);
        let mut line = String::new();
        BufReader::new(forward.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        cli.json(&["destroy", "main"]);
        let mut said = String::new();
        forward.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("destroyed"), "{said}");
        assert_eq!(forward.wait().unwrap().code(), Some(1));
        for bad in ["0", "1:0", "http", "0.0.0.0:80"] {
            cli.fails(2, &["forward", "main", bad]);
        }
        cli.fails(1, &["forward", "nobody", "8080"]);
    });
}
