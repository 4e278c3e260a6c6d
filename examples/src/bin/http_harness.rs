//! The manager behind HTTP: each turn's events as a stream of their own.
//!
//! This is why sinks are passed to each call: two turns run at once in one process, and each one's events
//! go to whoever asked for that turn. Requests, answers and events are the SDK's own types as JSON.
//!
//! - `POST /sandboxes/{name}` with a `CreateSandbox`: the sandbox of this name, there or made
//! - `GET /sandboxes/{name}`: its status
//! - `POST /sandboxes/{name}/turns/{turn}` with a tool's name and arguments: server-sent events, the turn's
//!   events as they happen, and at last the tool's answer
//! - `DELETE /sandboxes/{name}`
//!
//! A client that goes away takes its turn back: the command that it runs is killed.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::{convert::Infallible, process::ExitCode};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
    routing::post,
};
use futures::stream;
use sandbox_core::{
    ChannelSink, CreateSandbox, Error, ErrorKind, SandboxEvent, SandboxManager, SandboxStatus,
    Suppressed, TurnId, tools::Tools,
};
use sandbox_examples::{
    Outcome, check, conclude,
    scene::{Scene, line},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc};

/// How many events of a turn wait for a slow client; then the turn waits.
const QUEUE: usize = 64;

/// What a turn does.
#[derive(Debug, Serialize, Deserialize)]
struct Call {
    tool: String,
    #[serde(default)]
    arguments: Value,
}

/// An error as an answer.
struct Failed(Error);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        let status = match self.0.kind() {
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::InvalidSpec | ErrorKind::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::SpecMismatch | ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Unavailable | ErrorKind::Timeout => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let retryable = self.0.is_retryable();
        let told = json!({"error": self.0.to_string(), "retryable": retryable});
        (status, Json(told)).into_response()
    }
}

fn service(manager: SandboxManager) -> Router {
    Router::new()
        .route("/sandboxes/{name}", post(acquire).get(status).delete(destroy))
        .route("/sandboxes/{name}/turns/{turn}", post(turn))
        .with_state(manager)
}

async fn acquire(
    State(manager): State<SandboxManager>,
    Path(name): Path<String>,
    Json(request): Json<CreateSandbox>,
) -> Result<Json<SandboxStatus>, Failed> {
    let sandbox = manager.acquire(&name, request, &Suppressed).await?;
    Ok(Json(sandbox.status().await?))
}

async fn status(
    State(manager): State<SandboxManager>,
    Path(name): Path<String>,
) -> Result<Json<SandboxStatus>, Failed> {
    Ok(Json(manager.open(&name).await?.status().await?))
}

async fn destroy(
    State(manager): State<SandboxManager>,
    Path(name): Path<String>,
) -> Result<Json<SandboxStatus>, Failed> {
    let sandbox = manager.open(&name).await?;
    sandbox.destroy(&Suppressed).await?;
    Ok(Json(sandbox.status().await?))
}

async fn turn(
    State(manager): State<SandboxManager>,
    Path((name, turn)): Path<(String, String)>,
    Json(call): Json<Call>,
) -> Result<impl IntoResponse, Failed> {
    let sandbox = manager.open(&name).await?;
    let (sink, mut events) = ChannelSink::new(TurnId::new(turn), QUEUE);
    let (out, mut answers) = mpsc::channel::<Event>(QUEUE);
    tokio::spawn(async move {
        let tools = Tools::all();
        let called = async {
            let called = tools.call(&sandbox, &call.tool, call.arguments, &sink).await;
            // The last of the events have been told: that ends their stream.
            drop(sink);
            called
        };
        let forward = async {
            while let Some(event) = events.recv().await {
                if send(&out, "event", &event).await.is_err() {
                    return;
                }
            }
        };
        let both = async { tokio::join!(called, forward).0 };
        // A client that goes away takes its turn back.
        let answer = tokio::select! {
            answer = both => answer,
            () = out.closed() => return,
        };
        let told = answer.unwrap_or_else(|error| error.to_json());
        let _ = send(&out, "answer", &told).await;
    });
    let answers = stream::poll_fn(move |context| {
        answers.poll_recv(context).map(|e| e.map(Ok::<_, Infallible>))
    });
    Ok(Sse::new(answers).keep_alive(KeepAlive::default()))
}

async fn send(out: &mpsc::Sender<Event>, kind: &str, value: &impl Serialize) -> Result<(), ()> {
    let event = Event::default().event(kind).json_data(value).map_err(drop)?;
    out.send(event).await.map_err(drop)
}

#[tokio::main]
async fn main() -> ExitCode {
    conclude(tell().await)
}

async fn tell() -> Outcome {
    let scene = Scene::begin().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = tokio::spawn(axum::serve(listener, service(scene.manager.clone())).into_future());
    println!("▸ a harness at http://{address}");
    let told = story(&scene, &client::Client::new(address)).await;
    server.abort();
    scene.end().await?;
    told
}

