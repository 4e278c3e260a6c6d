//! Connections and their requests. A client may send what it likes: it can end only its own connection.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sandbox_guest::{
    Done, EgressRequest, Failure, FailureKind, FileRequest, Hello, Request, Response, Welcome,
    frame::{self, Frame},
    mux::{self, Alive, Stream},
    preamble,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{UnixListener, UnixStream, unix::pipe},
    sync::Semaphore,
};

use super::{
    attach,
    base::{failure, lock},
    deadline, egress, exec, files, forward, freeze,
    guest::Guest,
    sys::Pid,
    transfer, tree_transfer, usage, watch,
};

/// How many connections there may be at once.
const MAX_CONNECTIONS: usize = 256;

/// How long a client may take for its preamble.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the streams of one connection share.
struct Connection {
    guest: Arc<Guest>,
    number: u64,
    alive: Alive,
    greeted: AtomicBool,
}

/// Serves everyone who connects, for ever.
pub(crate) async fn listen(guest: Arc<Guest>, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((socket, _)) => {
                let guest = Arc::clone(&guest);
                tokio::spawn(async move {
                    let _ = accepted(guest, socket).await;
                    drop(place);
                });
            }
            // Out of descriptors, most likely: some will come back.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Serves one who connected, if it may.
async fn accepted(guest: Arc<Guest>, socket: UnixStream) -> io::Result<()> {
    let peer = socket.peer_cred()?;
    if guest.listen_peer.is_some_and(|uid| uid != peer.uid()) {
        return Ok(());
    }
    // Somebody of another process id namespace has no number here.
    let bridge = peer.pid().filter(|pid| guest.alone && *pid > 0);
    let _bridge = bridge.map(|pid| Bridge::new(&guest, pid));
    connection(guest, socket).await
}

/// Serves the one connection that comes in through a pipe and goes out through another.
pub(crate) async fn pipes(guest: Arc<Guest>, from: pipe::Receiver, to: pipe::Sender) {
    let _ = connection(guest, tokio::io::join(from, to)).await;
}

/// A process that carries a connection in, for as long as it does.
struct Bridge {
    guest: Arc<Guest>,
    pid: Pid,
}

impl Bridge {
    fn new(guest: &Arc<Guest>, pid: Pid) -> Self {
        lock(&guest.bridges).insert(pid);
        Self { guest: Arc::clone(guest), pid }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        lock(&self.guest.bridges).remove(&self.pid);
    }
}

async fn connection<S>(guest: Arc<Guest>, mut socket: S) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    tokio::time::timeout(PATIENCE, preamble::exchange(&mut socket)).await??;
    let mut incoming = mux::server(socket);
    let greeted = AtomicBool::new(false);
    let connection = Arc::new(Connection { guest, number, alive: incoming.alive(), greeted });
    while let Some(stream) = incoming.accept().await {
        let connection = Arc::clone(&connection);
        tokio::spawn(async move {
            let _ = connection.request(stream).await;
        });
    }
    freeze::thaw_of(&connection.guest, number);
    Ok(())
}

impl Connection {
    async fn request(&self, mut stream: Stream) -> io::Result<()> {
        let Some(Frame::Message(message)) = frame::read(&mut stream).await? else {
            return Ok(());
        };
        let request = match frame::decode(&message) {
            Ok(request) => request,
            Err(error) => {
                let message = format!("the guest does not understand this request: {error}");
                let failure = failure(FailureKind::Unsupported, message);
                return answer(stream, Err(failure)).await;
            }
        };
        drop(message);
        if !self.greeted.load(Ordering::Relaxed) && !matches!(request, Request::Hello(_)) {
            let failure = failure(FailureKind::Invalid, "the first request must be a greeting");
            return answer(stream, Err(failure)).await;
        }
        self.handle(request, stream).await
    }

