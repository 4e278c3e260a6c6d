//! Ports of a sandbox on this host's loopback.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use sandbox_core::{Chunk, Command, ErrorKind, Feature, Forward, Known, Network, Process, Sandbox};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, pause, soon},
    cut::Cutting,
    decorate::Decorated,
    holds, same,
};

cases!("forward";
    [] what_is_said_is_carried_both_ways_with_its_end,
    [] a_service_may_end_first,
    [] a_service_on_the_other_loopback_is_reached,
    [] much_is_carried_whole,
    [] who_does_not_read_is_waited_for,
    [] many_connections_are_carried_at_once,
    [] more_connections_than_are_carried_at_once_wait,
    [] a_port_where_nobody_listens_is_refused_until_somebody_does,
    [] what_is_broken_off_is_no_end,
    [NetworkDeny] only_the_sandboxs_own_ports_are_reached,
    [NetworkHost] in_the_hosts_network_the_hosts_ports_are_reached,
    [SnapshotLive] a_snapshot_breaks_no_connection_off,
    [Snapshot] a_forward_outlives_rewinds_and_stops,
    [] a_forward_outlives_a_connection_that_is_cut,
    [] dropping_it_closes_all,
    [] it_ends_with_the_sandbox,
    [] it_is_in_the_history,
    [] what_cannot_be_forwarded_says_why,
);

/// Any port of this host's loopback that is free.
const ANY: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

/// The same on an address of the loopback that is this case's own: a port that was closed there is nobody
/// else's by the time that it is looked at.
fn own() -> SocketAddr {
    static COUNT: AtomicU8 = AtomicU8::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    SocketAddr::from(([127, high, low, 2 + n % 250], 0))
}

