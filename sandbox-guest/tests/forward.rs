//! The real guest program, asked to carry connections by clients that do as they like.
#![cfg(all(feature = "program", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::{Client, Guest, next};
use sandbox_guest::{
    FailureKind, Input, Request, Response,
    frame::{self, Channel, Frame},
    mux::Stream,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// How many connections a guest carries at once.
const MOST: usize = 512;

/// A service, and a connection to it through the guest.
async fn connected(client: &Client, listener: &TcpListener) -> (Stream, TcpStream) {
    let port = listener.local_addr().unwrap().port();
    let mut stream = client.send(&Request::Connect { port }).await;
    let answer = next(&mut stream).await;
    assert!(matches!(answer, Response::Connected), "{answer:?}");
    (stream, listener.accept().await.unwrap().0)
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("it hangs")
}

#[tokio::test]
async fn each_side_says_when_that_was_all() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (mut stream, mut service) = connected(&client, &listener).await;
    frame::write_data(&mut stream, Channel::In, b"question").await.unwrap();
    frame::write_message(&mut stream, &Input::End).await.unwrap();
    let mut heard = String::new();
    soon(service.read_to_string(&mut heard)).await.unwrap();
    assert_eq!(heard, "question");
    service.write_all(b"answer").await.unwrap();
    drop(service);
    let data = soon(frame::read(&mut stream)).await.unwrap().unwrap();
    assert_eq!(data, Frame::Data(Channel::Out, b"answer".to_vec()));
    assert!(matches!(next(&mut stream).await, Response::Done(_)));
    stream.shutdown().await.unwrap();
    assert!(soon(frame::read(&mut stream)).await.unwrap().is_none());
}

#[tokio::test]
async fn what_makes_no_sense_breaks_the_connection_off_and_no_other() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (mut other, mut service_of_other) = connected(&client, &listener).await;
    let mut end_and_more = frame::encode(&Input::End).unwrap();
    end_and_more.extend_from_slice(&frame::data_head(Channel::In, 1));
    end_and_more.push(b'x');
    let said = |channel| [&frame::data_head(channel, 1)[..], b"x"].concat();
    for nonsense in [
        said(Channel::Out),
        said(Channel::Err),
        end_and_more,
        frame::encode(&Input::Detach).unwrap(),
        frame::encode(&Request::Status).unwrap(),
        vec![0xff; 5],
        vec![0, 0, 0, 2, 9, 9],
    ] {
        let (mut stream, mut service) = connected(&client, &listener).await;
        stream.write_all(&nonsense).await.unwrap();
        stream.flush().await.unwrap();
        // Nothing comes but the end, and what the service hears is no more than was said.
        assert!(!matches!(soon(frame::read(&mut stream)).await, Ok(Some(_))), "{nonsense:?}");
        let mut heard = Vec::new();
        let _ = soon(service.read_to_end(&mut heard)).await;
        assert!(heard.is_empty(), "{nonsense:?}");
    }
    frame::write_data(&mut other, Channel::In, b"on").await.unwrap();
    other.flush().await.unwrap();
    let mut heard = [0; 2];
    soon(service_of_other.read_exact(&mut heard)).await.unwrap();
    assert_eq!(&heard, b"on");
}

#[tokio::test]
async fn what_cannot_be_reached_says_why() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let failure = soon(client.ask(Request::Connect { port })).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::NotFound);
    assert!(failure.message.contains(&port.to_string()), "{failure}");
    assert!(soon(client.ask(Request::Connect { port: 0 })).await.is_err());
}

#[tokio::test]
async fn there_are_so_many_at_once_and_no_more() {
    let guest = Guest::start();
    let client = guest.connect().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut open = Vec::new();
    for _ in 0..MOST {
        let (stream, service) = connected(&client, &listener).await;
        drop(service);
        open.push(stream);
    }
    let failure = soon(client.ask(Request::Connect { port })).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::LimitExceeded);
    assert!(failure.message.contains(&MOST.to_string()), "{failure}");
    drop(open.pop());
    // As soon as the guest has heard of it.
    soon(async {
        while client.ask(Request::Connect { port }).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
