//! Answering a guest that asks for connections. What it says is hostile.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use sandbox_guest::{
    EgressCall, EgressRequest, Request, Response, carry,
    frame::{self, Channel},
    mux::{Mux, Stream},
};
use tokio::{net::TcpStream, sync::Semaphore, task::JoinSet};

use super::{Allowed, Rules, address};
use crate::{Result, guest};

/// How many connections of a sandbox there may be at once; a further one waits.
const MAX_CONNECTIONS: usize = 128;

/// How many names may be looked up at once: a lookup holds a thread.
const MAX_LOOKUPS: usize = 8;

/// How long a name's lookup may take, and then each of its addresses.
const CONNECT: Duration = Duration::from_secs(10);

/// How many of a name's addresses are tried.
const MAX_ADDRESSES: usize = 4;

/// How long a connection may be quiet.
const IDLE: Duration = Duration::from_secs(15 * 60);

/// Who is told of each connection, before it is made.
#[async_trait]
pub(crate) trait Told: Send + Sync + 'static {
    /// One that is allowed; what stands against it all the same is an error.
    async fn allowed(&self, what: &Allowed) -> Result<()>;

    /// One that is not, and why.
    async fn denied(&self, host: &str, port: u16, reason: &str);

    /// The guest does not ask any more: the connection to it was cut.
    fn cut(&self);
}

/// What a call comes to.
enum Verdict {
    Connected(TcpStream),
    /// Not allowed.
    Denied(String),
    /// Could not be made.
    Failed(String),
}

/// A connection that was made. What was cut must not look like its end.
struct Connection {
    socket: TcpStream,
    ended: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.socket.set_zero_linger();
        }
    }
}

/// Answers a guest's calls, which come on this stream, until it is cut.
pub(crate) async fn serve(mux: Mux, mut calls: Stream, rules: Rules, told: Arc<dyn Told>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
    // Those that are under way end with this.
    let mut connections = JoinSet::new();
    loop {
        // Taken before it is asked what for: a guest that asks for more waits.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let call = match guest::response(&mut calls).await {
            Ok(Response::Egress(call)) => call,
            Ok(_) => return,
            Err(error) => {
                tracing::debug!(%error, "connections to the outside are served no more");
                return told.cut();
            }
        };
        let (mux, rules, lookups) = (mux.clone(), rules.clone(), Arc::clone(&lookups));
        let told = Arc::clone(&told);
        connections.spawn(async move {
            let id = call.id;
            let verdict = decide(&call, &rules, &*told, &lookups).await;
            if let Err(error) = answer(&mux, id, verdict).await {
                tracing::debug!(%error, "a connection to the outside was cut");
            }
            drop(place);
        });
    }
}

async fn decide(call: &EgressCall, rules: &Rules, told: &dyn Told, lookups: &Semaphore) -> Verdict {
    let deny = async |reason: &str| {
        told.denied(&call.host, call.port, reason).await;
        Verdict::Denied(format!("{} to port {} is not allowed: {reason}", call.host, call.port))
    };
    let Some(allowed) = rules.allow(&call.host, call.port) else {
        return deny("no pattern of this sandbox's egress list names it").await;
    };
    let to = format!("{}:{}", allowed.host, allowed.port);
    let addresses = match look_up(&allowed, lookups).await {
        Ok(addresses) => addresses,
        Err(error) => return Verdict::Failed(format!("{to}: its address is not known: {error}")),
    };
    let public = |to: &SocketAddr| allowed.literal.is_some() || address::is_public(to.ip());
    // Connected to is what was looked at here: whoever answers for a name is not asked again.
    let addresses: Vec<_> = addresses.into_iter().filter(public).take(MAX_ADDRESSES).collect();
    if addresses.is_empty() {
        return deny("its name stands for no address of the public internet").await;
    }
    if let Err(error) = told.allowed(&allowed).await {
        return Verdict::Denied(format!("{to}: it could not be recorded: {}", error.message()));
    }
    match connect(&addresses).await {
        Ok(socket) => Verdict::Connected(socket),
        Err(error) => Verdict::Failed(format!("{to}: {error}")),
    }
}

