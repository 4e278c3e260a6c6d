//! Connections to the outside from a sandbox that has no network: an HTTP proxy on the sandbox's loopback.
//!
//! The proxy listens from when a harness first serves it. It decides nothing and connects to nothing: each
//! connection is told to the newest harness that serves, which answers with a stream or with a refusal. Where
//! none serves, connections are refused.

mod client;
mod head;

use std::{
    collections::HashMap,
    io,
    net::Ipv4Addr,
    sync::{Arc, Mutex},
};

use sandbox_guest::{Done, EgressCall, Failure, FailureKind, Response, frame, mux::Stream};
use tokio::{
    io::ReadHalf,
    net::TcpListener,
    sync::{mpsc, oneshot},
};

use super::base::{failure, lock, system};

/// How many calls a harness may have waiting for it.
const MAX_CALLS: usize = 64;

/// How many harnesses may serve at once.
const MAX_SERVERS: usize = 64;

/// What the guest knows of connections to the outside.
#[derive(Default)]
pub(crate) struct Egress(Mutex<State>);

#[derive(Default)]
struct State {
    /// Where the proxy listens, once it does.
    port: Option<u16>,
    /// Harnesses that serve, the newest last.
    servers: Vec<(u64, mpsc::Sender<EgressCall>)>,
    /// Who waits for an answer to a call, and from which server.
    waiting: HashMap<u64, (u64, oneshot::Sender<Answer>)>,
    /// The last number that was given to a server or a call.
    last: u64,
}

/// What a harness says to a call.
pub(crate) enum Answer {
    /// The connection is at the other end of this stream.
    Connected(Stream),
    /// There is none.
    Refused {
        /// It is not allowed; otherwise it could not be made.
        denied: bool,
        reason: String,
    },
}

impl Egress {
    /// Adds what tells programs of the proxy, if there is one, to an environment that says nothing itself.
    pub(crate) fn tell(&self, env: &mut HashMap<Vec<u8>, Vec<u8>>) {
        let Some(port) = lock(&self.0).port else { return };
        let proxy = format!("http://{}:{port}", Ipv4Addr::LOCALHOST);
        for (name, value) in [
            ("http_proxy", proxy.as_str()),
            ("https_proxy", &proxy),
            ("all_proxy", &proxy),
            ("no_proxy", "localhost,127.0.0.1"),
        ] {
            // Programs differ in which of the two they look at first.
            let names = [name.to_owned(), name.to_ascii_uppercase()].map(String::into_bytes);
            if !names.iter().any(|name| env.contains_key(name)) {
                env.extend(names.map(|name| (name, value.as_bytes().to_vec())));
            }
        }
    }

    /// Asks the newest harness that takes the call; `None` where there is none, or it has gone.
    async fn ask(&self, host: String, port: u16) -> Option<Answer> {
        let (id, answer) = {
            let mut state = lock(&self.0);
            state.last += 1;
            let id = state.last;
            let call = EgressCall { id, host, port };
            let mut servers = state.servers.iter().rev();
            let (server, _) = servers.find(|(_, calls)| calls.try_send(call.clone()).is_ok())?;
            let server = *server;
            let (sender, answer) = oneshot::channel();
            state.waiting.insert(id, (server, sender));
            (id, answer)
        };
        let _waiting = Waiting(self, id);
        answer.await.ok()
    }

    /// Hands an answer to whoever waits for it; gives it back if nobody does.
    fn answer(&self, id: u64, answer: Answer) -> Option<Answer> {
        let waiting = lock(&self.0).waiting.remove(&id);
        match waiting {
            Some((_, waiting)) => waiting.send(answer).err(),
            None => Some(answer),
        }
    }

    fn begin(&self, calls: mpsc::Sender<EgressCall>) -> Option<Serving<'_>> {
        let mut state = lock(&self.0);
        if state.servers.len() >= MAX_SERVERS {
            return None;
        }
        state.last += 1;
        let number = state.last;
        state.servers.push((number, calls));
        Some(Serving(self, number))
    }
}

/// A call that is waited for.
struct Waiting<'a>(&'a Egress, u64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).waiting.remove(&self.1);
    }
}

/// A harness that serves.
struct Serving<'a>(&'a Egress, u64);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.servers.retain(|(number, _)| *number != self.1);
        // It answers nothing any more.
        state.waiting.retain(|_, (server, _)| *server != self.1);
    }
}

