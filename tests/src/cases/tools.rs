//! The tools by which an agent controls its own sandbox.

use async_trait::async_trait;
use sandbox_core::{
    Sandbox, SandboxEvent, SinkError, TurnEventSink, TurnId,
    tools::{Tool, ToolError, ToolErrorKind, Tools},
};
use serde_json::{Value, json};

use super::cases;
use crate::{Check, Context, holds, same};

cases!("tools";
    [Snapshot] an_agent_takes_itself_back_and_forks,
    [] an_agent_runs_commands_and_reads_and_writes_files,
    [] what_was_not_granted_is_not_there,
    [] bad_arguments_are_answered_with_what_to_do,
    [Snapshot] an_agent_is_told_nothing_of_the_host_or_who_asked,
    [Snapshot] what_was_done_is_told_even_if_the_sink_refuses,
);

async fn call(cx: &Context, sandbox: &Sandbox, name: &str, arguments: Value) -> Check<Value> {
    let called = Tools::all().call(sandbox, name, arguments, &cx.sink).await;
    called.map_err(|error| format!("{name}: {error}").into())
}

async fn refused(
    cx: &Context,
    sandbox: &Sandbox,
    name: &str,
    arguments: Value,
) -> Check<ToolError> {
    match Tools::all().call(sandbox, name, arguments.clone(), &cx.sink).await {
        Ok(_) => Err(format!("{name} took {arguments}").into()),
        Err(error) => Ok(error),
    }
}

async fn an_agent_takes_itself_back_and_forks(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let taken = call(cx, &sandbox, "snapshot_sandbox", json!({"label": "good"})).await?;
    let id = taken["snapshot_id"].clone();
    cx.sh(&sandbox, "echo broken > README").await?;
    let listed = call(cx, &sandbox, "list_sandbox_snapshots", Value::Null).await?;
    same!(listed["snapshots"][0]["label"], json!("good"));
    same!(listed["snapshots"][0]["current"], json!(true));
    let rewound = call(cx, &sandbox, "rewind_sandbox", json!({"snapshot_id": id})).await?;
    same!(rewound["generation"], json!(2));
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    let forked =
        call(cx, &sandbox, "fork_sandbox", json!({"snapshot_id": id, "name": "beside"})).await?;
    let fork = cx.manager.open("beside").await?;
    same!(forked["sandbox_id"], json!(fork.id()));
    same!(cx.sh(&fork, "cat README").await?, "v1");
    let status = call(cx, &sandbox, "get_sandbox_status", json!({})).await?;
    same!(status["state"], json!("ready"));
    same!(status["latest_snapshot"], id);
    let told = call(cx, &sandbox, "sandbox_history", json!({"limit": 500})).await?;
    let kinds: Vec<&str> = told["events"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|e| e["kind"].as_str())
        .collect();
    same!(kinds, cx.kinds(&sandbox).await?);
    let after = call(cx, &sandbox, "sandbox_history", json!({"after": 1, "limit": 2})).await?;
    same!(after["events"][0]["seq"], json!(2));
    same!(after["more"], json!(true));
    Ok(())
}

async fn an_agent_runs_commands_and_reads_and_writes_files(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let run = call(
        cx,
        &sandbox,
        "sandbox_exec",
        json!({
            "command": "read line; echo \"$line $WORD $(basename $PWD)\"; echo oh >&2; exit 3",
            "stdin": "hello\n", "env": {"WORD": "you"}, "cwd": "src", "timeout_seconds": 60,
        }),
    )
    .await?;
    same!(run["exit_code"], json!(3));
    same!(run["stdout"], json!("hello you src\n"));
    same!(run["stderr"], json!("oh\n"));
    let run =
        call(cx, &sandbox, "sandbox_exec", json!({"argv": ["printf", "%s|", "a b", "$x"]})).await?;
    same!(run["stdout"], json!("a b|$x|"));
    let run =
        call(cx, &sandbox, "sandbox_exec", json!({"command": "sleep 600", "timeout_seconds": 1}))
            .await?;
    same!(run["exit_code"], Value::Null);
    same!(run["outcome"], json!("timed_out"));

    let path = "notes/ä b.txt";
    call(cx, &sandbox, "sandbox_write_file", json!({"path": path, "content": "one"})).await?;
    let more = json!({"path": path, "content": " two", "append": true});
    call(cx, &sandbox, "sandbox_write_file", more).await?;
    let read = call(cx, &sandbox, "sandbox_read_file", json!({"path": path})).await?;
    same!(read["content"], json!("one two"));
    same!(read["encoding"], json!("utf8"));
    let part = json!({"path": path, "offset": 4, "length": 2});
    let read = call(cx, &sandbox, "sandbox_read_file", part).await?;
    same!(read["content"], json!("tw"));
    same!(read["more"], json!(true));
    let binary = json!({"path": "b", "content": "/wD+", "encoding": "base64"});
    let written = call(cx, &sandbox, "sandbox_write_file", binary).await?;
    same!(written["bytes_written"], json!(3));
    same!(sandbox.files().read("b").await?, b"\xff\x00\xfe");
    let read = call(cx, &sandbox, "sandbox_read_file", json!({"path": "b"})).await?;
    same!((&read["encoding"], &read["content"]), (&json!("base64"), &json!("/wD+")));
    Ok(())
}

