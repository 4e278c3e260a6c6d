//! A port of a sandbox on this host's loopback.

use std::{net::Ipv4Addr, str::FromStr};

use clap::{Args, Subcommand};
use serde_json::json;

use crate::{
    app::{App, Fail},
    exec::interrupted,
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Open a port of a sandbox on this host's loopback, until this is interrupted.
    ///
    /// Prints where it listens when it does. No network is needed in the sandbox for that; where it has its
    /// host's network, the port is that host's. What is open may end with a rewind or a stop; the port goes on.
    #[command(after_help = "Examples:
  sandboxer forward main 8080
  sandboxer forward main 3000:8080
  sandboxer forward main 0:8080 | jq -r .local")]
    Forward(Forward),
}

#[derive(Debug, Args)]
pub(crate) struct Forward {
    /// Id or name.
    id: String,
    /// The sandbox's port, and before it the one to open here if that is another; 0 is any that is free.
    #[arg(value_name = "[LOCAL:]PORT")]
    ports: Ports,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    inside: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| {
            let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| plain).ok_or_else(|| format!("{text:?} is no port"))
        };
        let (local, inside) = match text.split_once(':') {
            Some((local, inside)) => (port(local)?, port(inside)?),
            None => (port(text)?, port(text)?),
        };
        if inside == 0 {
            return Err("nothing listens on port 0".into());
        }
        Ok(Self { local, inside })
    }
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    let Command::Forward(Forward { id, ports }) = command;
    let sandbox = app.open(&id).await?;
    let local = (Ipv4Addr::LOCALHOST, ports.local);
    let mut forward = sandbox.forward(local, ports.inside, &app.sink()).await?;
    let interrupted = interrupted();
    tokio::pin!(interrupted);
    output::record(&json!({
        "sandbox_id": sandbox.id(),
        "local": forward.local_addr(),
        "port": forward.port(),
    }))?;
    loop {
        tokio::select! {
            _ = &mut interrupted => break,
            refused = forward.refused() => match refused {
                Some(why) if !app.quiet => eprintln!("sandboxer: a connection was refused: {why}"),
                Some(_) => {}
                None => return Err(forward.ended().await.into()),
            },
        }
    }
    forward.close().await;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_two_numbers() {
        for (text, local, inside) in [("80", 80, 80), ("1:80", 1, 80), ("0:65535", 0, 65535)] {
            assert_eq!(text.parse(), Ok(Ports { local, inside }));
        }
        for bad in ["", "0", "1:0", ":80", "80:", "x", "+80", "65536", "1:2:3", "127.0.0.1:80"] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }
}