/// Says back what it is told, and after that how much that was; to each in a process of its own.
const ECHO: &str = r#"
    use Socket; $| = 1; $SIG{CHLD} = "IGNORE";
    my ($family, $port) = @ARGV;
    my ($domain, $to) = $family == 4
        ? (PF_INET, pack_sockaddr_in($port, INADDR_LOOPBACK))
        : (PF_INET6, pack_sockaddr_in6($port, Socket::IN6ADDR_LOOPBACK));
    socket(my $l, $domain, SOCK_STREAM, 0) or die "socket: $!\n";
    setsockopt($l, SOL_SOCKET, SO_REUSEADDR, 1);
    bind($l, $to) or die "bind: $!\n"; listen($l, 512) or die "listen: $!\n";
    ($port) = $family == 4 ? unpack_sockaddr_in(getsockname($l)) : Socket::unpack_sockaddr_in6(getsockname($l));
    print "$port\n";
    while (1) {
        accept(my $c, $l) or next;
        if (!fork) {
            my $all = 0;
            while (my $n = sysread($c, my $piece, 65536)) {
                $all += $n;
                for (my $at = 0; $at < $n;) { $at += syswrite($c, $piece, $n - $at, $at) // exit }
            }
            syswrite($c, "|$all"); exit;
        }
        close($c);
    }
"#;

/// A service in a sandbox, which ends when this is dropped.
struct Service {
    port: u16,
    _process: Process,
}

/// Starts a service that prints its port; `None`, and says so, where there is nothing to start it with.
async fn serve(cx: &Context, sandbox: &Sandbox, args: &[&str]) -> Check<Option<Service>> {
    if cx.sh(sandbox, "command -v perl || :").await?.is_empty() {
        return Ok(left_out("there is no perl in this sandbox"));
    }
    let command = Command::new("perl").arg("-e").args(args);
    let mut process = sandbox.spawn(command, &cx.sink).await?;
    let mut said = String::new();
    while !said.contains('\n') {
        match soon("a service's port", process.next_output()).await? {
            Some(Chunk::Stdout(bytes)) => said += &String::from_utf8_lossy(&bytes),
            Some(Chunk::Stderr(bytes)) if bytes.starts_with(b"bind: Cannot assign") => {
                return Ok(left_out("there is no such loopback"));
            }
            Some(Chunk::Stderr(bytes)) if bytes.starts_with(b"socket: Address family") => {
                return Ok(left_out("there is no such loopback"));
            }
            Some(Chunk::Stderr(bytes)) => {
                return Err(String::from_utf8_lossy(&bytes).into_owned().into());
            }
            None => return Err("the service ended".into()),
        }
    }
    Ok(Some(Service { port: said.trim().parse()?, _process: process }))
}

#[allow(clippy::print_stderr, reason = "what is left out is never left out silently")]
fn left_out<T>(why: &str) -> Option<T> {
    eprintln!("left out: {why}");
    None
}

async fn echo(cx: &Context, sandbox: &Sandbox, port: u16) -> Check<Option<Service>> {
    serve(cx, sandbox, &[ECHO, "4", &port.to_string()]).await
}

async fn open(cx: &Context, sandbox: &Sandbox, port: u16) -> Check<Forward> {
    Ok(sandbox.forward(own(), port, &cx.sink).await?)
}

/// Says this and that it is all; what comes back.
async fn ask(to: SocketAddr, said: &[u8]) -> Check<Vec<u8>> {
    let asked = async {
        let mut socket = TcpStream::connect(to).await?;
        socket.write_all(said).await?;
        socket.shutdown().await?;
        let mut back = Vec::new();
        socket.read_to_end(&mut back).await?;
        std::io::Result::Ok(back)
    };
    Ok(soon("an answer", asked).await??)
}

/// Whether a connection is made and broken off without a word.
async fn is_refused(to: SocketAddr) -> Check<bool> {
    let asked = async {
        let mut socket = match TcpStream::connect(to).await {
            // Before it was looked at.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(true),
            connected => connected?,
        };
        let mut back = Vec::new();
        let read = socket.read_to_end(&mut back).await;
        std::io::Result::Ok(read.is_err() && back.is_empty())
    };
    Ok(soon("a refusal", asked).await??)
}

/// The next word of so many bytes.
async fn word(socket: &mut TcpStream, length: usize) -> Check<String> {
    let mut word = vec![0; length];
    soon("a word", socket.read_exact(&mut word)).await??;
    Ok(String::from_utf8(word)?)
}

/// Waits for the end of a connection; whether it was broken off.
async fn is_broken_off(mut socket: TcpStream) -> Check<bool> {
    let mut rest = Vec::new();
    Ok(soon("the end of a connection", socket.read_to_end(&mut rest)).await?.is_err())
}

async fn what_is_said_is_carried_both_ways_with_its_end(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    same!(forward.port(), service.port);
    holds!(forward.local_addr().ip().is_loopback(), "{} is of the loopback", forward.local_addr());
    let mut socket = TcpStream::connect(forward.local_addr()).await?;
    // A conversation, and after the end of one side the rest of the other's.
    for said in ["hello", "again"] {
        socket.write_all(said.as_bytes()).await?;
        same!(word(&mut socket, 5).await?, said);
    }
    same!(forward.stats().open, 1);
    socket.shutdown().await?;
    let mut rest = String::new();
    soon("the rest", socket.read_to_string(&mut rest)).await??;
    same!(rest, "|10");
    for n in 0..20 {
        let said = "x".repeat(n);
        same!(
            String::from_utf8(ask(forward.local_addr(), said.as_bytes()).await?)?,
            format!("{said}|{n}")
        );
    }
    until("no open connection", || forward.stats().open == 0).await?;
    same!((forward.stats().carried, forward.stats().refused), (21, 0));
    Ok(())
}

async fn until(what: &str, holds: impl Fn() -> bool) -> Check {
    let waiting = async {
        while !holds() {
            pause().await;
        }
    };
    soon(what, waiting).await
}

async fn a_service_may_end_first(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    // Says something, and that it is all; then prints what it is told.
    let text = r#"
        use Socket; $| = 1; socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
        bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die; listen($l, 5) or die;
        my ($port) = unpack_sockaddr_in(getsockname($l)); print "$port\n";
        while (accept(my $c, $l)) {
            syswrite($c, "that is all"); shutdown($c, 1);
            my $told = ""; while (sysread($c, my $piece, 100)) { $told .= $piece }
            open(my $f, ">>", "told"); syswrite($f, "$told\n");
        }
    "#;
    let Some(service) = serve(cx, &sandbox, &[text]).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    for said in ["once", "twice"] {
        let mut socket = TcpStream::connect(forward.local_addr()).await?;
        let mut all = String::new();
        soon("all that it says", socket.read_to_string(&mut all)).await??;
        same!(all, "that is all");
        socket.write_all(said.as_bytes()).await?;
    }
    let text = "until [ -e told ] && [ $(wc -l < told) = 2 ]; do sleep 0.02; done; cat told";
    same!(soon("what it was told", cx.sh(&sandbox, text)).await??, "once\ntwice");
    Ok(())
}

async fn a_service_on_the_other_loopback_is_reached(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = serve(cx, &sandbox, &[ECHO, "6", "0"]).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    same!(ask(forward.local_addr(), b"six").await?, b"six|3");
    Ok(())
}

async fn much_is_carried_whole(cx: &Context) -> Check {
    const MUCH: usize = 24 * 1024 * 1024;
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let socket = TcpStream::connect(forward.local_addr()).await?;
    let (mut from, mut to) = socket.into_split();
    let said: Arc<Vec<u8>> = Arc::new((0..MUCH).map(|n| (n % 251) as u8).collect());
    let all = Arc::clone(&said);
    let writer = tokio::spawn(async move {
        to.write_all(&all).await?;
        to.shutdown().await
    });
    let mut back = Vec::new();
    soon("all of it", from.read_to_end(&mut back)).await??;
    soon("the writer", writer).await???;
    let end = format!("|{MUCH}");
    holds!(back.ends_with(end.as_bytes()), "{} bytes came back", back.len());
    holds!(back[..back.len() - end.len()] == said[..], "they are the same");
    Ok(())
}

async fn who_does_not_read_is_waited_for(cx: &Context) -> Check {
    // More than all buffers on the way hold.
    const MOST: usize = 512 * 1024 * 1024;
    let sandbox = cx.sandbox().await?;
    let text = r#"
        use Socket; $| = 1; socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
        bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die; listen($l, 5) or die;
        my ($port) = unpack_sockaddr_in(getsockname($l)); print "$port\n";
        accept(my $c, $l); sleep 3600;
    "#;
    let Some(deaf) = serve(cx, &sandbox, &[text]).await? else { return Ok(()) };
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, deaf.port).await?;
    let mut socket = TcpStream::connect(forward.local_addr()).await?;
    let piece = vec![0; 256 * 1024];
    let mut said = 0;
    while let Ok(written) =
        tokio::time::timeout(Duration::from_secs(2), socket.write_all(&piece)).await
    {
        written?;
        said += piece.len();
        holds!(said < MOST, "{said} bytes are on their way though nobody takes them");
    }
    let other = open(cx, &sandbox, service.port).await?;
    same!(ask(other.local_addr(), b"meanwhile").await?, b"meanwhile|9");
    Ok(())
}

