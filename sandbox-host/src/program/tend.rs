//! Staying with a compose project until its sandbox ends by itself, as when its time is over and no harness
//! is there: then its services end too. What is on disk stays for whoever removes the sandbox.

use std::{
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use sandbox_core::{
    BackendId, Error, ErrorKind, GuestBinaries, Instance, InstanceId, InstanceState, Result,
    SandboxBackend, SandboxId,
};

use super::lock;
use crate::{
    account::{AccountHost, MARK},
    compose::ComposeHost,
    message::Isolation,
    sys::ChildSetup,
};

const OPERATION: &str = "stay with the compose project";

/// Starts a process that does. It carries the instance's mark, so that it ends with the instance if that is
/// ended on purpose.
pub(super) fn begin(state: &Path, instance: &InstanceId) -> Result<()> {
    // This program, though another version may be in its place by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg("tend").arg(state).arg(instance.as_str());
    command.env(MARK, instance.as_str()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ChildSetup::default().apply(&mut command);
    // It is nobody's child by the time it ends.
    command.spawn().map(drop).map_err(|error| Error::io(OPERATION, "starting it", error))
}

/// What that process does.
pub(super) fn main(state: &str, instance: &str) -> ExitCode {
    match tend(Path::new(state), instance) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn tend(state: &Path, instance: &str) -> Result<()> {
    let name = Isolation::Compose;
    let account = AccountHost::new(name, state.join(name.to_string()), GuestBinaries::standard()?);
    let instance = Instance {
        id: instance.parse()?,
        sandbox: SandboxId::new(),
        backend: BackendId::new(name.to_string()),
        data: serde_json::Value::Null,
    };
    account.wait_for_guest(&instance)?;
    // Whoever ends or starts it on purpose holds this.
    let _held = lock::hold(state, &instance.id)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
            Error::new(ErrorKind::Backend, OPERATION, "no runtime").with_source(error)
        })?;
    runtime.block_on(async {
        match account.inspect(&instance).await? {
            InstanceState::Stopped => ComposeHost::take_down(&account, &instance, false).await,
            // It was removed, or runs again, with another process to stay with it.
            _ => Ok(()),
        }
    })
}