async fn story(scene: &Scene, client: &client::Client) -> Outcome {
    for name in ["left", "right"] {
        let request = serde_json::to_value(scene.request("http-harness"))?;
        let status = client.json("POST", &format!("/sandboxes/{name}"), &request).await?;
        check(status["state"] == "ready", "a sandbox is made over HTTP")?;
    }

    println!("\n▸ two turns at once");
    let run = |text: &str| json!({"tool": "sandbox_exec", "arguments": {"command": text}});
    let (left_turn, right_turn) = (run("echo on the left"), run("echo on the right"));
    let (left, right) = tokio::join!(
        client.turn("/sandboxes/left/turns/l-1", &left_turn),
        client.turn("/sandboxes/right/turns/r-1", &right_turn),
    );
    for ((events, answer), turn, words) in
        [(left?, "l-1", "on the left\n"), (right?, "r-1", "on the right\n")]
    {
        for event in &events {
            println!("      {}", line(event));
        }
        let kinds: Vec<String> = events.iter().map(SandboxEvent::name).collect();
        check(kinds == ["process_started", "process_exited"], "the turn's events come, in order")?;
        let own = events.iter().all(|event| event.turn == Some(TurnId::new(turn)));
        check(own, "and no other turn's")?;
        check(answer["stdout"] == words, "then the answer")?;
    }

    println!("\n▸ mistakes are answers too");
    let wrong = json!({"tool": "rewind_sandbox", "arguments": {"snapshot_id": "snp_x"}});
    let (_, answer) = client.turn("/sandboxes/left/turns/l-2", &wrong).await?;
    check(
        answer["error"]["kind"] == "invalid_arguments",
        "a tool's mistake is the model's to read",
    )?;
    let missing = client.json("GET", "/sandboxes/nobody", &Value::Null).await;
    check(
        missing.is_err_and(|error| error.to_string().contains("404")),
        "a missing sandbox is 404",
    )?;

    println!("\n▸ a client that goes away takes its turn back");
    let long = run("sleep 86000");
    client.begin_and_go_away("/sandboxes/left/turns/l-3", &long).await?;
    let sandbox = scene.manager.open("left").await?;
    let mut watch = scene.manager.watch(sandbox.id(), 0);
    let ended = async {
        loop {
            let event = watch.next().await?;
            if event.name() == "process_exited" && event.turn == Some(TurnId::new("l-3")) {
                return Outcome::Ok(line(&event));
            }
        }
    };
    let ended = tokio::time::timeout(std::time::Duration::from_secs(60), ended).await??;
    println!("      {ended}");
    check(ended.contains("cancelled"), "its command was killed, and the history says so")?;

    for name in ["left", "right"] {
        let status = client.json("DELETE", &format!("/sandboxes/{name}"), &Value::Null).await?;
        check(status["state"] == "destroyed", "and removed over HTTP")?;
    }
    Ok(())
}

/// As much of an HTTP client as this story needs.
mod client {
    use std::net::SocketAddr;

    use http_body_util::{BodyExt, Full};
    use hyper::{
        Request,
        body::{Bytes, Incoming},
        client::conn::http1,
    };
    use hyper_util::rt::TokioIo;
    use sandbox_core::SandboxEvent;
    use sandbox_examples::Outcome;
    use serde_json::Value;
    use tokio::net::TcpStream;

    #[derive(Debug)]
    pub(super) struct Client {
        address: SocketAddr,
    }

    impl Client {
        pub(super) fn new(address: SocketAddr) -> Self {
            Self { address }
        }

        /// A request on a connection of its own.
        async fn send(&self, method: &str, path: &str, body: &Value) -> Outcome<Incoming> {
            let stream = TcpStream::connect(self.address).await?;
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", "harness")
                .header("content-type", "application/json")
                .body(Full::new(Bytes::from(body)))?;
            let response = sender.send_request(request).await?;
            let status = response.status();
            if !status.is_success() {
                let said = response.into_body().collect().await?.to_bytes();
                return Err(format!("{status}: {}", String::from_utf8_lossy(&said)).into());
            }
            Ok(response.into_body())
        }

        pub(super) async fn json(&self, method: &str, path: &str, body: &Value) -> Outcome<Value> {
            let body = self.send(method, path, body).await?;
            Ok(serde_json::from_slice(&body.collect().await?.to_bytes())?)
        }

        /// A turn: its events, and the answer.
        pub(super) async fn turn(
            &self,
            path: &str,
            call: &Value,
        ) -> Outcome<(Vec<SandboxEvent>, Value)> {
            let body = self.send("POST", path, call).await?.collect().await?.to_bytes();
            let text = String::from_utf8(body.to_vec())?;
            let (mut events, mut answer) = (Vec::new(), Value::Null);
            for message in text.split("\n\n") {
                let field = |name: &str| {
                    message.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
                };
                match (field("event:"), field("data:")) {
                    (Some("event"), Some(data)) => events.push(serde_json::from_str(data)?),
                    (Some("answer"), Some(data)) => answer = serde_json::from_str(data)?,
                    _ => {}
                }
            }
            Ok((events, answer))
        }

        /// Begins a turn, and hangs up when its first event has come.
        pub(super) async fn begin_and_go_away(&self, path: &str, call: &Value) -> Outcome {
            let mut body = self.send("POST", path, call).await?;
            body.frame().await.ok_or("no event came")??;
            Ok(())
        }
    }
}