async fn many_connections_are_carried_at_once(cx: &Context) -> Check {
    const MANY: usize = 48;
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let mut sockets = Vec::new();
    for n in 0..MANY {
        let mut socket = TcpStream::connect(forward.local_addr()).await?;
        socket.write_all(format!("{n:04}").as_bytes()).await?;
        sockets.push(socket);
    }
    for (n, socket) in sockets.iter_mut().enumerate().rev() {
        same!(word(socket, 4).await?, format!("{n:04}"));
    }
    same!(forward.stats().open, MANY);
    Ok(())
}

async fn more_connections_than_are_carried_at_once_wait(cx: &Context) -> Check {
    const MOST: usize = 256;
    let sandbox = cx.sandbox().await?;
    // One process for all.
    let text = r#"
        use Socket; $| = 1; socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
        bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die; listen($l, 512) or die;
        my ($port) = unpack_sockaddr_in(getsockname($l)); print "$port\n";
        my @all; while (accept(my $c, $l)) { syswrite($c, "hi"); push @all, $c }
    "#;
    let Some(service) = serve(cx, &sandbox, &[text]).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let mut sockets = Vec::new();
    for _ in 0..MOST {
        let mut socket = TcpStream::connect(forward.local_addr()).await?;
        same!(word(&mut socket, 2).await?, "hi");
        sockets.push(socket);
    }
    let mut waits = TcpStream::connect(forward.local_addr()).await?;
    let mut word_of_it = [0; 2];
    let early = tokio::time::timeout(Duration::from_millis(300), waits.read_exact(&mut word_of_it));
    holds!(early.await.is_err(), "one more than {MOST} is not carried");
    // The service keeps its sides open: those that let go are done with all the same.
    let first = sockets.remove(0);
    first.set_zero_linger()?;
    drop(first);
    same!(word(&mut waits, 2).await?, "hi");
    Ok(())
}

