//! Tests of sockets with peers of the `zeromq` crate.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "peers/log.rs"]
mod log;

use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{
    Connection, Event, MAX_PEERS, MAX_PUBLISHED_BYTES, MAX_ROUTER_MESSAGE_BYTES, Pull, Router,
    SendError, XPub,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{
    DealerSocket, PubSocket, PushSocket, RouterSocket, Socket, SocketOptions, SocketRecv,
    SocketSend, SubSocket, ZmqMessage,
};

use log::Log;

const TIMEOUT: Duration = Duration::from_secs(20);
/// The identity of an engine.
const ENGINE: &[u8] = &[0, 0];
/// The READY command of a DEALER without an identity.
const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

/// Waits for a future with a timeout.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("timed out")
}

async fn router() -> Router {
    Router::bind("tcp://127.0.0.1:0").await.unwrap()
}

async fn dealer(address: &str) -> DealerSocket {
    let mut options = SocketOptions::default();
    options.peer_identity(ENGINE.to_vec().try_into().unwrap());
    let mut socket = DealerSocket::with_options(options);
    socket.connect(address).await.unwrap();
    socket
}

async fn pusher(address: &str) -> PushSocket {
    let mut socket = PushSocket::new();
    socket.connect(address).await.unwrap();
    socket
}

fn host_and_port(router: &Router) -> &str {
    router.address().trim_start_matches("tcp://")
}

fn greeting(mechanism: &[u8]) -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..12 + mechanism.len()].copy_from_slice(mechanism);
    greeting
}

fn text(frames: &[&'static str]) -> Vec<Bytes> {
    frames.iter().map(|frame| Bytes::from_static(frame.as_bytes())).collect()
}

/// Waits for a new peer and returns its identity.
async fn connected(router: &mut Router) -> Bytes {
    match soon(router.next()).await {
        Event::Connected { identity, .. } => identity,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn router_exchanges_messages_with_a_dealer() {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("ipc://{}/socket", folder.path().display());
    for address in ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0", &path] {
        let mut router = Router::bind(address).await.unwrap();
        let mut engine = dealer(router.address()).await;
        let Event::Connected { identity, from } = soon(router.next()).await else {
            panic!("no peer has connected yet")
        };
        assert_eq!(
            (&identity[..], from.is_some_and(|from| from.is_loopback())),
            (ENGINE, address.starts_with("tcp"))
        );
        assert!(router.has_peer(ENGINE) && !router.has_peer(b"other"));

        let large = Bytes::from(vec![7; MAX_ROUTER_MESSAGE_BYTES - 1000]);
        let message: ZmqMessage =
            vec![Bytes::from_static(b"one"), Bytes::new(), large.clone()].try_into().unwrap();
        soon(engine.send(message.clone())).await.unwrap();
        let frames = message.into_vec();
        assert_eq!(soon(router.next()).await, Event::Message { identity, frames: frames.clone() });
        let (sent, received) =
            soon(async { tokio::join!(router.send(ENGINE, frames.clone()), engine.recv()) }).await;
        sent.unwrap();
        assert_eq!(received.unwrap().into_vec(), frames);
        router.send(ENGINE, text(&["more"])).await.unwrap();
        assert_eq!(soon(engine.recv()).await.unwrap().into_vec(), text(&["more"]));
        router.close().await;
    }
    assert!(!folder.path().join("socket").exists(), "the file is removed with the socket");
}

#[tokio::test]
async fn disconnect_follows_the_peers_last_message() {
    let mut pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let mut push = pusher(pull.address()).await;
    for _ in 0..100 {
        soon(push.send("said".into())).await.unwrap();
    }
    let Event::Connected { identity, .. } = soon(pull.next()).await else {
        panic!("no peer has connected yet")
    };
    assert_eq!(identity[..], [0; 5]);
    assert_eq!(pull.peer_count(), 1);
    for _ in 0..99 {
        assert!(matches!(soon(pull.next()).await, Event::Message { .. }));
    }
    drop(push);
    assert_eq!(
        soon(pull.next()).await,
        Event::Message { identity: identity.clone(), frames: text(&["said"]) }
    );
    assert_eq!(soon(pull.next()).await, Event::Disconnected { identity });
    assert_eq!(pull.peer_count(), 0);
}

#[tokio::test]
async fn newer_connection_takes_an_identity_over() {
    let mut router = router().await;
    let mut first = TcpStream::connect(host_and_port(&router)).await.unwrap();
    let handshake =
        [&greeting(b"NULL")[..], b"\x04\x2b", &READY[2..], b"\x08Identity\0\0\0\x02\0\0"].concat();
    first.write_all(&handshake).await.unwrap();
    assert_eq!(connected(&mut router).await, ENGINE);
    let mut second = dealer(router.address()).await;
    connected(&mut router).await;
    router.send(ENGINE, text(&["for the second"])).await.unwrap();
    assert_eq!(soon(second.recv()).await.unwrap().into_vec(), text(&["for the second"]));
    soon(first.read_to_end(&mut Vec::new())).await.expect("the first connection is closed");
    soon(second.send("still".into())).await.unwrap();
    assert!(
        matches!(soon(router.next()).await, Event::Message { .. }),
        "the end of the first connection emits no event"
    );
}

#[tokio::test]
async fn second_peer_with_known_identity_is_logged() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let mut router = router().await;
    let _first = dealer(router.address()).await;
    connected(&mut router).await;
    assert_eq!(log.warnings(), [""; 0]);
    let _others = [dealer(router.address()).await, dealer(router.address()).await];
    connected(&mut router).await;
    connected(&mut router).await;
    let [second, third] =
        <[String; 2]>::try_from(log.warnings()).expect("one warning per replacement");
    assert!(second.contains("a new peer has the identity of a connected peer"), "{second}");
    assert!(second.contains(router.address()) && second.contains("127.0.0.1"), "{second}");
    assert!(third.contains("count=2"), "{third}");
}

#[tokio::test]
async fn send_to_a_missing_peer_fails() {
    let mut router = router().await;
    assert_eq!(router.send(ENGINE, text(&["nobody"])).await, Err(SendError::NoPeer));
    let engine = dealer(router.address()).await;
    connected(&mut router).await;
    drop(engine);
    assert!(matches!(soon(router.next()).await, Event::Disconnected { .. }));
    assert_eq!(router.send(ENGINE, text(&["nobody"])).await, Err(SendError::NoPeer));
}

#[tokio::test]
async fn closed_socket_frees_its_address() {
    let mut pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let address = pull.address().to_owned();
    assert_eq!(Pull::bind(&address).await.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    let mut push = pusher(&address).await;
    soon(push.send("one".into())).await.unwrap();
    soon(pull.next()).await;
    pull.close().await;
    Pull::bind(&address).await.unwrap().close().await;
    // Its peers are disconnected as well.
    soon(async { while push.send("more".into()).await.is_ok() {} }).await;
    for wrong in ["127.0.0.1:1", "udp://127.0.0.1:1", "tcp://127.0.0.1", "ipc:///nowhere/at/all"] {
        Pull::bind(wrong).await.unwrap_err();
    }
}

#[tokio::test]
async fn closed_socket_keeps_a_successors_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = format!("ipc://{}", path.display());
    let former = Pull::bind(&address).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let _successor = Pull::bind(&address).await.unwrap();
    former.close().await;
    assert!(path.exists());
}

/// A partly written message is the last one that a peer gets.
#[tokio::test]
async fn peer_that_does_not_read_is_dropped() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    let frames = vec![Bytes::from(vec![1; 64 << 20])];
    tokio::time::timeout(Duration::from_millis(100), router.send(ENGINE, frames))
        .await
        .expect_err("the peer does not read");
    assert_eq!(router.send(ENGINE, text(&["more"])).await, Err(SendError::Lost));
    assert!(soon(engine.recv()).await.is_err());
}

