//! What a sandbox can reach.

use std::{
    net::{TcpListener, UdpSocket},
    os::{linux::net::SocketAddrExt, unix::net},
};

use sandbox_core::{Command, Feature, Network, Sandbox};

use super::cases;
use crate::{Check, Context, context::soon, holds, same};

cases!("network";
    [NetworkDeny] a_sandbox_without_a_network_has_its_loopback_only,
    [NetworkDeny] what_listens_on_the_host_is_out_of_reach,
    [NetworkDeny] abstract_sockets_of_the_host_are_out_of_reach,
    [NetworkDeny] sandboxes_do_not_reach_each_other,
    [NetworkHost] a_sandbox_with_the_hosts_network_reaches_what_the_host_does,
    [SyscallFilter] raw_sockets_are_refused,
);

/// Whether the sandbox has this program; says so where it has not, as a part of the case is left out
/// then.
pub(super) async fn has_program(cx: &Context, sandbox: &Sandbox, program: &str) -> Check<bool> {
    let found = cx.sh(sandbox, &format!("command -v {program} || :")).await?;
    if found.is_empty() {
        #[allow(clippy::print_stderr, reason = "what is left out is never left out silently")]
        {
            eprintln!("left out: there is no {program} in this sandbox");
        }
    }
    Ok(!found.is_empty())
}

/// Connects and prints the answer; or why it cannot.
const CONNECT: &str = r#"
    use Socket; $SIG{ALRM} = sub { print "no answer\n"; exit 1 }; alarm 5;
    my ($kind, $where, $port) = @ARGV;
    my ($family, $to) = $kind eq "unix"
        ? (PF_UNIX, pack_sockaddr_un("\0$where"))
        : (PF_INET, pack_sockaddr_in($port, inet_aton($where)));
    socket(my $s, $family, $kind eq "udp" ? SOCK_DGRAM : SOCK_STREAM, 0) or die "socket: $!\n";
    connect($s, $to) or die "connect: $!\n";
    $kind ne "udp" or defined(send($s, "word\n", 0)) or die "send: $!\n";
    defined(recv($s, my $answer, 100, 0)) or die "recv: $!\n";
    print "answer: $answer";
"#;

fn connect(kind: &str, to: &str, port: u16) -> Command {
    Command::new("perl").args(["-e", CONNECT, kind, to, &port.to_string()])
}

/// The control: the same program, where nothing is in its way.
fn works_on_the_host(kind: &str, to: &str, port: u16) -> Check<bool> {
    let mut command = std::process::Command::new("perl");
    let output = command.args(["-e", CONNECT, kind, to, &port.to_string()]).output()?;
    Ok(output.stdout.starts_with(b"answer"))
}

/// Answers on the host's loopback, by TCP and UDP, as long as the process lives.
fn listen() -> Check<(u16, u16)> {
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let ports = (tcp.local_addr()?.port(), udp.local_addr()?.port());
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            let _ = std::io::Write::write_all(&mut stream, b"tcp\n");
        }
    });
    std::thread::spawn(move || {
        let mut word = [0; 100];
        while let Ok((_, from)) = udp.recv_from(&mut word) {
            let _ = udp.send_to(b"udp\n", from);
        }
    });
    Ok(ports)
}

async fn a_sandbox_without_a_network_has_its_loopback_only(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().network(Network::Deny), &cx.sink).await?;
    let interfaces = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '";
    same!(cx.sh(&sandbox, interfaces).await?, "lo");
    same!(cx.sh(&sandbox, "tail -n +2 /proc/net/route").await?, "");
    let here = std::fs::read_to_string("/proc/net/dev")?;
    if cx.has(Feature::NetworkHost) && here.lines().count() > 3 {
        let host = cx.manager.create(cx.request().network(Network::Host), &cx.sink).await?;
        holds!(cx.sh(&host, interfaces).await?.lines().count() > 1, "with one it has more");
    }
    // Its own loopback works.
    if has_program(cx, &sandbox, "perl").await? {
        let text = r#"
            use Socket;
            socket(my $l, PF_INET, SOCK_STREAM, 0) or die;
            bind($l, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die "bind: $!"; listen($l, 1) or die;
            my ($port) = unpack_sockaddr_in(getsockname($l));
            if (!fork) { accept(my $c, $l); print $c "own\n"; exit }
            socket(my $s, PF_INET, SOCK_STREAM, 0) or die;
            connect($s, pack_sockaddr_in($port, INADDR_LOOPBACK)) or die "connect: $!";
            print scalar <$s>;
        "#;
        let run = soon("the loopback", cx.run(&sandbox, Command::new("perl").args(["-e", text])))
            .await??;
        same!((run.stdout.text().as_ref(), run.stderr.text().as_ref()), ("own\n", ""));
    }
    Ok(())
}

