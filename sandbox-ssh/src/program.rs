//! Bringing our program to a host, once for each version of it.

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_core::{Error, ErrorKind, GUEST_DIR_VARIABLE, Result};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    error::{broken, last_words, nonsense},
    links::{Fault, Links},
    script,
};

const OPERATION: &str = "bring our program to the host";
/// How long that may take over a slow link.
const PATIENCE: Duration = Duration::from_secs(600);

/// Where our program is on the host; it is put there if it is not.
pub(crate) async fn bring(host: &Links) -> Result<PathBuf, Fault> {
    let facts = host.facts().await?;
    if facts.system != "Linux" {
        let message = format!("{} is {}, and sandboxes take Linux", host.address, facts.system);
        return Err(Error::unsupported(OPERATION, message).into());
    }
    let program = program_for(&facts.architecture)?;
    let checksum =
        Sha256::digest(&program).iter().take(16).fold(String::new(), |mut text, byte| {
            use std::fmt::Write;
            let _ = write!(text, "{byte:02x}");
            text
        });
    let dir = match &host.settings.program_dir {
        Some(dir) => dir.clone(),
        None => Path::new(&facts.cache).join("sandboxer"),
    };
    let name = format!("sandbox-host-{checksum}");
    let path = dir.join(&name);
    if !runs(host, &path).await? {
        let put = tokio::time::timeout(PATIENCE, put(host, &dir, &name, &program)).await;
        put.unwrap_or_else(|_| {
            let message = format!("sending it to {} takes longer than {PATIENCE:?}", host.address);
            Err(Error::new(ErrorKind::Timeout, OPERATION, message).into())
        })?;
        if !runs(host, &path).await? {
            let message = format!(
                "{} does not run on {}; if programs may not be run from there, name another directory \
                 with `program_dir`",
                path.display(),
                host.address
            );
            return Err(Error::new(ErrorKind::Unavailable, OPERATION, message)
                .retryable(false)
                .into());
        }
    }
    Ok(path)
}

async fn runs(host: &Links, path: &Path) -> Result<bool, Fault> {
    let text = path.to_string_lossy();
    let channel = host.open(&script::run(&text, "version")).await?;
    let (status, said) = channel
        .finish()
        .await
        .map_err(|error| Fault::Link(broken(OPERATION, &host.address, error)))?;
    Ok(status == Some(0) && String::from_utf8_lossy(&said).contains("sandbox-host "))
}

async fn put(host: &Links, dir: &Path, name: &str, program: &[u8]) -> Result<(), Fault> {
    let lost = |error| Fault::Link(broken(OPERATION, &host.address, error));
    let command = script::upload(&dir.to_string_lossy(), name, program.len());
    let mut channel = host.open(&command).await?;
    let mut said = Vec::new();
    loop {
        let count = channel.read_buf(&mut said).await.map_err(lost)?;
        let text = String::from_utf8_lossy(&said);
        if text.contains("sandbox-there\n") {
            return Ok(());
        }
        if text.contains("sandbox-send\n") {
            break;
        }
        if count == 0 {
            let (words, text) = (channel.words(), last_words(&said));
            let what = format!("does not take our program in {}: {words} {text}", dir.display());
            return Err(nonsense(OPERATION, &host.address, what.trim_end()).into());
        }
    }
    channel.write_all(program).await.map_err(lost)?;
    channel.shutdown().await.map_err(lost)?;
    let words = channel.words();
    let (status, said) = channel.finish().await.map_err(lost)?;
    if String::from_utf8_lossy(&said).contains("sandbox-put\n") {
        return Ok(());
    }
    match status {
        Some(code) => {
            let what = format!("did not get our program as a whole ({code}): {words}");
            Err(nonsense(OPERATION, &host.address, &what).into())
        }
        None => Err(lost(std::io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Our program for an architecture: the one that was built with this library, or one of the folder that
/// also brings guests for other architectures.
fn program_for(architecture: &str) -> Result<Cow<'static, [u8]>> {
    if let Some(dir) = std::env::var_os(GUEST_DIR_VARIABLE) {
        let path = Path::new(&dir).join(format!("sandbox-host-{architecture}"));
        match std::fs::read(&path) {
            Ok(bytes) => return Ok(bytes.into()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(OPERATION, path.display().to_string(), error)),
        }
    }
    match sandbox_host::bundled() {
        Some(program) if architecture == std::env::consts::ARCH => Ok(program.into()),
        _ => {
            let message = format!(
                "there is no program for the architecture {architecture}; build sandbox-host for it and \
                 put it as sandbox-host-{architecture} into a folder that {GUEST_DIR_VARIABLE} names"
            );
            Err(Error::unsupported(OPERATION, message))
        }
    }
}
