//! Behaviour of the `zeromq` crate that the client relies on or works around. A change here wants a look there.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use zeromq::{
    DealerSocket, PullSocket, PushSocket, RouterSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend,
    ZmqMessage,
};

const PATIENCE: Duration = Duration::from_secs(20);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
}

async fn engine(address: &str) -> DealerSocket {
    let mut options = SocketOptions::default();
    options.peer_identity(vec![0, 0].try_into().unwrap());
    let mut socket = DealerSocket::with_options(options);
    socket.connect(address).await.unwrap();
    socket.send("hello".into()).await.unwrap();
    socket
}

fn to_engine(text: &'static str) -> ZmqMessage {
    vec![Bytes::from_static(&[0, 0]), Bytes::from_static(text.as_bytes())].try_into().unwrap()
}

/// A ROUTER hands an identity over to its latest connection, closes the former one, and tells nobody.
#[tokio::test]
async fn a_second_connection_takes_an_identity_over() {
    let mut router = RouterSocket::new();
    let mut events = router.monitor();
    let address = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut first = engine(&address).await;
    soon(router.recv()).await.unwrap();
    let mut second = engine(&address).await;
    soon(router.recv()).await.unwrap();

    router.send(to_engine("for the second")).await.unwrap();
    assert_eq!(soon(second.recv()).await.unwrap().into_vec()[0], "for the second");
    assert!(first.recv().now_or_never().is_none());
    drop(first);
    router.send(to_engine("still")).await.unwrap();
    assert_eq!(soon(second.recv()).await.unwrap().into_vec()[0], "still");

    let mut seen = Vec::new();
    while let Some(Some(event)) = events.next().now_or_never() {
        seen.push(event);
    }
    assert_eq!(seen.iter().filter(|event| matches!(event, SocketEvent::Accepted(..))).count(), 2);
    assert!(!seen.iter().any(|event| matches!(event, SocketEvent::Disconnected(_))));
}

/// A lost peer is noticed by whoever reads the socket; sending to it fails afterwards.
#[tokio::test]
async fn a_lost_peer_is_reported_while_the_socket_is_read() {
    let mut router = RouterSocket::new();
    let mut events = router.monitor();
    let address = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let lost = engine(&address).await;
    soon(router.recv()).await.unwrap();
    drop(lost);
    soon(async {
        loop {
            tokio::select! {
                _ = router.recv() => {}
                event = events.next() => if let Some(SocketEvent::Disconnected(_)) = event { break },
            }
        }
    })
    .await;
    assert!(router.send(to_engine("nobody")).await.is_err());
}

/// A PULL has no `Drop`: dropped, it leaves its connections open, and an engine would go on sending into them.
/// Shutting its backend down closes them.
#[tokio::test]
async fn a_pull_socket_lets_go_when_told() {
    let mut pull = PullSocket::new();
    let address = pull.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut push = PushSocket::new();
    push.connect(&address).await.unwrap();
    push.send("one".into()).await.unwrap();
    soon(pull.recv()).await.unwrap();
    pull.backend().shutdown();
    soon(async {
        while push.send("more".into()).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