async fn what_listens_on_the_host_is_out_of_reach(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().network(Network::Deny), &cx.sink).await?;
    if !has_program(cx, &sandbox, "perl").await? {
        return Ok(());
    }
    let (tcp, udp) = listen()?;
    for (kind, port) in [("tcp", tcp), ("udp", udp)] {
        holds!(works_on_the_host(kind, "127.0.0.1", port)?, "{kind} works on the host");
        let run =
            soon("a connection", cx.run(&sandbox, connect(kind, "127.0.0.1", port))).await??;
        holds!(!run.outcome.is_success(), "{kind}: {}", run.stdout.text());
        same!(run.stdout.total, 0);
    }
    // Addresses elsewhere have no way at all, those of name servers among them.
    for to in ["192.0.2.1", "8.8.8.8", "169.254.169.254", "10.0.0.1"] {
        for (kind, port) in [("tcp", 80), ("udp", 53)] {
            let run = soon("a connection", cx.run(&sandbox, connect(kind, to, port))).await??;
            holds!(
                run.stderr.text().contains("unreachable"),
                "{kind} to {to}: {}{}",
                run.stdout.text(),
                run.stderr.text()
            );
        }
    }
    Ok(())
}

async fn abstract_sockets_of_the_host_are_out_of_reach(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().network(Network::Deny), &cx.sink).await?;
    if !has_program(cx, &sandbox, "perl").await? {
        return Ok(());
    }
    let name = format!("conformance-{}", sandbox.id());
    let address = net::SocketAddr::from_abstract_name(&name)?;
    let listener = net::UnixListener::bind_addr(&address)?;
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = std::io::Write::write_all(&mut stream, b"abstract\n");
        }
    });
    holds!(works_on_the_host("unix", &name, 0)?, "it works on the host");
    let run = soon("a connection", cx.run(&sandbox, connect("unix", &name, 0))).await??;
    holds!(run.stderr.text().contains("refused"), "{}{}", run.stdout.text(), run.stderr.text());
    Ok(())
}

async fn sandboxes_do_not_reach_each_other(cx: &Context) -> Check {
    let request = || cx.request().network(Network::Deny);
    let one = cx.manager.create(request(), &cx.sink).await?;
    let other = cx.manager.create(request(), &cx.sink).await?;
    let text = "cat /proc/sys/kernel/random/boot_id > /dev/null; readlink /proc/self/ns/net";
    holds!(cx.sh(&one, text).await? != cx.sh(&other, text).await?, "each has its own network");
    Ok(())
}

async fn a_sandbox_with_the_hosts_network_reaches_what_the_host_does(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().network(Network::Host), &cx.sink).await?;
    if !has_program(cx, &sandbox, "perl").await? {
        return Ok(());
    }
    let (tcp, udp) = listen()?;
    for (kind, port) in [("tcp", tcp), ("udp", udp)] {
        let run =
            soon("a connection", cx.run(&sandbox, connect(kind, "127.0.0.1", port))).await??;
        same!(run.stdout.text(), format!("answer: {kind}\n"));
    }
    Ok(())
}

async fn raw_sockets_are_refused(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    if !has_program(cx, &sandbox, "perl").await? {
        return Ok(());
    }
    let open = |family: &str, kind: &str, protocol: u32| {
        let text = format!(
            "use Socket; socket(my $s, {family}, {kind}, {protocol}) or die \"$!\\n\"; print 'open'"
        );
        Command::new("perl").args(["-e", &text])
    };
    let run = cx.run(&sandbox, open("PF_INET", "SOCK_STREAM", 0)).await?;
    same!(run.stdout.text(), "open");
    // ICMP, and packets as the wire has them.
    for (family, kind, protocol) in
        [("PF_INET", "SOCK_RAW", 1), ("17", "SOCK_RAW", 768), ("17", "SOCK_DGRAM", 0)]
    {
        let run = cx.run(&sandbox, open(family, kind, protocol)).await?;
        holds!(run.stdout.total == 0 && !run.outcome.is_success(), "{family} {kind} is refused");
        holds!(run.stderr.text().contains("not permitted"), "{}", run.stderr.text());
    }
    Ok(())
}