async fn what_was_not_granted_is_not_there(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let tools = Tools::of([Tool::GetSandboxStatus]);
    let before = cx.kinds(&sandbox).await?.len();
    let arguments = json!({"command": "true"});
    let Err(error) = tools.call(&sandbox, "sandbox_exec", arguments, &cx.sink).await else {
        return Err("it ran".into());
    };
    same!(error.kind(), ToolErrorKind::UnknownTool);
    holds!(error.to_string().contains("get_sandbox_status"), "{error} says what there is");
    same!(cx.kinds(&sandbox).await?.len(), before);
    Ok(())
}

async fn bad_arguments_are_answered_with_what_to_do(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (name, arguments, says) in [
        ("snapshot_sandbox", json!({}), "missing field `label`"),
        ("snapshot_sandbox", json!({}), "label (string, required)"),
        ("snapshot_sandbox", json!({"label": "a", "deep": true}), "unknown field `deep`"),
        ("get_sandbox_status", json!({"id": "x"}), "It takes no arguments"),
        ("rewind_sandbox", json!({"snapshot_id": "snp_1"}), "take one with snapshot_sandbox"),
        ("sandbox_exec", json!({}), "`command` (shell text) or `argv`"),
        ("sandbox_exec", json!({"command": "a", "argv": ["b"]}), "not both"),
        ("sandbox_exec", json!({"argv": []}), "`argv` is empty"),
        ("sandbox_exec", json!({"command": "a", "timeout_seconds": 0}), "must be 1 to 3600"),
        ("sandbox_history", json!({"limit": 100_000}), "must be 1 to 500"),
        (
            "sandbox_write_file",
            json!({"path": "x", "content": "%", "encoding": "base64"}),
            "no base64",
        ),
        ("sandbox_read_file", json!("README"), "It takes path (string, required)"),
    ] {
        let error = refused(cx, &sandbox, name, arguments).await?;
        same!(error.kind(), ToolErrorKind::InvalidArguments);
        holds!(error.to_string().contains(says), "{error} says {says}");
    }
    let error = refused(cx, &sandbox, "sandbox_read_file", json!({"path": "nope"})).await?;
    same!(error.kind(), ToolErrorKind::Failed);
    holds!(error.to_string().contains("nope"), "{error} names the file");
    same!(error.to_json()["error"]["kind"], json!("failed"));
    let argv = json!({"argv": ["/no/such/program"]});
    let error = refused(cx, &sandbox, "sandbox_exec", argv).await?;
    same!(
        error.sandbox_error().map(sandbox_core::Error::kind),
        Some(sandbox_core::ErrorKind::NotFound)
    );
    Ok(())
}

async fn an_agent_is_told_nothing_of_the_host_or_who_asked(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    call(cx, &sandbox, "snapshot_sandbox", json!({"label": "x"})).await?;
    let host = cx.scratch().to_string_lossy().into_owned();
    let whole = serde_json::to_string(&cx.manager.history(sandbox.id(), 0).await?)?;
    holds!(whole.contains(&host) && whole.contains("conformance"), "the whole history tells");
    for name in ["sandbox_history", "get_sandbox_status", "list_sandbox_snapshots"] {
        let told = call(cx, &sandbox, name, Value::Null).await?.to_string();
        holds!(!told.contains(&host), "{name} tells a path of the host: {told}");
        holds!(
            !told.contains("consumer") && !told.contains("agt"),
            "{name} tells who asked: {told}"
        );
    }
    Ok(())
}

struct Refusing;

#[async_trait]
impl TurnEventSink for Refusing {
    fn turn(&self) -> Option<TurnId> {
        Some(TurnId::new("refusing"))
    }

    async fn emit(&self, _: &SandboxEvent) -> Result<(), SinkError> {
        Err(SinkError::new("no"))
    }
}

async fn what_was_done_is_told_even_if_the_sink_refuses(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let label = json!({"label": "kept"});
    let Err(error) = Tools::all().call(&sandbox, "snapshot_sandbox", label, &Refusing).await else {
        return Err("the refusal is not told".into());
    };
    same!(error.kind(), ToolErrorKind::EventDelivery);
    let snapshot = sandbox.snapshots().await?.pop().ok_or("it was not taken")?;
    same!(error.result().map(|result| &result["snapshot_id"]), Some(&json!(snapshot.id)));
    Ok(())
}
