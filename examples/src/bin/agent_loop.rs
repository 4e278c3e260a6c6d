//! An agent that controls its own sandbox.
//!
//! A scripted model (no network, the same every time) works on a repository through the tools of
//! `sandbox_core::tools`: it takes a snapshot before a risky edit, sees that the tests fail, and rewinds.
//! The harness is the loop in `turn`: it offers the tools that it grants, passes the model's calls on with
//! the turn's sink, and gives the answers back. Every event of the turn is printed as it happens.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::process::ExitCode;

use sandbox_core::{
    Sandbox, TurnEventSink,
    tools::{Tool, Tools},
};
use sandbox_examples::{
    Outcome, check, conclude,
    scene::{Scene, printed_turn},
};
use serde_json::{Value, json};

#[tokio::main]
async fn main() -> ExitCode {
    conclude(Scene::tell(story).await)
}

async fn story(scene: &Scene) -> Outcome {
    let (sink, printer) = printed_turn("turn-1");
    let sandbox = scene.manager.acquire("main", scene.request("agent-loop"), &sink).await?;
    // This agent may not fork.
    let tools = Tools::all().without(Tool::ForkSandbox);
    println!("▸ the model is offered:");
    for definition in tools.definitions() {
        println!(
            "  {:<24} {}",
            definition.name,
            definition.description.chars().take(70).collect::<String>()
        );
    }

    println!("\n▸ the turn");
    let mut model = Model::default();
    turn(&mut model, &tools, &sandbox, &sink).await?;
    drop(sink);
    let kinds = printer.await?;

    println!("\n▸ afterwards");
    let add = sandbox.files().read("add.sh").await?;
    check(String::from_utf8_lossy(&add).contains("$1 + $2"), "the edit that broke it is gone")?;
    check(
        sandbox.files().read("NOTES").await.is_ok(),
        "what was done before the snapshot is there",
    )?;
    check(sandbox.info().await?.generation == 2, "same sandbox, second generation")?;
    let order = ["snapshotted", "process_exited", "rewind_requested", "rewound", "process_exited"];
    check(in_order(&kinds, &order), "the turn's events tell it in this order")?;
    let history = scene.manager.history(sandbox.id(), 0).await?;
    check(history.len() == kinds.len(), "the sink saw the whole history, the rewind's too")?;
    Ok(())
}

/// The harness's loop: the model asks for a tool, the harness calls it and gives the answer back.
async fn turn(
    model: &mut Model,
    tools: &Tools,
    sandbox: &Sandbox,
    sink: &dyn TurnEventSink,
) -> Outcome {
    let mut answer = Value::Null;
    while let Some((says, name, arguments)) = model.next(&answer)? {
        println!("\n  model: {says}\n    → {name} {arguments}");
        answer = match tools.call(sandbox, name, arguments, sink).await {
            Ok(result) => result,
            // A mistake of the model's goes back to the model.
            Err(error) => error.to_json(),
        };
        let shown = answer.to_string();
        println!("    ← {}", shown.chars().take(160).collect::<String>());
    }
    Ok(())
}

/// What the model says and asks for: a sentence, a tool, its arguments.
type Call = (&'static str, &'static str, Value);

/// A model that follows a script, but looks at the answers.
#[derive(Debug, Default)]
struct Model {
    step: usize,
    snapshot: Value,
}

impl Model {
    fn next(&mut self, answer: &Value) -> Outcome<Option<Call>> {
        self.step += 1;
        let run = || json!({"argv": ["sh", "test.sh"]});
        Ok(Some(match self.step {
            1 => ("Let me see whether the tests pass.", "sandbox_exec", run()),
            2 => {
                check(answer["exit_code"] == 0, "the model sees that the tests pass")?;
                let note = json!({"path": "NOTES", "content": "tests pass before my change\n"});
                ("I keep a note.", "sandbox_write_file", note)
            }
            3 => ("The next edit is risky.", "snapshot_sandbox", json!({"lable": "oops"})),
            4 => {
                let told = answer["error"]["message"].as_str().unwrap_or_default();
                check(
                    told.contains("unknown field `lable`"),
                    "a typing mistake is answered with what to do",
                )?;
                (
                    "I misspelled that.",
                    "snapshot_sandbox",
                    json!({"label": "before the risky edit"}),
                )
            }
            5 => {
                self.snapshot = answer["snapshot_id"].clone();
                let edit = json!({"path": "add.sh", "content": "#!/bin/sh\necho $(($1 * $2))\n"});
                ("I rewrite the addition.", "sandbox_write_file", edit)
            }
            6 => ("Does it still work?", "sandbox_exec", run()),
            7 => {
                check(answer["exit_code"] != 0, "the model sees that the tests fail")?;
                let back = json!({"snapshot_id": self.snapshot});
                ("It does not. Back to where it worked.", "rewind_sandbox", back)
            }
            8 => ("And now?", "sandbox_exec", run()),
            9 => {
                check(answer["exit_code"] == 0, "after the rewind the tests pass again")?;
                ("Could I fork?", "fork_sandbox", json!({"snapshot_id": self.snapshot}))
            }
            10 => {
                check(
                    answer["error"]["kind"] == "unknown_tool",
                    "what was not granted is not there",
                )?;
                ("What have I done?", "sandbox_history", json!({"limit": 3}))
            }
            _ => {
                check(
                    answer["events"].as_array().is_some_and(|e| e.len() == 3),
                    "the history is told",
                )?;
                return Ok(None);
            }
        }))
    }
}

/// Whether these come in this order, with others in between.
fn in_order(kinds: &[String], expected: &[&str]) -> bool {
    let mut rest = kinds.iter();
    expected.iter().all(|wanted| rest.any(|kind| kind == wanted))
}