async fn a_port_where_nobody_listens_is_refused_until_somebody_does(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let port = service.port;
    let mut forward = open(cx, &sandbox, port).await?;
    same!(ask(forward.local_addr(), b"a").await?, b"a|1");
    drop(service);
    let text = format!(
        "until ! grep -qi '0100007F:{port:04X} 00000000:0000 0A' /proc/net/tcp; do sleep 0.02; done"
    );
    soon("the end of the service", cx.sh(&sandbox, &text)).await??;
    holds!(is_refused(forward.local_addr()).await?, "nobody listens");
    let why = soon("why", forward.refused()).await?.ok_or("it ended")?;
    same!(why.kind(), ErrorKind::NotFound);
    holds!(why.message().contains(&port.to_string()), "{why}");
    same!(why.sandbox(), Some(sandbox.id()));
    same!(forward.stats().refused, 1);
    let Some(_service) = echo(cx, &sandbox, port).await? else { return Ok(()) };
    same!(ask(forward.local_addr(), b"b").await?, b"b|1");
    Ok(())
}

async fn what_is_broken_off_is_no_end(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    // Breaks the first connection off, and prints how the second ends.
    let text = r#"
        use Socket; $| = 1; socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
        bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die; listen($l, 5) or die;
        my ($port) = unpack_sockaddr_in(getsockname($l)); print "$port\n";
        accept(my $first, $l); syswrite($first, "half of"); sysread($first, my $go, 1);
        setsockopt($first, SOL_SOCKET, SO_LINGER, pack("ii", 1, 0)); close($first);
        accept(my $second, $l); sysread($second, my $piece, 100);
        my $n = sysread($second, $piece, 100);
        open(my $f, ">", "ended.part"); syswrite($f, defined $n ? "end" : "broken: $!"); close($f);
        rename("ended.part", "ended");
    "#;
    let Some(service) = serve(cx, &sandbox, &[text]).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let mut first = TcpStream::connect(forward.local_addr()).await?;
    same!(word(&mut first, 7).await?, "half of");
    first.write_all(b"!").await?;
    holds!(is_broken_off(first).await?, "the service broke it off");
    let mut second = TcpStream::connect(forward.local_addr()).await?;
    second.write_all(b"half of").await?;
    until("a connection", || forward.stats().carried == 2).await?;
    // What was said has time to arrive: a reset may overtake it.
    tokio::time::sleep(Duration::from_millis(300)).await;
    second.set_zero_linger()?;
    drop(second);
    let text = "until [ -e ended ]; do sleep 0.02; done; cat ended";
    let ended = soon("its end", cx.sh(&sandbox, text)).await??;
    holds!(ended.starts_with("broken: "), "the client broke it off: {ended}");
    Ok(())
}