#[tokio::test]
async fn sent_messages_are_read_after_close() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    router.send(ENGINE, text(&["last words"])).await.unwrap();
    router.close().await;
    assert_eq!(soon(engine.recv()).await.unwrap().into_vec(), text(&["last words"]));
}

/// A client that violates the protocol only loses its own connection.
#[tokio::test]
async fn invalid_input_does_not_affect_other_peers() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    let greeting = greeting(b"NULL");
    let huge = b"\x02\x20\0\0\0\0\0\0\0and so on";
    let strangers = [
        b"GET / HTTP/1.1\r\nhost: a\r\nuser-agent: a client that speaks HTTP only\r\n\r\n".to_vec(),
        self::greeting(b"PLAIN").to_vec(),
        [&greeting[..], huge].concat(),
        [&greeting[..], b"\0\x03abc"].concat(),
        [&greeting[..], b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH"].concat(),
        [&greeting[..], b"\x04\x06\x05READY"].concat(),
        [&greeting[..], b"\x04\x1c\x05READY\x0bSocket-Type\xff\xff\xff\xffDEALER"].concat(),
        [&greeting[..], READY, huge].concat(),
        [&greeting[..], READY, b"\x02\0\0\0\0\0\x10\0\0"].concat(),
        [&greeting[..], READY, b"\x05\x01a"].concat(),
    ];
    for input in strangers {
        let mut stranger = TcpStream::connect(host_and_port(&router)).await.unwrap();
        stranger.write_all(&input).await.unwrap();
        let disconnected = async {
            let mut received = Vec::new();
            // A reset is a disconnect as well.
            let _ = stranger.read_to_end(&mut received).await;
        };
        soon(async {
            tokio::select! {
                () = disconnected => {}
                () = async {
                    loop {
                        assert!(!matches!(router.next().await, Event::Message { .. }));
                    }
                } => {}
            }
        })
        .await;
    }
    soon(engine.send("well".into())).await.unwrap();
    soon(async { while !matches!(router.next().await, Event::Message { .. }) {} }).await;
}

