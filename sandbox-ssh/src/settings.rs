//! What all hosts of a backend have in common.

use std::{path::PathBuf, time::Duration};

use crate::{kind::Kind, upload::Watcher};

/// See the methods of [`SshBackendBuilder`](crate::SshBackendBuilder).
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) kind: Kind,
    pub(crate) program: PathBuf,
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) program_dir: Option<PathBuf>,
    pub(crate) accept_account: bool,
    pub(crate) host_keys_as_configured: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) keep_alive: (Duration, u32),
    pub(crate) tunnel: Option<String>,
    pub(crate) tunnel_via: Option<String>,
    pub(crate) identity: Option<String>,
    pub(crate) on_upload: Option<Watcher>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            kind: Kind::default(),
            program: "ssh".into(),
            config_file: None,
            state_dir: None,
            program_dir: None,
            accept_account: false,
            host_keys_as_configured: false,
            connect_timeout: Duration::from_secs(15),
            keep_alive: (Duration::from_secs(5), 3),
            tunnel: None,
            tunnel_via: None,
            identity: None,
            on_upload: None,
        }
    }
}