/// Tells a harness of connections until it lets go. What is returned is the last message.
pub(crate) async fn serve(
    egress: &Arc<Egress>,
    stream: &mut Stream,
) -> io::Result<Result<Response, Failure>> {
    if let Err(error) = listen(egress).await {
        return Ok(Err(system("cannot listen on the sandbox's loopback", &error)));
    }
    let (sender, mut calls) = mpsc::channel(MAX_CALLS);
    let Some(_serving) = egress.begin(sender) else {
        let message = format!("{MAX_SERVERS} harnesses serve already, which is the limit");
        return Ok(Err(failure(FailureKind::LimitExceeded, message)));
    };
    frame::write_message(stream, &Response::Done(Done::default())).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let tell = async {
        while let Some(call) = calls.recv().await {
            frame::write_message(&mut writer, &Response::Egress(call)).await?;
        }
        io::Result::Ok(())
    };
    tokio::select! {
        // The harness says nothing more: it lets go.
        () = until_closed(&mut reader) => {}
        told = tell => told?,
    }
    Ok(Ok(Response::Done(Done::default())))
}

async fn until_closed(reader: &mut ReadHalf<&mut Stream>) {
    while let Ok(Some(_)) = frame::read(reader).await {}
}

/// A connection was made: whoever asked for it gets the stream. If nobody does any more, it is given back.
pub(crate) fn connected(egress: &Egress, id: u64, stream: Stream) -> Option<Stream> {
    match egress.answer(id, Answer::Connected(stream)) {
        Some(Answer::Connected(stream)) => Some(stream),
        _ => None,
    }
}

/// A connection was refused.
pub(crate) fn refused(egress: &Egress, id: u64, denied: bool, reason: String) -> Response {
    egress.answer(id, Answer::Refused { denied, reason });
    Response::Done(Done::default())
}

/// Makes sure that the proxy listens.
async fn listen(egress: &Arc<Egress>) -> io::Result<()> {
    if lock(&egress.0).port.is_some() {
        return Ok(());
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    // Of two that came at once, the first has it.
    if lock(&egress.0).port.get_or_insert(port) == &port {
        tokio::spawn(client::accept(Arc::clone(egress), listener));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(port: Option<u16>, own: &[(&str, &str)]) -> HashMap<String, String> {
        let egress = Egress::default();
        lock(&egress.0).port = port;
        let bytes = |text: &str| text.as_bytes().to_vec();
        let mut env = own.iter().map(|(name, value)| (bytes(name), bytes(value))).collect();
        egress.tell(&mut env);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        env.into_iter().map(|(name, value)| (text(name), text(value))).collect()
    }

    #[test]
    fn programs_are_told_of_the_proxy_unless_they_were_told_of_another() {
        assert!(environment(None, &[]).is_empty());
        let all = environment(Some(8080), &[]);
        assert_eq!(all.len(), 8);
        assert_eq!(all["HTTPS_PROXY"], "http://127.0.0.1:8080");
        assert_eq!(all["no_proxy"], "localhost,127.0.0.1");
        let some = environment(Some(8080), &[("https_proxy", "http://other:1")]);
        assert_eq!(some["https_proxy"], "http://other:1");
        assert!(!some.contains_key("HTTPS_PROXY"));
        assert_eq!(some["http_proxy"], "http://127.0.0.1:8080");
    }

    #[tokio::test]
    async fn the_newest_that_serves_is_asked() {
        let egress = Egress::default();
        let asked = async |egress: &Egress| egress.ask("h".into(), 1).await.is_some();
        assert!(!asked(&egress).await, "where nobody serves, nothing waits");
        let (sender, mut older) = mpsc::channel(1);
        let _older = egress.begin(sender);
        let (sender, mut newer) = mpsc::channel(1);
        let newest = egress.begin(sender);
        let refuse = |call: EgressCall| {
            let refused = Answer::Refused { denied: true, reason: String::new() };
            assert!(egress.answer(call.id, refused).is_none());
        };
        let (answered, ()) =
            tokio::join!(asked(&egress), async { refuse(newer.recv().await.unwrap()) });
        assert!(answered && older.try_recv().is_err());
        drop(newest);
        let (answered, ()) =
            tokio::join!(asked(&egress), async { refuse(older.recv().await.unwrap()) });
        assert!(answered);
        // Whoever waits for one that goes hears of it.
        let (sender, mut gone) = mpsc::channel(1);
        let serving = egress.begin(sender);
        let (answered, ()) = tokio::join!(asked(&egress), async {
            gone.recv().await.unwrap();
            drop(serving);
        });
        assert!(!answered);
        assert!(lock(&egress.0).waiting.is_empty());
        // What nobody waits for is given back.
        let late = Answer::Refused { denied: true, reason: String::new() };
        assert!(egress.answer(99, late).is_some());
    }
}
