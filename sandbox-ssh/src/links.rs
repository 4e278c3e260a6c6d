//! The connections to a host: made when they are needed, each for several sessions.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use sandbox_core::{Error, ErrorKind, Result};
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit};

use crate::{
    address::Address,
    channel::Channel,
    error::broken,
    master::{Facts, Master, SESSIONS},
    settings::Settings,
};

/// How many connections to one host there may be, each with several sessions.
const CONNECTIONS: usize = 64;
/// How long the failure of a try is the answer to whoever asks next: to all who waited for it, that is, who
/// would try one after another otherwise.
const SAME_ANSWER: Duration = Duration::from_millis(200);
/// For how long a session that a host refuses is asked for again: one that has ended counts for a moment longer
/// there than here.
const SETTLING: Duration = Duration::from_millis(500);

/// The connections to one host.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) address: Address,
    pub(crate) settings: Arc<Settings>,
    masters: AsyncMutex<Masters>,
    /// Connections that broke, whose sessions the host may still serve.
    broken: Mutex<Vec<String>>,
    was_reached: AtomicBool,
}

impl Links {
    pub(crate) fn new(address: Address, settings: Arc<Settings>) -> Self {
        Self {
            address,
            settings,
            masters: AsyncMutex::default(),
            broken: Mutex::default(),
            was_reached: AtomicBool::new(false),
        }
    }

    /// Uses a connection no longer.
    pub(crate) async fn give_up(&self, master: &Arc<Master>) {
        self.drop_from_use(master).await;
        self.lock_broken().push(master.id.clone());
    }

    async fn drop_from_use(&self, master: &Arc<Master>) {
        self.masters.lock().await.open.retain(|known| known.id != master.id);
    }

    fn lock_broken(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a command, through a connection that has room for it.
    pub(crate) async fn open(&self, command: &str) -> Result<Channel, Fault> {
        const OPERATION: &str = "open a session";
        loop {
            let (master, place) = self.connection().await?;
            let begin = Instant::now();
            let mut pause = Duration::from_millis(1);
            let error = loop {
                match Channel::open(Arc::clone(&master), command).await {
                    Ok(channel) => {
                        master.opened.store(true, Ordering::Relaxed);
                        return Ok(channel.takes(place));
                    }
                    Err(error) if begin.elapsed() > SETTLING => break error,
                    Err(error) => {
                        if tokio::time::timeout(pause, master.ended()).await.is_ok() {
                            let error = std::io::Error::other(error);
                            return Err(Fault::Link(broken(OPERATION, &self.address, error)));
                        }
                    }
                }
                pause *= 2;
            };
            // The host allows fewer sessions than usual: this connection takes no more.
            master.sessions.forget_permits(SESSIONS);
            place.forget();
            if !master.opened.load(Ordering::Relaxed) {
                self.drop_from_use(&master).await;
                let message = format!(
                    "{} opens no session beside the first; allow more in its sshd_config (MaxSessions)",
                    self.address
                );
                let error =
                    Error::new(ErrorKind::Unavailable, OPERATION, message).with_source(error);
                return Err(Fault::Other(error.retryable(false)));
            }
        }
    }

    /// What the host is.
    pub(crate) async fn facts(&self) -> Result<Facts, Fault> {
        Ok(self.connection().await?.0.facts.clone())
    }

    async fn connection(&self) -> Result<(Arc<Master>, OwnedSemaphorePermit), Fault> {
        let mut masters = self.masters.lock().await;
        masters.open.retain(|master| {
            if master.is_dead() {
                self.lock_broken().push(master.id.clone());
            }
            !master.is_dead()
        });
        for master in &masters.open {
            if let Ok(permit) = Arc::clone(&master.sessions).try_acquire_owned() {
                return Ok((Arc::clone(master), permit));
            }
        }
        if masters.open.len() >= CONNECTIONS {
            let message =
                format!("there are {CONNECTIONS} connections to {} already", self.address);
            return Err(Fault::Other(Error::new(ErrorKind::LimitExceeded, "connect", message)));
        }
        if let Some((ended, error)) = &masters.failed
            && ended.elapsed() < SAME_ANSWER
        {
            return Err(self.not_connected(error.clone()));
        }
        let connected = Master::connect(&self.settings, &self.address).await;
        let master = Arc::new(connected.map_err(|error| {
            masters.failed = Some((Instant::now(), error.clone()));
            self.not_connected(error)
        })?);
        self.was_reached.store(true, Ordering::Relaxed);
        let permit = Arc::clone(&master.sessions).try_acquire_owned().map_err(|_| {
            Fault::Other(Error::new(ErrorKind::Backend, "connect", "a new connection is full"))
        })?;
        masters.open.push(Arc::clone(&master));
        Ok((master, permit))
    }

    fn not_connected(&self, error: Error) -> Fault {
        match error.is_retryable() && self.was_reached.load(Ordering::Relaxed) {
            true => Fault::Link(error),
            false => Fault::Other(error),
        }
    }

    /// The connections that broke since this was asked.
    pub(crate) fn take_broken(&self) -> Vec<String> {
        std::mem::take(&mut *self.lock_broken())
    }

    /// What was taken has still to be done.
    pub(crate) fn put_back_broken(&self, links: Vec<String>) {
        self.lock_broken().extend(links);
    }
}

/// Those that stand.
#[derive(Debug, Default)]
struct Masters {
    open: Vec<Arc<Master>>,
    /// When the last try that failed did, and why.
    failed: Option<(Instant, Error)>,
}

/// Why something was not done.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The connection broke, or is not there at present.
    Link(Error),
    /// Anything else.
    Other(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Link(error) | Fault::Other(error) => error,
        }
    }
}