async fn look_up(allowed: &Allowed, lookups: &Semaphore) -> io::Result<Vec<SocketAddr>> {
    if let Some(address) = allowed.literal {
        return Ok(vec![SocketAddr::new(address, allowed.port)]);
    }
    let looked = async {
        let _place = lookups.acquire().await.map_err(io::Error::other)?;
        let found = tokio::net::lookup_host((allowed.host.as_str(), allowed.port)).await?;
        Ok(found.collect())
    };
    within(looked).await
}

async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        match within(TcpStream::connect(address)).await {
            Ok(socket) => {
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn within<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(CONNECT, work)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Tells the guest, and carries the connection if there is one.
async fn answer(mux: &Mux, id: u64, verdict: Verdict) -> io::Result<()> {
    let mut stream = mux.open().await?;
    let (denied, reason) = match verdict {
        Verdict::Connected(socket) => {
            let mut connection = Connection { socket, ended: false };
            let connected = Request::Egress(EgressRequest::Connected { id });
            frame::write_message(&mut stream, &connected).await?;
            carry(&mut connection.socket, stream, Channel::In, IDLE).await?;
            connection.ended = true;
            return Ok(());
        }
        Verdict::Denied(reason) => (true, reason),
        Verdict::Failed(reason) => (false, reason),
    };
    let refused = Request::Egress(EgressRequest::Refused { id, denied, reason });
    frame::write_message(&mut stream, &refused).await?;
    let answered = guest::answered(guest::response(&mut stream));
    answered.await.map(drop).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Error, ErrorKind};

    #[derive(Default)]
    struct Notes {
        notes: Mutex<Vec<String>>,
        full: bool,
    }

    #[async_trait]
    impl Told for Notes {
        async fn allowed(&self, what: &Allowed) -> Result<()> {
            if self.full {
                return Err(Error::new(ErrorKind::Journal, "append", "the disk is full"));
            }
            self.notes.lock().unwrap().push(format!("allowed {}:{}", what.host, what.port));
            Ok(())
        }

        async fn denied(&self, host: &str, port: u16, reason: &str) {
            self.notes.lock().unwrap().push(format!("denied {host}:{port}: {reason}"));
        }

        fn cut(&self) {}
    }

    async fn decided(pattern: &str, host: &str, port: u16, told: &Notes) -> Verdict {
        let rules = Rules::parse(&[pattern.to_owned()]).unwrap();
        let call = EgressCall { id: 1, host: host.to_owned(), port };
        decide(&call, &rules, told, &Semaphore::new(1)).await
    }

    #[tokio::test]
    async fn a_name_that_stands_for_this_host_is_denied_and_its_address_is_not() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let told = Notes::default();
        // The control: the address itself, named as such.
        let pattern = format!("127.0.0.1:{port}");
        let connected = decided(&pattern, "127.0.0.1", port, &told).await;
        assert!(matches!(connected, Verdict::Connected(_)));
        // The same place by a name, which whoever answers for the name chooses.
        let pattern = format!("localhost:{port}");
        let denied = decided(&pattern, "localhost", port, &told).await;
        assert!(matches!(denied, Verdict::Denied(reason) if reason.contains("public internet")));
        let notes = told.notes.into_inner().unwrap();
        assert_eq!(notes[0], format!("allowed 127.0.0.1:{port}"));
        assert!(notes[1].starts_with(&format!("denied localhost:{port}")), "{notes:?}");
    }

    #[tokio::test]
    async fn what_cannot_be_recorded_is_not_done() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let told = Notes { full: true, ..Notes::default() };
        let verdict = decided(&format!("127.0.0.1:{port}"), "127.0.0.1", port, &told).await;
        assert!(matches!(verdict, Verdict::Denied(reason) if reason.contains("the disk is full")));
        let accepted = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(accepted.is_err(), "nothing has connected");
    }

    #[tokio::test]
    async fn what_is_not_there_has_failed_and_was_told() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let told = Notes::default();
        let verdict = decided(&format!("127.0.0.1:{port}"), "127.0.0.1", port, &told).await;
        assert!(matches!(verdict, Verdict::Failed(reason) if reason.contains("refused")));
        assert_eq!(told.notes.into_inner().unwrap().len(), 1);
    }

    #[test]
    fn what_a_pattern_names_is_what_is_connected_to() {
        let rules = Rules::parse(&["[::1]:80".to_owned()]).unwrap();
        let allowed = rules.allow("0:0:0:0:0:0:0:1", 80).unwrap();
        assert_eq!(allowed.literal, Some(std::net::Ipv6Addr::LOCALHOST.into()));
    }
}