async fn only_the_sandboxs_own_ports_are_reached(cx: &Context) -> Check {
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(ANY)).await?;
    let port = listener.local_addr()?.port();
    let sandbox = cx.manager.create(cx.request().network(Network::Deny), &cx.sink).await?;
    let mut forward = open(cx, &sandbox, port).await?;
    holds!(is_refused(forward.local_addr()).await?, "this host's ports are not the sandbox's");
    let why = soon("why", forward.refused()).await?.ok_or("it ended")?;
    same!(why.kind(), ErrorKind::NotFound);
    // The control: somebody listens here.
    let _socket = TcpStream::connect(listener.local_addr()?).await?;
    soon("a connection", listener.accept()).await??;
    Ok(())
}

async fn in_the_hosts_network_the_hosts_ports_are_reached(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().network(Network::Host), &cx.sink).await?;
    let here = std::fs::read_link("/proc/self/ns/net")?;
    if cx.sh(&sandbox, "readlink /proc/self/ns/net").await? != here.to_string_lossy() {
        left_out::<()>("its host's network is another than this process's");
        return Ok(());
    }
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(ANY)).await?;
    let forward = open(cx, &sandbox, listener.local_addr()?.port()).await?;
    let mut socket = TcpStream::connect(forward.local_addr()).await?;
    let (mut accepted, _) = soon("a connection", listener.accept()).await??;
    accepted.write_all(b"here").await?;
    same!(word(&mut socket, 4).await?, "here");
    Ok(())
}

async fn a_snapshot_breaks_no_connection_off(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let mut socket = TcpStream::connect(forward.local_addr()).await?;
    socket.write_all(b"before").await?;
    same!(word(&mut socket, 6).await?, "before");
    sandbox.snapshot("meanwhile", &cx.sink).await?;
    socket.write_all(b"after").await?;
    same!(word(&mut socket, 5).await?, "after");
    same!(ask(forward.local_addr(), b"new").await?, b"new|3");
    Ok(())
}

async fn a_forward_outlives_rewinds_and_stops(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let snapshot = sandbox.snapshot("before", &cx.sink).await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let port = service.port;
    let mut forward = open(cx, &sandbox, port).await?;
    let mut socket = TcpStream::connect(forward.local_addr()).await?;
    socket.write_all(b"before").await?;
    same!(word(&mut socket, 6).await?, "before");
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    holds!(is_broken_off(socket).await?, "its service has ended with the old instance");
    drop(service);
    let Some(service) = echo(cx, &sandbox, port).await? else { return Ok(()) };
    same!(ask(forward.local_addr(), b"after").await?, b"after|5");
    if cx.has(Feature::Stop) {
        sandbox.stop(&cx.sink).await?;
        drop(service);
        holds!(is_refused(forward.local_addr()).await?, "it is stopped");
        same!(soon("why", forward.refused()).await?.ok_or("it ended")?.kind(), ErrorKind::Conflict);
        sandbox.start(&cx.sink).await?;
        let Some(_service) = echo(cx, &sandbox, port).await? else { return Ok(()) };
        same!(ask(forward.local_addr(), b"again").await?, b"again|5");
    }
    Ok(())
}

async fn a_forward_outlives_a_connection_that_is_cut(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let cutting = Decorated::new(Arc::clone(&cx.backend), Cutting::default());
    let backend: Arc<dyn sandbox_core::SandboxBackend> = cutting.clone();
    let manager = cx.manager_with(backend).await?;
    let cut = manager.open(sandbox.id().as_str()).await?;
    let forward = open(cx, &cut, service.port).await?;
    for n in 1..=3 {
        let mut socket = TcpStream::connect(forward.local_addr()).await?;
        socket.write_all(b"before").await?;
        same!(word(&mut socket, 6).await?, "before");
        cutting.decoration().cut();
        holds!(is_broken_off(socket).await?, "what was not carried to its end is broken off");
        same!(ask(forward.local_addr(), b"after").await?, b"after|5");
        same!(forward.stats().carried, n * 2);
    }
    same!(forward.stats().refused, 0);
    Ok(())
}

