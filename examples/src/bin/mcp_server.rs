//! The tools of one sandbox over the Model Context Protocol, on standard input and output.
//!
//! `mcp_server [NAME]` acquires the sandbox of this name (`main` if not given) of the repository in the
//! current directory, and serves its tools until its client goes away. State is kept in
//! `SANDBOXER_STATE_DIR`, else in the user's state directory; `MCP_TOOLS` names the tools that are granted,
//! separated by commas (all of them if it is not set).
//!
//! A client's whole session is one turn here. A harness that knows its turns makes a sink for each.
#![allow(clippy::print_stderr, reason = "standard output is the protocol's")]

use std::{process::ExitCode, sync::Arc};

use rmcp::{
    ErrorData, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ListToolsResult,
        PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool as McpTool, ToolAnnotations,
    },
    service::{RequestContext, RoleServer},
    transport::stdio,
};
use sandbox_core::{
    Consumer, CreateSandbox, Sandbox, TracingSink, TurnId, default_state_dir,
    tools::{Tool, ToolDefinition, ToolErrorKind, Tools},
};
use sandbox_examples::{Outcome, scene::manager};
use serde_json::Value;

#[tokio::main]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mcp_server: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Outcome {
    let name = std::env::args().nth(1).unwrap_or_else(|| "main".into());
    let state = match std::env::var_os("SANDBOXER_STATE_DIR") {
        Some(dir) => dir.into(),
        None => default_state_dir()?,
    };
    let tools = granted(std::env::var("MCP_TOOLS").ok().as_deref())?;
    let sink = TracingSink::new(TurnId::new(format!("mcp-{}", std::process::id())));
    let request = CreateSandbox::profile("profile.agent-dev")
        .input("repo", ".")
        .consumer(Consumer::agent("mcp"));
    let sandbox = manager(&state).await?.acquire(&name, request, &sink).await?;
    let server = Server { sandbox, tools, sink: Arc::new(sink) };
    server.serve(stdio()).await?.waiting().await?;
    Ok(())
}

/// The tools that the environment grants.
fn granted(names: Option<&str>) -> Outcome<Tools> {
    let Some(names) = names else { return Ok(Tools::all()) };
    let mut tools = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        tools.push(Tool::by_name(name).ok_or_else(|| format!("there is no tool {name:?}"))?);
    }
    Ok(Tools::of(tools))
}

/// One sandbox and the tools that were granted for it.
#[derive(Debug, Clone)]
struct Server {
    sandbox: Sandbox,
    tools: Tools,
    sink: Arc<TracingSink>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut config = ServerConfig::default();
        config.capabilities = ServerCapabilities::builder().enable_tools().build();
        config.instructions = Some("Your own sandbox: run commands, edit files, go back.".into());
        config
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = self.tools.definitions().into_iter().map(described).collect();
        Ok(ListToolsResult::with_all_items(tools))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.map_or(Value::Null, Value::Object);
        let called = self.tools.call(&self.sandbox, &request.name, arguments, &*self.sink);
        let result = tokio::select! {
            result = called => result,
            // Dropping the call kills the command that it runs.
            () = context.ct.cancelled() => {
                return Err(ErrorData::internal_error("the client took it back", None));
            }
        };
        match result {
            Ok(value) => Ok(CallToolResult::structured(value).into()),
            Err(error) if error.kind() == ToolErrorKind::UnknownTool => {
                Err(ErrorData::invalid_params(error.to_string(), None))
            }
            // What the model can act on is a result for the model.
            Err(error) => Ok(CallToolResult::structured_error(error.to_json()).into()),
        }
    }
}

fn described(definition: ToolDefinition) -> McpTool {
    let schema = match definition.input_schema {
        Value::Object(schema) => schema,
        _ => serde_json::Map::new(),
    };
    let hints = ToolAnnotations::new()
        .read_only(definition.read_only)
        .destructive(definition.destructive)
        .open_world(false);
    McpTool::new(definition.name, definition.description, Arc::new(schema)).with_annotations(hints)
}
