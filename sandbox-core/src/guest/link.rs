//! A connection to one instance's guest.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandbox_guest::{
    EgressRequest, Failure, FailureKind, Hello, Request, Response, Welcome,
    frame::{self, Frame},
    mux::{self, Mux, Stream},
    preamble,
};

use tokio::{io::AsyncRead, task::AbortHandle};

use crate::{
    Error, ErrorKind, GuestStream, InstanceId, Result,
    egress::{self, Rules, Told},
};

/// How long a guest may take to answer when it is first spoken to: it may be setting itself up.
const GREETING: Duration = Duration::from_secs(30);

/// How long it may take to answer a request that is not a wait by nature.
const ANSWER: Duration = Duration::from_secs(30);

/// A connection to one instance's guest. The connection ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    mux: Mux,
    instance: InstanceId,
    /// What answers the guest that asks for connections to the outside.
    egress: Mutex<Option<AbortHandle>>,
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(serving) = &*self.egress.lock().unwrap_or_else(PoisonError::into_inner) {
            serving.abort();
        }
    }
}

impl Link {
    /// Greets the guest at the other end, and makes sure that it is the one that is meant.
    pub(crate) async fn connect(mut stream: GuestStream, instance: &InstanceId) -> Result<Self> {
        let greet = async {
            preamble::exchange(&mut stream).await.map_err(broken)?;
            let (mux, instance) = (mux::client(stream), instance.clone());
            let link = Self { mux, instance, egress: Mutex::default() };
            link.greet().await?;
            Ok(link)
        };
        match tokio::time::timeout(GREETING, greet).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                "connect",
                format!("the guest did not answer within {} s", GREETING.as_secs()),
            )),
        }
    }

    /// Greets the guest, which answers if it is the one that is meant. May be done again, to see whether it
    /// is still there.
    pub(crate) async fn greet(&self) -> Result<()> {
        let hello = Hello {
            client: concat!("sandbox-core ", env!("CARGO_PKG_VERSION")).into(),
            instance: self.instance.to_string(),
        };
        match self.call(Request::Hello(hello)).await? {
            Response::Welcome(Welcome { .. }) => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn instance(&self) -> &InstanceId {
        &self.instance
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.mux.is_closed()
    }

    /// A stream with this request on it.
    pub(crate) async fn open(&self, request: Request) -> Result<Stream> {
        let mut stream = self.mux.open().await.map_err(broken)?;
        frame::write_message(&mut stream, &request).await.map_err(broken)?;
        self.mux.kick();
        Ok(stream)
    }

    /// Lets the sandbox's processes connect to where these rules allow it, as long as this connection lives.
    pub(crate) async fn serve_egress(&self, rules: Rules, told: Arc<dyn Told>) -> Result<()> {
        let stream = answered(async {
            let mut stream = self.open(Request::Egress(EgressRequest::Serve)).await?;
            match response(&mut stream).await? {
                Response::Done(_) => Ok(stream),
                other => Err(unexpected(&other)),
            }
        });
        let serving = tokio::spawn(egress::serve(self.mux.clone(), stream.await?, rules, told));
        let mut slot = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = slot.replace(serving.abort_handle()) {
            before.abort();
        }
        Ok(())
    }

    /// A request with a single answer, within a bounded time.
    pub(crate) async fn call(&self, request: Request) -> Result<Response> {
        answered(async {
            let mut stream = self.open(request).await?;
            response(&mut stream).await
        })
        .await
    }
}

/// What a guest answers at once, within a bounded time.
pub(crate) async fn answered<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    answered_within(ANSWER, answer).await
}

/// What a guest answers within a time.
pub(crate) async fn answered_within<T>(
    time: Duration,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(time, answer).await {
        Ok(result) => result,
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            "guest request",
            format!("the guest did not answer within {} s", time.as_secs()),
        )),
    }
}

/// The next message of a stream; a failure is an error.
pub(crate) async fn response<R: AsyncRead + Unpin>(stream: &mut R) -> Result<Response> {
    match frame::read(stream).await.map_err(broken)? {
        Some(Frame::Message(payload)) => match frame::decode(&payload).map_err(garbage)? {
            Response::Failed(failure) => Err(failed(failure)),
            response => Ok(response),
        },
        Some(Frame::Data(..)) => {
            Err(Error::new(ErrorKind::Guest, "guest request", "data where an answer belongs"))
        }
        None => Err(broken(std::io::ErrorKind::UnexpectedEof.into())),
    }
}

/// What a failure of the guest's is to a caller.
pub(crate) fn failed(failure: Failure) -> Error {
    let kind = match failure.kind {
        FailureKind::NotFound => ErrorKind::NotFound,
        FailureKind::PermissionDenied => ErrorKind::PermissionDenied,
        FailureKind::AlreadyExists | FailureKind::WrongType => ErrorKind::Conflict,
        FailureKind::LimitExceeded => ErrorKind::LimitExceeded,
        FailureKind::Invalid => ErrorKind::InvalidSpec,
        FailureKind::Frozen => ErrorKind::Conflict,
        FailureKind::Unsupported => ErrorKind::Unsupported,
        FailureKind::WrongInstance => ErrorKind::Lost,
        _ => ErrorKind::Guest,
    };
    let retryable = failure.kind == FailureKind::Frozen;
    let error = Error::new(kind, "guest request", failure.message.clone()).with_source(failure);
    if retryable { error.retryable(true) } else { error }
}

/// The guest said what it must not.
pub(crate) fn garbage(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Guest, "guest request", "the guest broke the protocol").with_source(error)
}

/// The stream or the connection under it ended; or what came over it was never a guest's.
pub(crate) fn broken(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::InvalidData {
        return garbage(error);
    }
    let message = "the connection to the guest was cut";
    Error::new(ErrorKind::Unavailable, "guest request", message).with_source(error)
}

pub(crate) fn unexpected(response: &Response) -> Error {
    let message = format!("an answer to another question: {response:?}");
    Error::new(ErrorKind::Guest, "guest request", message.chars().take(200).collect::<String>())
}