/// Nobody listens there any more. Whatever this process is starting just now has its sockets a moment longer.
async fn is_closed(to: SocketAddr) -> Check {
    let closed = async {
        while TcpStream::connect(to).await.is_ok() {
            pause().await;
        }
    };
    soon("the port to be closed", closed).await
}

async fn dropping_it_closes_all(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let forward = open(cx, &sandbox, service.port).await?;
    let to = forward.local_addr();
    let mut socket = TcpStream::connect(to).await?;
    socket.write_all(b"hello").await?;
    same!(word(&mut socket, 5).await?, "hello");
    drop(forward);
    holds!(is_broken_off(socket).await?, "what is open is broken off");
    is_closed(to).await?;
    // Inside too: nothing is left of it but the listener.
    let left = format!("grep -ci '0100007F:{:04X} .* 01 ' /proc/net/tcp || :", service.port);
    let text = format!("until [ \"$({left})\" = 0 ]; do sleep 0.02; done");
    soon("the end of all connections inside", cx.sh(&sandbox, &text)).await??;
    let again = sandbox.forward(to, service.port, &cx.sink).await?;
    same!(again.local_addr(), to);
    same!(ask(to, b"again").await?, b"again|5");
    Ok(())
}

async fn it_ends_with_the_sandbox(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let Some(service) = echo(cx, &sandbox, 0).await? else { return Ok(()) };
    let mut forward = open(cx, &sandbox, service.port).await?;
    let socket = TcpStream::connect(forward.local_addr()).await?;
    // By another manager, as another process would.
    let other = cx.another_manager().await?.open(sandbox.id().as_str()).await?;
    other.destroy(&cx.sink).await?;
    let why = soon("its end", forward.ended()).await?;
    same!(why.kind(), ErrorKind::Lost);
    same!(why.sandbox(), Some(sandbox.id()));
    holds!(soon("its end", forward.refused()).await?.is_none(), "there is nothing more");
    is_broken_off(socket).await?;
    is_closed(forward.local_addr()).await?;
    Ok(())
}

async fn it_is_in_the_history(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let forward = open(cx, &sandbox, 8080).await?;
    let history = cx.manager.history(sandbox.id(), 3).await?;
    let [event] = history.as_slice() else {
        return Err(format!("the history is {history:?}").into());
    };
    same!(event.name(), "port_forwarded");
    let local = forward.local_addr();
    same!(event.known(), Some(&Known::PortForwarded { port: 8080, local }));
    same!(cx.sink.events().last(), Some(event));
    Ok(())
}

async fn what_cannot_be_forwarded_says_why(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let kind = async |local: ([u8; 4], u16), port| {
        Check::Ok(error_of(sandbox.forward(local, port, &cx.sink).await)?.kind())
    };
    same!(kind(ANY, 0).await?, ErrorKind::InvalidSpec);
    for elsewhere in [[0, 0, 0, 0], [192, 0, 2, 1]] {
        same!(kind((elsewhere, 0), 80).await?, ErrorKind::InvalidSpec);
    }
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(ANY)).await?;
    let used = listener.local_addr()?;
    let error = error_of(sandbox.forward(used, 80, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Conflict);
    holds!(error.message().contains(&used.to_string()), "{error}");
    if cx.has(Feature::Stop) {
        sandbox.stop(&cx.sink).await?;
        same!(kind(ANY, 80).await?, ErrorKind::Conflict);
    }
    let before = cx.kinds(&sandbox).await?;
    holds!(!before.iter().any(|kind| kind == "port_forwarded"), "nothing was opened: {before:?}");
    sandbox.destroy(&cx.sink).await?;
    same!(kind(ANY, 80).await?, ErrorKind::Lost);
    Ok(())
}
