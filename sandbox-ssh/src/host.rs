//! A host: our program on it, and what that is asked for.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_core::{Capabilities, Error, ErrorKind, Result};
use sandbox_host::message::{self, Answer, Call, Isolation, Request};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    sync::OnceCell,
};

use crate::{
    address::Address,
    channel::Channel,
    error::{broken, nonsense},
    links::{Fault, Links},
    program, script,
    settings::Settings,
};

/// How long our program may be silent. It says every two seconds that it works.
const SILENCE: Duration = Duration::from_secs(30);
/// How much an account's shell may say before our program does.
const NOISE: usize = 256 * 1024;
/// How long a host that was there may be away before it counts as gone.
const AWAY: Duration = Duration::from_secs(60);
/// How long to wait between two tries to reach it.
const PAUSE: Duration = Duration::from_millis(500);

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    links: Links,
    program: OnceCell<PathBuf>,
    offer: OnceCell<Offer>,
}

impl Host {
    pub(crate) fn new(address: Address, settings: Arc<Settings>) -> Self {
        Self {
            links: Links::new(address, settings),
            program: OnceCell::new(),
            offer: OnceCell::new(),
        }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.links.address
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.links.settings
    }

    /// How new sandboxes are separated from this host, and what else it can do.
    ///
    /// # Errors
    ///
    /// `Unavailable` if there is no bubblewrap, and the account alone was not accepted.
    pub(crate) async fn isolation(&self) -> Result<(Isolation, &Capabilities)> {
        let offer = self.offer().await?;
        if let Some(why) = &offer.no_bubblewrap
            && !self.settings().accept_account
        {
            let message = format!(
                "{} offers no isolation: {why}. Install bubblewrap there; or accept the account as the only \
                 isolation, where sandboxes have all rights of the account",
                self.address()
            );
            return Err(Error::new(ErrorKind::Unavailable, "probe", message).retryable(false));
        }
        Ok((offer.isolation, &offer.capabilities))
    }

    /// How sandboxes that may be there already are separated from this host: those need not be accepted.
    pub(crate) async fn placed(&self) -> Result<Isolation> {
        match self.settings().kind.isolation() {
            // Whether new ones can be made is another question.
            Some(isolation) => Ok(isolation),
            None => Ok(self.offer().await?.isolation),
        }
    }

    /// Tried once.
    async fn offer(&self) -> Result<&Offer> {
        self.offer.get_or_try_init(|| self.try_offer()).await
    }

    async fn try_offer(&self) -> Result<Offer> {
        // What fails here is no want of bubblewrap.
        self.program.get_or_try_init(|| program::bring(&self.links)).await?;
        if let Some(isolation) = self.settings().kind.isolation() {
            return match self.call("probe", isolation, Request::Probe).await? {
                Answer::Capabilities(capabilities) => {
                    Ok(Offer { isolation, capabilities, no_bubblewrap: None })
                }
                _ => Err(nonsense("probe", self.address(), "answers another question")),
            };
        }
        let why = match self.call("probe", Isolation::Bwrap, Request::Probe).await {
            Ok(Answer::Capabilities(capabilities)) => {
                let isolation = Isolation::Bwrap;
                return Ok(Offer { isolation, capabilities, no_bubblewrap: None });
            }
            Ok(_) => return Err(nonsense("probe", self.address(), "answers another question")),
            // The connection, not bubblewrap.
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => error,
        };
        match self.call("probe", Isolation::Account, Request::Probe).await? {
            Answer::Capabilities(found) => {
                let why = why.message().to_owned();
                let version = format!("{}; no bubblewrap: {why}", found.version);
                let (isolation, no_bubblewrap) = (Isolation::Account, Some(why));
                let capabilities = Capabilities { version, ..found };
                Ok(Offer { isolation, capabilities, no_bubblewrap })
            }
            _ => Err(nonsense("probe", self.address(), "answers another question")),
        }
    }

    /// Asks the host for something that may be asked for twice: if the connection breaks, it is, through
    /// another one, for as long as the host may be away.
    pub(crate) async fn call(
        &self,
        operation: &'static str,
        isolation: Isolation,
        request: Request,
    ) -> Result<Answer> {
        let mut away = Away::begin();
        loop {
            match self.call_once(operation, isolation, request.clone()).await {
                Err(Fault::Link(error)) => away.wait(error).await?,
                answer => return Ok(answer?),
            }
        }
    }

    /// Asks the host for something.
    pub(crate) async fn call_once(
        &self,
        operation: &'static str,
        isolation: Isolation,
        request: Request,
    ) -> Result<Answer, Fault> {
        let mut channel = self.begin(operation, isolation, request).await?;
        let answer = self.answer(operation, &mut channel).await?;
        // Its input stays open until it has ended: an end before that means that nobody waits.
        drop(channel);
        Ok(answer)
    }

    /// A byte stream to what was asked for, after it was answered.
    pub(crate) async fn stream(&self, isolation: Isolation, request: Request) -> Result<Channel> {
        let mut away = Away::begin();
        loop {
            let tried = async {
                let mut channel = self.begin("connect", isolation, request.clone()).await?;
                self.answer("connect", &mut channel).await?;
                Ok(channel)
            };
            let tried: Result<Channel, Fault> = tried.await;
            match tried {
                Err(Fault::Link(error)) => away.wait(error).await?,
                tried => return Ok(tried?),
            }
        }
    }

