//! One question and its answer.

use std::{io::Read, process::ExitCode};

use sandbox_core::Error;

use super::{
    desk::Desk,
    io::{self, Answers},
    links, populate, relay,
};
use crate::{
    cleanup,
    message::{Answer, Call, Request},
};

pub(super) fn main() -> ExitCode {
    match call() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            let _ = std::io::stderr().write_all(format!("sandbox-host: {error}\n").as_bytes());
            ExitCode::from(70)
        }
    }
}

fn call() -> std::io::Result<()> {
    let mut input = io::input()?;
    let Call { settings, request, link } = io::read(&mut input)?;
    let answers = Answers::new()?;
    let begun = Desk::open(settings).and_then(|desk| {
        let noted = links::note(desk.state(), &link)?;
        Ok((desk, noted))
    });
    let (desk, _noted) = match begun {
        Ok(begun) => begun,
        Err(error) => return answers.end(&failed(&error)),
    };
    match request {
        Request::Connect(instance) => match desk.connect(&instance) {
            Ok(socket) => {
                answers.end(&Answer::Done)?;
                relay::relay(socket)
            }
            Err(error) => answers.end(&failed(&error)),
        },
        Request::Populate { origin } => {
            let populated = populate::populate(desk.state(), &origin, &mut input, &answers);
            match populated {
                Ok(answer) => answers.end(&answer),
                Err(error) => answers.end(&failed(&error)),
            }
        }
        request => {
            let answer = work(&desk, request, input)?;
            answers.end(&answer)
        }
    }
}

/// Does what is asked for. When whoever asked goes away, what can be broken off is; and nothing is left
/// that nobody would know of.
fn work(desk: &Desk, request: Request, mut input: std::fs::File) -> std::io::Result<Answer> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (gone, went) = tokio::sync::oneshot::channel::<()>();
    std::thread::Builder::new().name("input".into()).spawn(move || {
        // There is nothing more to come but its end.
        let _ = input.read(&mut [0]);
        let _ = gone.send(());
    })?;
    let answer = runtime.block_on(async {
        let can_be_broken_off = Desk::can_be_broken_off(&request);
        let undo = desk.undo(&request);
        let work = desk.answer(request);
        tokio::pin!(work);
        tokio::select! {
            answer = &mut work => return answer,
            _ = went => {}
        }
        if !can_be_broken_off {
            desk.abandon();
            let done = tokio::time::timeout(desk.aftermath(), work).await;
            if let (Ok(Ok(_)), Some(undo)) = (done, undo) {
                undo.await?;
            }
        }
        Err(Error::new(sandbox_core::ErrorKind::Cancelled, "call", "nobody waits for it any more"))
    });
    // Waits for what still blocks.
    drop(runtime);
    cleanup::wait();
    Ok(answer.unwrap_or_else(|error| failed(&error)))
}

fn failed(error: &Error) -> Answer {
    Answer::Failed(error.into())
}
