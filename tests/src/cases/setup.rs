//! Commands that run before a sandbox is ready.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandbox_core::{Error, ErrorKind, GuestStream, Instance, SandboxBackend, SandboxState};

use super::cases;
use crate::{
    Check, Context,
    context::{error_of, soon},
    cut::Cutting,
    decorate::{Decorated, Decoration},
    holds, same,
};

cases!("setup";
    [] setup_commands_run_in_order_before_it_is_ready,
    [] a_recreated_sandbox_is_set_up_again,
    [Snapshot] a_rewound_or_forked_sandbox_is_not,
    [] a_command_that_fails_fails_the_creation_with_its_output,
    [] a_creation_that_nobody_waits_for_is_undone_in_the_middle_of_its_setup,
    [] a_sandbox_is_set_up_once_over_a_connection_that_is_cut,
    [] an_instance_that_ends_during_its_setup_fails_the_creation,
    [] inputs_are_in_the_environment_of_setup_commands_alone,
);

/// How long a creation may take whose connection has to be made anew many times.
const LATE: Duration = Duration::from_secs(150);

async fn setup_commands_run_in_order_before_it_is_ready(cx: &Context) -> Check {
    let request = cx.request().setup("echo one > log").setup("echo two >> log; pwd >> log");
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    let pwd = cx.sh(&sandbox, "pwd").await?;
    same!(cx.sh(&sandbox, "cat log").await?, format!("one\ntwo\n{pwd}"));
    let kinds = cx.kinds(&sandbox).await?;
    let begun = [
        "requested",
        "provisioning",
        "process_started",
        "process_exited",
        "process_started",
        "process_exited",
        "ready",
    ];
    same!(kinds[..7], begun);
    holds!(!cx.repository().join("log").exists(), "the repository is as it was");
    Ok(())
}

async fn a_recreated_sandbox_is_set_up_again(cx: &Context) -> Check {
    let request = cx.request().setup("echo made > log");
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    cx.sh(&sandbox, "echo changed > log").await?;
    sandbox.recreate(&cx.sink).await?;
    same!(cx.sh(&sandbox, "cat log").await?, "made");
    Ok(())
}