    async fn handle(&self, request: Request, stream: Stream) -> io::Result<()> {
        let guest = &self.guest;
        // That somebody is there is no use of the sandbox.
        let looks = matches!(request, Request::Hello(_) | Request::Status);
        if !looks && !matches!(request, Request::Deadline { .. }) {
            guest.touch();
        }
        let result = match request {
            Request::Hello(hello) => self.greet(&hello),
            Request::Start(start) => {
                return match exec::start(guest, start, stream, &self.alive).await {
                    Ok(result) => result,
                    Err((failure, stream)) => answer(stream, Err(failure)).await,
                };
            }
            Request::Attach { process, stdout, stderr } => {
                let found = lock(&guest.table).find(&process);
                match found {
                    Ok(process) => {
                        let offsets = (stdout, stderr);
                        return attach::serve(guest, process, stream, offsets, &self.alive).await;
                    }
                    Err(failure) => Err(failure),
                }
            }
            Request::Signal { process, signal, tree } => {
                exec::signal(guest, &process, signal, tree)
            }
            Request::Kill { process } => exec::kill(guest, &process).await,
            Request::Wait { process } => return self.wait(&process, stream).await,
            Request::Forget { process } => exec::forget(guest, &process),
            Request::Processes => Ok(Response::Processes(lock(&guest.table).list())),
            Request::Status => Ok(Response::Status(usage::status(guest).await)),
            Request::Freeze => freeze::freeze(guest, self.number).await,
            Request::Thaw => freeze::thaw(guest),
            Request::File(file) => return self.file(file, stream).await,
            Request::Connect { port } => match forward::connect(guest, port).await {
                Ok(carried) => return carried.serve(stream).await,
                Err(failure) => Err(failure),
            },
            Request::Deadline { expires_at, lease_until } => {
                guest.deadlines.send_modify(|now| now.set(expires_at, lease_until));
                Ok(Response::Done(Done::default()))
            }
            Request::Egress(request) => return self.egress(request, stream).await,
            Request::Shutdown => {
                let sent = answer(stream, Ok(Response::Done(Done::default())));
                let _ = tokio::time::timeout(Duration::from_secs(1), sent).await;
                deadline::shut_down(guest).await
            }
            _ => {
                let message = "the guest does not know this request";
                Err(failure(FailureKind::Unsupported, message))
            }
        };
        answer(stream, result).await
    }

    async fn wait(&self, process: &str, stream: Stream) -> io::Result<()> {
        let (mut reader, writer) = tokio::io::split(stream);
        let result = tokio::select! {
            result = exec::wait(&self.guest, process) => result,
            // Nobody says anything here: it is the client's end.
            _ = frame::read(&mut reader) => return Ok(()),
        };
        answer(reader.unsplit(writer), result).await
    }

    async fn egress(&self, request: EgressRequest, mut stream: Stream) -> io::Result<()> {
        let result = match request {
            EgressRequest::Serve => egress::serve(&self.guest.egress, &mut stream).await?,
            EgressRequest::Connected { id } => {
                let Some(back) = egress::connected(&self.guest.egress, id, stream) else {
                    return Ok(());
                };
                stream = back;
                let message = "nobody waits for this connection any more";
                Err(failure(FailureKind::NotFound, message))
            }
            EgressRequest::Refused { id, denied, reason } => {
                Ok(egress::refused(&self.guest.egress, id, denied, reason))
            }
            _ => Err(failure(FailureKind::Unsupported, "the guest does not know this request")),
        };
        answer(stream, result).await
    }

    fn greet(&self, hello: &Hello) -> Result<Response, Failure> {
        let guest = &self.guest;
        if hello.instance != guest.instance {
            let message = format!(
                "this is the instance {:?}, not {:?}, which was meant",
                guest.instance, hello.instance
            );
            return Err(failure(FailureKind::WrongInstance, message));
        }
        self.greeted.store(true, Ordering::Relaxed);
        Ok(Response::Welcome(Welcome {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: guest.instance.clone(),
            arch: std::env::consts::ARCH.to_owned(),
            workspace: guest.workspace.clone().into_bytes().into(),
        }))
    }

    async fn file(&self, request: FileRequest, mut stream: Stream) -> io::Result<()> {
        let guest = &self.guest;
        let result = match request {
            FileRequest::Read { path, offset, length } => {
                transfer::read(guest, &path, offset, length, &mut stream).await?
            }
            FileRequest::Write { path, mode, append, parents } => {
                let options = transfer::WriteOptions { mode, append, parents };
                transfer::write(guest, &path, options, &mut stream).await?
            }
            FileRequest::Download { path, skip_special } => {
                tree_transfer::download(guest, &path, skip_special, &mut stream).await?
            }
            FileRequest::Upload { path, existing } => {
                tree_transfer::upload(guest, &path, existing, &mut stream).await?
            }
            FileRequest::Watch { path, recursive } => {
                watch::watch(guest, &path, recursive, &mut stream).await?
            }
            FileRequest::List { path } => files::list(guest, &path, &mut stream).await?,
            other => files::simple(guest, other).await,
        };
        answer(stream, result).await
    }
}

/// Sends the last message of a stream, and waits for the client to close it: letting go before that
/// would be a reset.
async fn answer(mut stream: Stream, result: Result<Response, Failure>) -> io::Result<()> {
    let response = result.unwrap_or_else(Response::Failed);
    frame::write_message(&mut stream, &response).await?;
    stream.shutdown().await?;
    let rest = async {
        while frame::read(&mut stream).await?.is_some() {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(PATIENCE, rest).await;
    Ok(())
}