/// Connections without a handshake keep an engine out for at most the handshake timeout.
#[tokio::test]
async fn silent_connections_time_out() {
    let mut router =
        Router::bind_with_timeout("tcp://127.0.0.1:0", Duration::from_millis(500)).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..MAX_PEERS + 1 {
        silent.push(TcpStream::connect(host_and_port(&router)).await.unwrap());
    }
    let _engine = dealer(router.address()).await;
    assert_eq!(connected(&mut router).await, ENGINE);
}

#[tokio::test]
async fn subscription_lasts_to_the_publishers_end() {
    let address = Pull::bind("tcp://127.0.0.1:0").await.unwrap().address().to_owned();
    let late_publisher = async {
        // Some time after the first attempt to connect.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut publisher = PubSocket::new();
        publisher.bind(&address).await.unwrap();
        publisher
    };
    let subscribing = Connection::subscribe(&address, b"a", TIMEOUT);
    let (mut publisher, subscription) = tokio::join!(late_publisher, subscribing);
    let mut subscription = subscription.unwrap();
    let mut next = Box::pin(subscription.next());
    let first = soon(async {
        loop {
            publisher.send("b, which is not its topic".into()).await.unwrap();
            publisher.send("a".into()).await.unwrap();
            tokio::select! {
                received = &mut next => break received,
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
        }
    })
    .await;
    assert_eq!(first.unwrap(), text(&["a"]));
    drop(next);
    publisher.close().await;
    let end = soon(async {
        loop {
            match subscription.next().await {
                Ok(frames) => assert_eq!(frames, text(&["a"])),
                Err(error) => break error,
            }
        }
    })
    .await;
    assert!(matches!(end.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{end}");
}

#[tokio::test]
async fn dealer_exchanges_messages_with_a_router() {
    let mut router = RouterSocket::new();
    let address = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut dealer = Connection::connect_dealer(&address, TIMEOUT).await.unwrap();
    dealer.send(text(&["", "question"])).await.unwrap();
    let mut message = soon(router.recv()).await.unwrap().into_vec();
    assert_eq!(message[1..], text(&["", "question"]));
    message[2] = Bytes::from(vec![5; 1 << 20]);
    soon(router.send(message.clone().try_into().unwrap())).await.unwrap();
    assert_eq!(soon(dealer.next()).await.unwrap(), message[1..]);
}

#[tokio::test]
async fn connect_fails_within_the_timeout() {
    let timeout = Duration::from_millis(200);
    let pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("tcp://{}", silent.local_addr().unwrap());
    for address in [pull.address(), &silent, "tcp://127.0.0.1:1", "ipc:///nowhere", "nowhere"] {
        assert!(soon(Connection::connect_dealer(address, timeout)).await.is_err(), "{address}");
    }
}

#[tokio::test]
async fn too_large_publication_is_refused() {
    for (length, is_accepted) in
        [(MAX_PUBLISHED_BYTES - 64, true), (MAX_PUBLISHED_BYTES - 63, false)]
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let publishing = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&greeting(b"NULL")).await.unwrap();
            stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB").await.unwrap();
            stream.write_all(&[&[2][..], &(length as u64).to_be_bytes()].concat()).await.unwrap();
            // The subscriber may have disconnected by then.
            let _ = stream.write_all(&vec![7; length]).await;
            stream
        });
        let mut connection = Connection::subscribe(&address, b"", TIMEOUT).await.unwrap();
        let received = soon(connection.next()).await;
        assert_eq!(
            received.map_err(|error| error.kind()).map(|frames| frames[0].len()).ok(),
            is_accepted.then_some(length)
        );
        drop(connection);
        drop(publishing.await);
    }
}

/// Both kinds of subscribers get every message, and their subscriptions are events. A peer of
/// another kind is refused.
#[tokio::test]
async fn xpub_sends_to_all_subscribers() {
    let mut publisher = XPub::bind("tcp://127.0.0.1:0").await.unwrap();
    let address = publisher.address().to_owned();
    publisher.send_all(&text(&["lost"])).await;
    let mut subscribers = [SubSocket::new(), SubSocket::new()];
    for subscriber in &mut subscribers {
        subscriber.connect(&address).await.unwrap();
        subscriber.subscribe("").await.unwrap();
    }
    for _ in 0..4 {
        match soon(publisher.next()).await {
            Event::Connected { .. } => {}
            Event::Message { frames, .. } => assert_eq!(frames, text(&["\u{1}"])),
            other @ Event::Disconnected { .. } => panic!("{other:?}"),
        }
    }
    publisher.send_all(&text(&["one", "two"])).await;
    for subscriber in &mut subscribers {
        let message = soon(subscriber.recv()).await.unwrap();
        assert_eq!(message.into_vec(), text(&["one", "two"]));
    }
    let [gone, mut left] = subscribers;
    drop(gone);
    assert!(matches!(soon(publisher.next()).await, Event::Disconnected { .. }));
    publisher.send_all(&text(&["three"])).await;
    assert_eq!(soon(left.recv()).await.unwrap().into_vec(), text(&["three"]));
    let mut pusher = PushSocket::new();
    assert!(soon(pusher.connect(&address)).await.is_err());
}
