//! Single hosts that a sandbox without a network may connect to.
//!
//! The hosts are servers of the case on this host's loopback, which patterns have to name by its address.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sandbox_core::{
    Command, CreateSandbox, ErrorKind, Known, Network, OutputStream, Run, Sandbox, Suppressed,
};

use super::{cases, network::has_program};
use crate::{
    Check, Context,
    context::{SOON, error_of, pause, soon},
    holds, same,
};

cases!("egress";
    [NetworkDeny] only_what_a_pattern_names_can_be_connected_to,
    [NetworkDeny] a_name_is_no_way_to_an_address_that_is_not_public,
    [NetworkDeny] every_byte_arrives_and_each_direction_ends_by_itself,
    [NetworkDeny] a_plain_request_arrives_as_servers_take_it,
    [NetworkDeny] each_destination_is_in_the_history_once,
    [NetworkDeny] without_a_harness_nothing_gets_out,
    [NetworkDeny] what_is_hostile_to_the_proxy_harms_nobody_else,
    [NetworkDeny] setup_commands_are_let_out_too,
    [NetworkDeny, Snapshot, Stop] another_guest_is_served_as_the_one_before,
    [NetworkDeny] a_command_that_names_another_proxy_keeps_it,
    [NetworkDeny] other_hosts_are_another_spec,
    [] hosts_are_let_through_only_where_the_network_is_denied,
);

/// A server on this host's loopback, as long as the process lives.
struct Server {
    port: u16,
    connections: Arc<AtomicUsize>,
}

