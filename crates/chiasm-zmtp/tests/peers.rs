//! Sockets and peers of the `zeromq` crate.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "peers/log.rs"]
mod log;

use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{
    Connection, Event, MAX_PEERS, MAX_PUBLISHED_BYTES, MAX_QUESTION_BYTES, Pull, Router, SendError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{
    DealerSocket, PubSocket, PushSocket, RouterSocket, Socket, SocketOptions, SocketRecv,
    SocketSend, ZmqMessage,
};

use log::Log;

const PATIENCE: Duration = Duration::from_secs(20);
const ENGINE: &[u8] = &[0, 0];
/// A DEALER's, without an identity.
const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
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

fn place(router: &Router) -> &str {
    router.address().trim_start_matches("tcp://")
}

fn greeting(mechanism: &[u8]) -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..12 + mechanism.len()].copy_from_slice(mechanism);
    greeting
}

fn text(frames: &[&'static str]) -> Vec<Bytes> {
    frames.iter().map(|frame| Bytes::from_static(frame.as_bytes())).collect()
}

/// Whose connection is made.
async fn connected(router: &mut Router) -> Bytes {
    match soon(router.next()).await {
        Event::Connected { identity, .. } => identity,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_dealer_is_heard_and_answered() {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("ipc://{}/socket", folder.path().display());
    for address in ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0", &path] {
        let mut router = Router::bind(address).await.unwrap();
        let mut engine = dealer(router.address()).await;
        let Event::Connected { identity, from } = soon(router.next()).await else {
            panic!("nobody has come yet")
        };
        assert_eq!(
            (&identity[..], from.is_some_and(|from| from.is_loopback())),
            (ENGINE, address.starts_with("tcp"))
        );
        assert!(router.has(ENGINE) && !router.has(b"other"));

        let large = Bytes::from(vec![7; MAX_QUESTION_BYTES - 1000]);
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
    assert!(!folder.path().join("socket").exists(), "it is removed with the socket");
}

#[tokio::test]
async fn a_lost_peer_is_told_of_after_all_that_it_said() {
    let mut pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let mut push = pusher(pull.address()).await;
    for _ in 0..100 {
        soon(push.send("said".into())).await.unwrap();
    }
    let Event::Connected { identity, .. } = soon(pull.next()).await else {
        panic!("nobody has come yet")
    };
    assert_eq!(identity[..], [0; 5]);
    assert_eq!(pull.peers(), 1);
    for _ in 0..99 {
        assert!(matches!(soon(pull.next()).await, Event::Message { .. }));
    }
    drop(push);
    assert_eq!(
        soon(pull.next()).await,
        Event::Message { identity: identity.clone(), frames: text(&["said"]) }
    );
    assert_eq!(soon(pull.next()).await, Event::Disconnected { identity });
    assert_eq!(pull.peers(), 0);
}

#[tokio::test]
async fn an_identity_is_taken_over() {
    let mut router = router().await;
    let mut first = TcpStream::connect(place(&router)).await.unwrap();
    let introduction =
        [&greeting(b"NULL")[..], b"\x04\x2b", &READY[2..], b"\x08Identity\0\0\0\x02\0\0"].concat();
    first.write_all(&introduction).await.unwrap();
    assert_eq!(connected(&mut router).await, ENGINE);
    let mut second = dealer(router.address()).await;
    connected(&mut router).await;
    router.send(ENGINE, text(&["for the second"])).await.unwrap();
    assert_eq!(soon(second.recv()).await.unwrap().into_vec(), text(&["for the second"]));
    soon(first.read_to_end(&mut Vec::new())).await.expect("its connection is closed");
    soon(second.send("still".into())).await.unwrap();
    assert!(
        matches!(soon(router.next()).await, Event::Message { .. }),
        "nobody is told of the first one's end"
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
    let [second, third] = <[String; 2]>::try_from(log.warnings()).expect("one for each");
    assert!(second.contains("a second peer has a known identity"), "{second}");
    assert!(second.contains(router.address()) && second.contains("127.0.0.1"), "{second}");
    assert!(third.contains("count=2"), "{third}");
}

#[tokio::test]
async fn who_is_not_there_gets_nothing() {
    let mut router = router().await;
    assert_eq!(router.send(ENGINE, text(&["nobody"])).await, Err(SendError::NoPeer));
    let engine = dealer(router.address()).await;
    connected(&mut router).await;
    drop(engine);
    assert!(matches!(soon(router.next()).await, Event::Disconnected { .. }));
    assert_eq!(router.send(ENGINE, text(&["nobody"])).await, Err(SendError::NoPeer));
}

#[tokio::test]
async fn an_address_is_free_when_its_socket_is_closed() {
    let mut pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let address = pull.address().to_owned();
    assert_eq!(Pull::bind(&address).await.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    let mut push = pusher(&address).await;
    soon(push.send("one".into())).await.unwrap();
    soon(pull.next()).await;
    pull.close().await;
    Pull::bind(&address).await.unwrap().close().await;
    // Its peers are let go as well.
    soon(async { while push.send("more".into()).await.is_ok() {} }).await;
    for wrong in ["127.0.0.1:1", "udp://127.0.0.1:1", "tcp://127.0.0.1", "ipc:///nowhere/at/all"] {
        Pull::bind(wrong).await.unwrap_err();
    }
}

#[tokio::test]
async fn a_successors_path_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let address = format!("ipc://{}", path.display());
    let former = Pull::bind(&address).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let _successor = Pull::bind(&address).await.unwrap();
    former.close().await;
    assert!(path.exists());
}

/// Half a message is the last thing that a peer is told.
#[tokio::test]
async fn a_peer_that_does_not_read_is_given_up() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    let frames = vec![Bytes::from(vec![1; 64 << 20])];
    tokio::time::timeout(Duration::from_millis(100), router.send(ENGINE, frames))
        .await
        .expect_err("nobody reads it");
    assert_eq!(router.send(ENGINE, text(&["more"])).await, Err(SendError::Lost));
    assert!(soon(engine.recv()).await.is_err());
}

#[tokio::test]
async fn what_was_sent_is_read_after_the_end() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    router.send(ENGINE, text(&["last words"])).await.unwrap();
    router.close().await;
    assert_eq!(soon(engine.recv()).await.unwrap().into_vec(), text(&["last words"]));
}

/// What a peer that is no peer may do: end its own connection.
#[tokio::test]
async fn others_are_not_hurt_by_nonsense() {
    let mut router = router().await;
    let mut engine = dealer(router.address()).await;
    connected(&mut router).await;
    let greeting = greeting(b"NULL");
    let huge = b"\x02\x20\0\0\0\0\0\0\0and so on";
    let strangers = [
        b"GET / HTTP/1.1\r\nhost: a\r\nuser-agent: somebody who is no engine at all\r\n\r\n"
            .to_vec(),
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
    for said in strangers {
        let mut stranger = TcpStream::connect(place(&router)).await.unwrap();
        stranger.write_all(&said).await.unwrap();
        let ends = async {
            let mut heard = Vec::new();
            // A reset is an end as well.
            let _ = stranger.read_to_end(&mut heard).await;
        };
        soon(async {
            tokio::select! {
                () = ends => {}
                () = async { loop { assert!(!matches!(router.next().await, Event::Message { .. })) } } => {}
            }
        })
        .await;
    }
    soon(engine.send("well".into())).await.unwrap();
    soon(async { while !matches!(router.next().await, Event::Message { .. }) {} }).await;
}

/// Connections that say nothing don't keep an engine out for longer than they may take.
#[tokio::test]
async fn silent_connections_make_room() {
    let mut router =
        Router::bind_within("tcp://127.0.0.1:0", Duration::from_millis(500)).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..MAX_PEERS + 1 {
        silent.push(TcpStream::connect(place(&router)).await.unwrap());
    }
    let _engine = dealer(router.address()).await;
    assert_eq!(connected(&mut router).await, ENGINE);
}

#[tokio::test]
async fn a_publisher_is_followed_to_its_end() {
    let address = Pull::bind("tcp://127.0.0.1:0").await.unwrap().address().to_owned();
    let soon_there = async {
        // A while after it is looked for first.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut publisher = PubSocket::new();
        publisher.bind(&address).await.unwrap();
        publisher
    };
    let following = Connection::subscribe(&address, b"a", PATIENCE);
    let (mut publisher, followed) = tokio::join!(soon_there, following);
    let mut followed = followed.unwrap();
    let mut next = Box::pin(followed.next());
    let first = soon(async {
        loop {
            publisher.send("b, which is not its topic".into()).await.unwrap();
            publisher.send("a".into()).await.unwrap();
            tokio::select! {
                heard = &mut next => break heard,
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
            match followed.next().await {
                Ok(frames) => assert_eq!(frames, text(&["a"])),
                Err(error) => break error,
            }
        }
    })
    .await;
    assert!(matches!(end.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{end}");
}

#[tokio::test]
async fn a_dealer_asks_a_router() {
    let mut router = RouterSocket::new();
    let address = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let mut asking = Connection::deal(&address, PATIENCE).await.unwrap();
    asking.send(text(&["", "question"])).await.unwrap();
    let mut heard = soon(router.recv()).await.unwrap().into_vec();
    assert_eq!(heard[1..], text(&["", "question"]));
    heard[2] = Bytes::from(vec![5; 1 << 20]);
    soon(router.send(heard.clone().try_into().unwrap())).await.unwrap();
    assert_eq!(soon(asking.next()).await.unwrap(), heard[1..]);
}

#[tokio::test]
async fn whom_it_can_t_talk_with_is_told_in_time() {
    let within = Duration::from_millis(200);
    let pull = Pull::bind("tcp://127.0.0.1:0").await.unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("tcp://{}", silent.local_addr().unwrap());
    for address in [pull.address(), &silent, "tcp://127.0.0.1:1", "ipc:///nowhere", "nowhere"] {
        assert!(soon(Connection::deal(address, within)).await.is_err(), "{address}");
    }
}

#[tokio::test]
async fn who_publishes_too_much_at_once_is_left() {
    for (length, is_fine) in [(MAX_PUBLISHED_BYTES - 64, true), (MAX_PUBLISHED_BYTES - 63, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let publishing = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&greeting(b"NULL")).await.unwrap();
            stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB").await.unwrap();
            stream.write_all(&[&[2][..], &(length as u64).to_be_bytes()].concat()).await.unwrap();
            // It may have gone by then.
            let _ = stream.write_all(&vec![7; length]).await;
            stream
        });
        let mut connection = Connection::subscribe(&address, b"", PATIENCE).await.unwrap();
        let heard = soon(connection.next()).await;
        assert_eq!(
            heard.map_err(|error| error.kind()).map(|frames| frames[0].len()).ok(),
            is_fine.then_some(length)
        );
        drop(connection);
        drop(publishing.await);
    }
}