    /// Starts our program with a request; its answers are to be read.
    pub(crate) async fn begin(
        &self,
        operation: &'static str,
        isolation: Isolation,
        request: Request,
    ) -> Result<Channel, Fault> {
        let program = self.program.get_or_try_init(|| program::bring(&self.links)).await?;
        self.forget_broken(program).await?;
        self.begin_with(operation, program, isolation, request).await
    }

    async fn begin_with(
        &self,
        operation: &'static str,
        program: &std::path::Path,
        isolation: Isolation,
        request: Request,
    ) -> Result<Channel, Fault> {
        let command = script::run(&program.to_string_lossy(), "call");
        let mut channel = self.links.open(&command).await?;
        let state_dir = self.settings().state_dir.clone().unwrap_or_default();
        let compose = self.settings().kind.compose();
        let settings = message::Settings { state_dir, isolation, compose };
        let call = Call { settings, request, link: channel.master().id.clone() };
        let bytes = message::encode(&call).map_err(|error| {
            let message =
                "the request cannot be sent: a path in it is not UTF-8, or it is too long";
            Fault::Other(Error::new(ErrorKind::InvalidSpec, operation, message).with_source(error))
        })?;
        let begun = async {
            channel.write_all(&bytes).await?;
            channel.flush().await?;
            skip_to(&mut channel, message::BEGIN).await
        };
        match tokio::time::timeout(SILENCE, begun).await {
            Ok(Ok(())) => Ok(channel),
            Ok(Err(error)) => Err(self.failed(operation, &channel, error).await),
            Err(_) => Err(self.silent(operation, &channel).await),
        }
    }

    /// Has the host end what it still serves for connections that are broken.
    async fn forget_broken(&self, program: &std::path::Path) -> Result<(), Fault> {
        let links = self.links.take_broken();
        if links.is_empty() {
            return Ok(());
        }
        const OPERATION: &str = "end what a broken connection left";
        let request = Request::Forget { links: links.clone() };
        let forgotten = async {
            let mut channel =
                self.begin_with(OPERATION, program, Isolation::default(), request).await?;
            self.answer(OPERATION, &mut channel).await
        };
        let forgotten = forgotten.await;
        if forgotten.is_err() {
            self.links.put_back_broken(links);
        }
        forgotten.map(drop)
    }

    /// The next answer that is more than a sign of life.
    pub(crate) async fn answer(
        &self,
        operation: &'static str,
        channel: &mut Channel,
    ) -> Result<Answer, Fault> {
        loop {
            let read = message::read::<Answer>(channel, message::LARGE);
            match tokio::time::timeout(SILENCE, read).await {
                Ok(Ok(Some(Answer::Working))) => {}
                Ok(Ok(Some(Answer::Failed(failure)))) => {
                    return Err(Fault::Other(failure.into_error(operation)));
                }
                Ok(Ok(Some(answer))) => return Ok(answer),
                Ok(Ok(None)) => {
                    let error = std::io::ErrorKind::UnexpectedEof.into();
                    return Err(self.failed(operation, channel, error).await);
                }
                Ok(Err(error)) => return Err(self.failed(operation, channel, error).await),
                Err(_) => return Err(self.silent(operation, channel).await),
            }
        }
    }

    /// Why a session ended before its answer: because the connection did, or our program.
    async fn failed(
        &self,
        operation: &'static str,
        channel: &Channel,
        error: std::io::Error,
    ) -> Fault {
        // The end of a connection is seen by its sessions first.
        let ended = tokio::time::timeout(Duration::from_millis(500), channel.master().ended());
        if ended.await.is_ok() {
            return Fault::Link(broken(operation, self.address(), error));
        }
        let words = channel.words();
        if words.is_empty() {
            return Fault::Link(broken(operation, self.address(), error));
        }
        let message = format!("our program on {} ended without an answer: {words}", self.address());
        Fault::Other(Error::new(ErrorKind::Backend, operation, message).with_source(error))
    }

    /// A connection over which nothing comes is as good as broken.
    async fn silent(&self, operation: &'static str, channel: &Channel) -> Fault {
        self.links.give_up(channel.master()).await;
        let message = format!("{} said nothing for {SILENCE:?}", self.address());
        Fault::Link(Error::new(ErrorKind::Unavailable, operation, message))
    }
}

/// What a host can separate sandboxes with.
#[derive(Debug)]
struct Offer {
    isolation: Isolation,
    capabilities: Capabilities,
    /// Why it is the account alone.
    no_bubblewrap: Option<String>,
}

/// Waiting for a link that was cut, which comes back, mostly.
#[derive(Debug)]
pub(crate) struct Away(Instant);

impl Away {
    pub(crate) fn begin() -> Self {
        Self(Instant::now())
    }

    /// A little while; or the error, if that has been long enough.
    pub(crate) async fn wait(&mut self, error: Error) -> Result<()> {
        if self.0.elapsed() > AWAY {
            return Err(error);
        }
        tracing::debug!(%error, "asked again");
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }
}

/// Reads until this has been read.
async fn skip_to(from: &mut (impl AsyncRead + Unpin), mark: &[u8]) -> std::io::Result<()> {
    let mut seen: Vec<u8> = Vec::new();
    while !seen.ends_with(mark) {
        seen.push(from.read_u8().await?);
        if seen.len() > NOISE {
            let message = "the account's shell says more than our program";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
        }
    }
    Ok(())
}
