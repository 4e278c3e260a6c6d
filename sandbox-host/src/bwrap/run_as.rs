//! Whom sandboxes run as, from the host's side.

use std::fs;

use sandbox_core::{Error, ErrorKind, Result};

/// The user and group that a root harness's sandboxes run as, if nobody says otherwise. Nothing else on
/// a host has a reason to own files of it: it lies outside the ranges that distributions, systemd and
/// container engines give to people, services and containers. So whoever got out of a sandbox would
/// find nothing of their own.
const RUN_AS: u32 = 1_900_000_000;

/// A user and group of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct RunAs {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl RunAs {
    /// Who it is for this harness, if somebody was asked for, or nobody; `None` for the harness's own user.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if that would be root, or somebody whom this harness cannot become.
    pub(crate) fn choose(wanted: Option<Self>) -> Result<Option<Self>> {
        let uid = rustix::process::geteuid().as_raw();
        match wanted {
            Some(RunAs { uid: 0, .. } | RunAs { gid: 0, .. }) => {
                let message =
                    "a sandbox never runs as user or group 0: choose an id that owns nothing";
                Err(invalid(message.to_owned()))
            }
            Some(RunAs { uid: wanted, .. }) if uid != 0 && wanted != uid => {
                let message = format!(
                    "only root can run sandboxes as user {wanted}; this is user {uid}: leave run_as out"
                );
                Err(invalid(message))
            }
            _ if uid != 0 => Ok(None),
            Some(run_as) => Ok(Some(run_as)),
            None if is_initial_map(
                &fs::read_to_string("/proc/self/uid_map").unwrap_or_default(),
            ) =>
            {
                Ok(Some(RunAs { uid: RUN_AS, gid: RUN_AS }))
            }
            // Root of a user namespace, as in a rootless container, is an ordinary user of the host.
            None => Ok(None),
        }
    }
}

/// Whether a process with these user ids is in the host's own user namespace.
fn is_initial_map(uid_map: &str) -> bool {
    let numbers: Vec<&str> = uid_map.split_ascii_whitespace().collect();
    numbers == ["0", "0", "4294967295"]
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, "configure", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_never_runs_as_root() {
        let error = RunAs::choose(Some(RunAs { uid: 0, gid: 5 })).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
    }

    #[test]
    fn root_of_a_user_namespace_is_told_from_the_hosts() {
        assert!(is_initial_map("         0          0 4294967295\n"));
        assert!(!is_initial_map("         0       1000          1\n"));
        assert!(!is_initial_map("0 1000 1\n1 100000 65536\n"));
    }
}
