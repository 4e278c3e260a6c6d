//! Signals to processes, from whoever knows their ids.

use sandbox_guest::Request;

use crate::{
    ErrorKind, ProcessId, Result,
    guest::Link,
    manager::{Recorder, Repeats},
};

/// Signals a process. Not repeated: nobody knows whether a cut connection took it.
pub(crate) async fn send(
    recorder: &Recorder,
    id: &ProcessId,
    signal: i32,
    tree: bool,
) -> Result<()> {
    let signaled = async {
        let link = recorder.shared.link(&recorder.inner).await?;
        link.call(Request::Signal { process: id.to_string(), signal, tree }).await
    };
    signaled.await.map(drop).map_err(|error| error.with_sandbox(&recorder.shared.id))
}

/// Kills a process's tree, which can be done twice.
pub(crate) async fn kill(recorder: &Recorder, id: &ProcessId) -> Result<()> {
    let mut repeats = Repeats::new();
    loop {
        let killed = async {
            let link = recorder.shared.link(&recorder.inner).await?;
            kill_over(&link, id).await
        };
        match killed.await {
            Err(error) if repeats.again(&error).await => {}
            killed => return killed.map_err(|error| error.with_sandbox(&recorder.shared.id)),
        }
    }
}

/// The same over this connection, once.
pub(crate) async fn kill_over(link: &Link, process: &ProcessId) -> Result<()> {
    match link.call(Request::Kill { process: process.to_string() }).await {
        // It never started, or has been forgotten since it ended.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        answered => answered.map(drop),
    }
}