async fn a_rewound_or_forked_sandbox_is_not(cx: &Context) -> Check {
    let request = cx.request().setup("echo made >> log");
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    cx.sh(&sandbox, "echo changed >> log").await?;
    let snapshot = sandbox.snapshot("changed", &cx.sink).await?;
    sandbox.rewind(&snapshot.id, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat log").await?, "made\nchanged");
    let fork = cx.manager.fork(&snapshot.id, None, &cx.sink).await?;
    same!(cx.sh(&fork, "cat log").await?, "made\nchanged");
    Ok(())
}

async fn a_command_that_fails_fails_the_creation_with_its_output(cx: &Context) -> Check {
    let request =
        cx.request().setup("true").setup("echo looking; echo not found >&2; exit 7").setup("true");
    let error = error_of(cx.manager.acquire("case", request, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Setup);
    for said in ["command 2 of 3", "exited with 7", "looking", "not found"] {
        holds!(error.message().contains(said), "{error} says {said}");
    }
    holds!(cx.backend.inventory().await?.is_empty(), "no instance is left");
    let id = error.sandbox().ok_or("it names no sandbox")?;
    let sandbox = cx.manager.open(id.as_str()).await?;
    same!(sandbox.info().await?.state, SandboxState::Failed);
    let kinds = cx.kinds(&sandbox).await?;
    same!(kinds.last().map(String::as_str), Some("failed"));
    // The name is free again.
    let made = cx.manager.acquire("case", cx.request(), &cx.sink).await?;
    holds!(made.id() != sandbox.id(), "another sandbox has the name");
    Ok(())
}

async fn a_creation_that_nobody_waits_for_is_undone_in_the_middle_of_its_setup(
    cx: &Context,
) -> Check {
    let marker = cx.marker();
    let request = cx.request().setup(format!("sleep {marker}"));
    {
        let creation = cx.manager.create(request, &cx.sink);
        let begun = async {
            loop {
                if cx.sink.kinds().iter().any(|kind| kind == "process_started") {
                    return;
                }
                crate::context::pause().await;
            }
        };
        tokio::select! {
            made = creation => return Err(format!("it was made: {made:?}").into()),
            begun = soon("a setup command", begun) => begun?,
        }
    }
    let gone = async {
        while !cx.backend.inventory().await?.is_empty() {
            crate::context::pause().await;
        }
        Check::Ok(())
    };
    soon("an instance that nobody waits for", gone).await?
}

async fn a_sandbox_is_set_up_once_over_a_connection_that_is_cut(cx: &Context) -> Check {
    let cutting = Decorated::new(Arc::clone(&cx.backend), Cutting::default());
    let backend: Arc<dyn SandboxBackend> = cutting.clone();
    let manager = cx.manager_with(backend).await?;
    let cutting = cutting.decoration();
    for n in 0..8 {
        if n < 7 {
            // In the greeting, in the start of a command, in what it says, or after it.
            cutting.next([150 + n * 140, 300 + n * 180]);
        } else {
            cutting.each(40_001);
        }
        let before = cutting.cuts();
        let request = cx.request().ttl(Duration::from_secs(600));
        let request = request.setup("echo one >> log; seq 1 20000").setup("echo two >> log");
        let made = tokio::time::timeout(LATE, manager.create(request, &cx.sink)).await;
        let made = made.map_err(|_| format!("it hangs: creation {n}"))??;
        cutting.heal();
        let cuts = cutting.cuts() - before;
        holds!(cuts >= 2, "it was cut {cuts} times in creation {n}");
        let sandbox = cx.manager.open(made.id().as_str()).await?;
        same!(cx.sh(&sandbox, "cat log").await?, "one\ntwo");
        let kinds = cx.kinds(&sandbox).await?;
        same!(kinds.iter().filter(|kind| *kind == "process_exited").count(), 3);
        sandbox.destroy(&cx.sink).await?;
    }
    Ok(())
}

/// An instance that is gone when it is told so, and the connections to it with it.
#[derive(Debug, Default)]
struct Vanishing {
    connections: Cutting,
    gone: AtomicBool,
}

#[async_trait]
impl Decoration for Vanishing {
    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> sandbox_core::Result<GuestStream> {
        if self.gone.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Lost, "connect", "the instance is gone"));
        }
        self.connections.connect(inner, instance).await
    }
}

async fn an_instance_that_ends_during_its_setup_fails_the_creation(cx: &Context) -> Check {
    let vanishing = Decorated::new(Arc::clone(&cx.backend), Vanishing::default());
    let backend: Arc<dyn SandboxBackend> = vanishing.clone();
    let manager = cx.manager_with(backend).await?;
    let request = cx.request().setup(format!("sleep {}", cx.marker()));
    let creation = manager.create(request, &cx.sink);
    let vanish = async {
        while !cx.sink.kinds().iter().any(|kind| kind == "process_started") {
            crate::context::pause().await;
        }
        let vanishing = vanishing.decoration();
        vanishing.gone.store(true, Ordering::Release);
        vanishing.connections.cut();
    };
    let both = async { tokio::join!(creation, vanish) };
    let (made, ()) = soon("the end of a creation", both).await?;
    same!(error_of(made)?.kind(), ErrorKind::Lost);
    holds!(cx.backend.inventory().await?.is_empty(), "no instance is left");
    Ok(())
}

async fn inputs_are_in_the_environment_of_setup_commands_alone(cx: &Context) -> Check {
    let request = cx
        .request()
        .input("base-ref", "main branch")
        .setup("printf %s \"$SANDBOX_INPUT_BASE_REF\" > ref");
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat ref").await?, "main branch");
    same!(cx.sh(&sandbox, "env | grep -c SANDBOX_INPUT || true").await?, "0");
    let unused = cx.request().input("base-ref", "main");
    same!(error_of(cx.manager.create(unused, &cx.sink).await)?.kind(), ErrorKind::InvalidSpec);
    Ok(())
}