impl Server {
    fn new(
        serve: impl Fn(TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Check<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, serve) = (Arc::clone(&connections), Arc::new(serve));
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                count.fetch_add(1, Ordering::Relaxed);
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(stream));
            }
        });
        Ok(Self { port, connections })
    }

    /// Sends back what it gets, and that it has come to its end.
    fn echo() -> Check<Self> {
        Self::new(|mut stream| {
            std::io::copy(&mut stream.try_clone()?, &mut stream)?;
            stream.write_all(b"end")?;
            stream.shutdown(Shutdown::Write)
        })
    }

    fn pattern(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Asks the proxy for a tunnel and carries standard input and output through it; if there is none, says why.
const TUNNEL: &str = r#"
    use Socket; $SIG{PIPE} = "IGNORE"; $| = 1;
    my ($where, $at) = $ENV{https_proxy} =~ m{^http://([\d.]+):(\d+)$} or die "no proxy\n";
    socket(my $s, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
    connect($s, pack_sockaddr_in($at, inet_aton($where))) or die "connect: $!\n";
    syswrite $s, "CONNECT $ARGV[0] HTTP/1.1\r\nHost: $ARGV[0]\r\n\r\n";
    my $head = "";
    while ($head !~ /\r\n\r\n$/) { sysread($s, my $c, 1) or last; $head .= $c }
    if ($head !~ m{^HTTP/1.1 200 }) { local $/; print STDERR $head, scalar <$s>; exit 1 }
    if (!fork) {
        while (sysread STDIN, my $some, 65536) {
            for (my $done = 0; $done < length $some;) {
                $done += syswrite($s, $some, length($some) - $done, $done) || exit 1;
            }
        }
        shutdown $s, 1; exit 0;
    }
    while (1) {
        my $count = sysread($s, my $some, 65536) // die "cut: $!\n";
        $count or last; print $some;
    }
"#;

fn tunnel(to: &str) -> Command {
    Command::new("perl").args(["-e", TUNNEL, to])
}

async fn through(cx: &Context, sandbox: &Sandbox, to: &str, input: &str) -> Check<Run> {
    let command = tunnel(to).stdin(input.as_bytes().to_vec());
    Ok(soon("a tunnel", cx.run(sandbox, command)).await??)
}

/// Whether an echo comes through.
async fn is_let_through(cx: &Context, sandbox: &Sandbox, to: &str) -> Check {
    let run = through(cx, sandbox, to, "word ").await?;
    same!((run.stdout.text().as_ref(), run.stderr.text().as_ref()), ("word end", ""));
    Ok(())
}

/// That it is refused, for this reason.
async fn is_refused(cx: &Context, sandbox: &Sandbox, to: &str, status: u16, says: &str) -> Check {
    let run = through(cx, sandbox, to, "word").await?;
    let said = run.stderr.text();
    holds!(said.starts_with(&format!("HTTP/1.1 {status} ")), "{to} is refused: {said:?}");
    holds!(said.contains(says), "{said:?} says {says:?}");
    same!(run.stdout.total, 0);
    Ok(())
}

fn request(cx: &Context, patterns: &[&str]) -> CreateSandbox {
    let denied = cx.request().network(Network::Deny);
    patterns.iter().fold(denied, |request, pattern| request.egress(*pattern))
}

/// A sandbox that may connect there; `None` where it has no program to do it with.
async fn sandbox(cx: &Context, patterns: &[&str]) -> Check<Option<Sandbox>> {
    let sandbox = cx.manager.create(request(cx, patterns), &cx.sink).await?;
    Ok(has_program(cx, &sandbox, "perl").await?.then_some(sandbox))
}

async fn only_what_a_pattern_names_can_be_connected_to(cx: &Context) -> Check {
    let (named, other) = (Server::echo()?, Server::echo()?);
    let Some(sandbox) = sandbox(cx, &[&named.pattern(), "*.example.org"]).await? else {
        return Ok(());
    };
    is_let_through(cx, &sandbox, &named.pattern()).await?;
    let no_pattern = "no pattern of this sandbox's egress list names it";
    for to in [
        other.pattern(),
        format!("localhost:{}", named.port),
        format!("0.0.0.0:{}", named.port),
        format!("[::ffff:127.0.0.1]:{}", named.port),
        format!("2130706433:{}", named.port),
        "example.org:443".to_owned(),
        "a.example.org:22".to_owned(),
        "169.254.169.254:80".to_owned(),
    ] {
        is_refused(cx, &sandbox, &to, 403, no_pattern).await?;
    }
    same!((named.connections(), other.connections()), (1, 0));
    // The proxy is the only way: there is still no network.
    let direct = format!(
        "use Socket; socket(my $s, PF_INET, SOCK_STREAM, 0); \
         connect($s, pack_sockaddr_in({}, INADDR_LOOPBACK)) or die \"$!\\n\"",
        named.port
    );
    let run = cx.run(&sandbox, Command::new("perl").args(["-e", &direct])).await?;
    holds!(run.stderr.text().contains("refused"), "{}", run.stderr.text());
    same!(cx.sh(&sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").await?, "lo");
    Ok(())
}

async fn a_name_is_no_way_to_an_address_that_is_not_public(cx: &Context) -> Check {
    let server = Server::echo()?;
    let by_name = format!("localhost:{}", server.port);
    let Some(sandbox) = sandbox(cx, &[&by_name]).await? else { return Ok(()) };
    is_refused(cx, &sandbox, &by_name, 403, "no address of the public internet").await?;
    same!(server.connections(), 0);
    Ok(())
}

async fn every_byte_arrives_and_each_direction_ends_by_itself(cx: &Context) -> Check {
    let server = Server::echo()?;
    let Some(sandbox) = sandbox(cx, &[&server.pattern()]).await? else { return Ok(()) };
    cx.sh(&sandbox, "head -c 16777216 /dev/urandom > sent; printf end > end").await?;
    sandbox.files().write("tunnel.pl", TUNNEL, &cx.sink).await?;
    let text = format!(
        "perl tunnel.pl {} < sent > back && cat sent end | cmp - back && wc -c < back",
        server.pattern()
    );
    same!(cx.sh(&sandbox, &text).await?, "16777219");
    // Several at once are kept apart.
    let text = format!(
        "for n in 1 2 3 4 5 6 7 8; do (echo $n | perl tunnel.pl {} > out$n) & done; wait; cat out*",
        server.pattern()
    );
    let all = cx.sh(&sandbox, &text).await?;
    same!(all, "1\nend2\nend3\nend4\nend5\nend6\nend7\nend8\nend");
    Ok(())
}

async fn a_plain_request_arrives_as_servers_take_it(cx: &Context) -> Check {
    let server = Server::new(|mut stream| {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let mut head = Vec::new();
        while let Some(line) = lines.next().transpose()?.filter(|line| !line.is_empty()) {
            head.push(line);
        }
        let body = head.join("|");
        let length = body.len();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}")
    })?;
    let Some(sandbox) = sandbox(cx, &[&server.pattern()]).await? else { return Ok(()) };
    let text = r#"
        use Socket;
        my ($where, $at) = $ENV{http_proxy} =~ m{^http://([\d.]+):(\d+)$} or die "no proxy\n";
        socket(my $s, PF_INET, SOCK_STREAM, 0) or die;
        connect($s, pack_sockaddr_in($at, inet_aton($where))) or die "connect: $!\n";
        syswrite $s, "GET http://$ARGV[0]/a?b HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\nX: y\r\n\r\n";
        local $/; print scalar <$s>;
    "#;
    let command = Command::new("perl").args(["-e", text, &server.pattern()]);
    let run = soon("a request", cx.run(&sandbox, command)).await??;
    let expected = format!("GET /a?b HTTP/1.1|Host: {}|Connection: close|X: y", server.pattern());
    holds!(run.stdout.text().ends_with(&expected), "{}{}", run.stdout.text(), run.stderr.text());
    Ok(())
}

async fn each_destination_is_in_the_history_once(cx: &Context) -> Check {
    let server = Server::echo()?;
    let Some(sandbox) = sandbox(cx, &[&server.pattern()]).await? else { return Ok(()) };
    for _ in 0..3 {
        is_let_through(cx, &sandbox, &server.pattern()).await?;
        is_refused(cx, &sandbox, "Example.org:443", 403, "").await?;
    }
    let history = cx.manager.history(sandbox.id(), 0).await?;
    let told = history.iter().filter_map(|event| match event.known()? {
        Known::EgressAllowed { host, port, pattern } => {
            Some(format!("allowed {host}:{port} by {pattern}"))
        }
        Known::EgressDenied { host, port, reason, last_told: false } => {
            Some(format!("denied {host}:{port}: {reason}"))
        }
        _ => None,
    });
    let pattern = server.pattern();
    same!(
        told.collect::<Vec<_>>(),
        [
            format!("allowed {pattern} by {pattern}"),
            "denied Example.org:443: no pattern of this sandbox's egress list names it".to_owned(),
        ]
    );
    // The sink of the next call has them, as all that nobody called for.
    let kinds: Vec<String> =
        cx.sink.events().iter().map(sandbox_core::SandboxEvent::name).collect();
    for kind in ["egress_allowed", "egress_denied"] {
        same!(kinds.iter().filter(|told| *told == kind).count(), 1);
    }
    Ok(())
}

async fn without_a_harness_nothing_gets_out(cx: &Context) -> Check {
    let server = Server::echo()?;
    let (id, process) = {
        let manager = cx.another_manager().await?;
        let sandbox = manager.create(request(cx, &[&server.pattern()]), &Suppressed).await?;
        if !has_program(cx, &sandbox, "perl").await? {
            return Ok(());
        }
        sandbox.files().write("tunnel.pl", TUNNEL, &Suppressed).await?;
        let text = format!(
            "until perl tunnel.pl {} < /dev/null 2>&1 | grep '^HTTP/1.1 503'; do :; done",
            server.pattern()
        );
        let process = sandbox.spawn(Command::shell(text).detached(), &Suppressed).await?;
        // The control: it gets out as long as there is one.
        until("a few connections", || server.connections() > 2).await?;
        (sandbox.id().clone(), process.id().clone())
    };
    // Nobody is connected: the first that is refused ends the loop.
    let mut seen = (server.connections(), Instant::now());
    let quiet = || {
        let now = server.connections();
        if now != seen.0 {
            seen = (now, Instant::now());
        }
        seen.1.elapsed() > Duration::from_secs(2)
    };
    until("the last connection", quiet).await?;
    let before = server.connections();
    let sandbox = cx.manager.open(id.as_str()).await?;
    let process = sandbox.process(&process).await?;
    let end = soon("its end", process.wait(&cx.sink)).await??;
    same!(end.outcome, sandbox_core::Outcome::Exited(0));
    let piece = process.read(OutputStream::Stdout, 0, 4096).await?;
    same!(String::from_utf8_lossy(&piece.bytes).trim(), "HTTP/1.1 503 Service Unavailable");
    same!(server.connections(), before);
    is_let_through(cx, &sandbox, &server.pattern()).await
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Check {
    let deadline = Instant::now() + SOON;
    while !holds() {
        holds!(Instant::now() < deadline, "{what} comes");
        pause().await;
    }
    Ok(())
}

async fn what_is_hostile_to_the_proxy_harms_nobody_else(cx: &Context) -> Check {
    let server = Server::echo()?;
    let Some(sandbox) = sandbox(cx, &[&server.pattern()]).await? else { return Ok(()) };
    let text = r#"
        use Socket; $SIG{PIPE} = "IGNORE";
        my ($where, $at) = $ENV{http_proxy} =~ m{^http://([\d.]+):(\d+)$} or die "no proxy\n";
        sub ask {
            socket(my $s, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
            connect($s, pack_sockaddr_in($at, inet_aton($where))) or die "connect: $!\n";
            syswrite $s, $_[0]; return $s;
        }
        sub answer { my $s = shift; local $/; my $all = <$s> // ""; $all =~ m{^HTTP/1.1 (\d+)}; print $1 // "none", "\n" }
        answer(ask("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" . "\xff" x 500));
        answer(ask("GET http://a/ HTTP/1.1\r\nX: " . "x" x 20000));
        answer(ask("GET / HTTP/1.1\r\n\r\n"));
        answer(ask("CONNECT " . "a" x 300 . ":443 HTTP/1.1\r\n\r\n"));
        ask("CONNECT"); # and goes away
        my @many = map { ask("CONNECT ") } 1 .. 200;
        answer($many[199]);
    "#;
    let run =
        soon("the answers", cx.run(&sandbox, Command::new("perl").args(["-e", text]))).await??;
    same!(
        (run.stdout.text().as_ref(), run.stderr.text().as_ref()),
        ("400\n431\n400\n400\n503\n", "")
    );
    // They have gone, and their places are free.
    let deadline = Instant::now() + SOON;
    while through(cx, &sandbox, &server.pattern(), "").await?.stdout.text() != "end" {
        holds!(Instant::now() < deadline, "others are let through again");
        pause().await;
    }
    same!(server.connections(), 1);
    Ok(())
}

async fn setup_commands_are_let_out_too(cx: &Context) -> Check {
    let server = Server::echo()?;
    let plain = cx.manager.create(request(cx, &[]), &cx.sink).await?;
    if !has_program(cx, &plain, "perl").await? {
        return Ok(());
    }
    std::fs::write(cx.repository().join("tunnel.pl"), TUNNEL)?;
    let text = format!("echo fetched | perl tunnel.pl {} > fetched", server.pattern());
    let request = request(cx, &[&server.pattern()]).setup(text);
    let sandbox = soon("a creation", cx.manager.create(request, &cx.sink)).await??;
    same!(cx.sh(&sandbox, "cat fetched").await?, "fetched\nend");
    Ok(())
}

async fn another_guest_is_served_as_the_one_before(cx: &Context) -> Check {
    let server = Server::echo()?;
    let Some(sandbox) = sandbox(cx, &[&server.pattern()]).await? else { return Ok(()) };
    let snapshot = sandbox.snapshot("", &cx.sink).await?;
    is_let_through(cx, &sandbox, &server.pattern()).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    is_let_through(cx, &sandbox, &server.pattern()).await?;
    sandbox.stop(&cx.sink).await?;
    sandbox.start(&cx.sink).await?;
    is_let_through(cx, &sandbox, &server.pattern()).await?;
    let fork = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    is_let_through(cx, &fork, &server.pattern()).await?;
    // Another manager is asked as well.
    let again = cx.another_manager().await?.open(sandbox.id().as_str()).await?;
    is_let_through(cx, &again, &server.pattern()).await
}

async fn a_command_that_names_another_proxy_keeps_it(cx: &Context) -> Check {
    let sandbox = cx.manager.create(request(cx, &["example.org"]), &cx.sink).await?;
    let text = "env | grep -i '_proxy=' | sed 's/127.0.0.1:[0-9]*$/us/' | sort";
    same!(
        cx.sh(&sandbox, text).await?,
        "ALL_PROXY=http://us\nHTTPS_PROXY=http://us\nHTTP_PROXY=http://us\n\
         NO_PROXY=localhost,127.0.0.1\nall_proxy=http://us\nhttp_proxy=http://us\n\
         https_proxy=http://us\nno_proxy=localhost,127.0.0.1"
    );
    let own = Command::shell("echo $https_proxy,$HTTPS_PROXY").env("https_proxy", "other");
    same!(cx.run(&sandbox, own).await?.stdout.text(), "other,\n");
    // Where nobody is let out there is no proxy.
    let none = cx.manager.create(request(cx, &[]), &cx.sink).await?;
    same!(cx.sh(&none, "env | grep -ic '_proxy=' || :").await?, "0");
    Ok(())
}

async fn other_hosts_are_another_spec(cx: &Context) -> Check {
    let asked = |host: &str| cx.manager.acquire("main", request(cx, &[host]), &cx.sink);
    let sandbox = asked("example.org").await?;
    same!(asked("example.org").await?.id(), sandbox.id());
    let error = error_of(asked("example.net").await)?;
    same!(error.kind(), ErrorKind::SpecMismatch);
    holds!(error.message().contains("egress"), "{error} names the field");
    Ok(())
}

async fn hosts_are_let_through_only_where_the_network_is_denied(cx: &Context) -> Check {
    for (request, says) in [
        (cx.request().network(Network::Host).egress("example.org"), "the network is denied"),
        (cx.request().network(Network::Deny).egress("*"), "allow the network instead"),
    ] {
        let error = error_of(cx.manager.create(request, &cx.sink).await)?;
        same!(error.kind(), ErrorKind::InvalidSpec);
        holds!(error.message().contains(says), "{error} says {says:?}");
    }
    same!(cx.backend.inventory().await?, []);
    Ok(())
}
