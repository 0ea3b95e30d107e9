//! Connections of frontends.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use chiasm_media::ByteBudget;
use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;

use super::shares::{Held, Shares};
use super::steps::Steps;
use crate::peer::Peer;
use crate::tls::AgentTls;
use crate::wire::Wire;

/// After no connection could be accepted, mostly because the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is told that there are too many connections.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// What each client of HTTP/2 says first, as soon as it is connected. One that says nothing would
/// be waited for without an end: what serves it asks for signs of life once it has heard this.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How many cores there are for each thread that agrees on keys. There is always one.
const CORES_OF_A_STEP: usize = 4;

/// The first byte of TLS.
const HANDSHAKE: u8 = 0x16;
/// What frontends are told that speak in plain text where TLS is wanted, and the other way round:
/// each takes it for what it is not. The first is TLS for something that was not expected.
const NOT_PLAIN: &[u8] = &[0x15, 3, 3, 0, 2, 2, 10];
const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";

/// What connections may take.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// How long a frontend may take to agree on TLS, and to begin to speak.
    handshake: Duration,
    /// Connections at once. A frontend has three, and each address as many at most as it leaves to
    /// others.
    connections: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), connections: 1024 }
    }
}

/// The connections that frontends make, until what is returned is dropped.
pub(super) fn accept(
    listener: TcpListener,
    tls: Option<Arc<AgentTls>>,
    bounds: Bounds,
) -> ReceiverStream<io::Result<Wire>> {
    let (accepted, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let places = Shares::new(ByteBudget::new(bounds.connections), 1);
        let (full, misled) = (Seldom::default(), Arc::new(Seldom::default()));
        let steps = Arc::new(Steps::new(
            (available_parallelism().map_or(1, usize::from) / CORES_OF_A_STEP).max(1),
        ));
        loop {
            let (stream, from) = tokio::select! {
                () = accepted.closed() => return,
                next = listener.accept() => match next {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "no connection of a frontend can be accepted");
                        sleep(PAUSE).await;
                        continue;
                    }
                },
            };
            let from = from.ip().to_canonical();
            let Ok(place) = places.of(Peer::at(from)).take(1) else {
                if full.is_due() {
                    tracing::warn!(
                        most = bounds.connections,
                        address = %from,
                        "connections are closed: frontends there have as many as they leave to others"
                    );
                }
                continue;
            };
            let (accepted, tls) = (accepted.clone(), tls.clone());
            let tls = tls.map(|tls| (tls, steps.clone()));
            let misled = misled.clone();
            tokio::spawn(async move {
                match timeout(bounds.handshake, shake(stream, from, tls, place, &misled)).await {
                    // Nobody serves any more if it is not taken.
                    Ok(Ok(wire)) => drop(accepted.send(Ok(wire)).await),
                    Ok(Err(error)) => tracing::debug!(%error, "a frontend's connection is closed"),
                    Err(_) => tracing::debug!(
                        "a frontend's connection is closed: it did not begin to speak in time"
                    ),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

/// What is told now and then, however often it happens.
#[derive(Default)]
struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    /// Whether it is to be told now.
    fn is_due(&self) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = told.is_none_or(|told| told.elapsed() > TOLD_EVERY);
        if is_due {
            *told = Some(Instant::now());
        }
        is_due
    }
}

/// A connection that has begun to speak HTTP/2. One that speaks TLS and should not, or the other
/// way round, is told so, and the log if that is due.
async fn shake(
    stream: TcpStream,
    from: IpAddr,
    tls: Option<(Arc<AgentTls>, Arc<Steps>)>,
    place: Held,
    misled: &Seldom,
) -> io::Result<Wire> {
    // Each token is a message of its own.
    stream.set_nodelay(true)?;
    let mut first = [0];
    stream.peek(&mut first).await?;
    if let Some((answer, why)) = mistaken(first[0], tls.is_some()) {
        if misled.is_due() {
            tracing::warn!(address = %from, why, "a frontend is turned away");
        }
        return Err(turn_away(stream, answer, why).await?);
    }
    let mut wire = match tls {
        Some((tls, steps)) => Wire::encrypted(agree(stream, Peer::at(from), &tls, &steps).await?),
        None => Wire::plain(stream),
    };
    let mut said = [0; PREFACE.len()];
    wire.read_exact(&mut said).await?;
    match said == *PREFACE {
        true => Ok(wire.placed(Peer::at(from), PREFACE, place)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak HTTP/2")),
    }
}

/// Agrees on TLS. The answer to the first message, which anybody can send, takes a key exchange and
/// a signature: a millisecond with RSA.
async fn agree(
    stream: TcpStream,
    peer: Peer,
    tls: &Arc<AgentTls>,
    steps: &Steps,
) -> io::Result<TlsStream<TcpStream>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let server = tls.sides().await.server;
    steps.run(peer, move || hello.into_stream(server)).await?.await
}

/// What is answered to a frontend that speaks TLS and should not, or the other way round, and what
/// is wrong then.
fn mistaken(first: u8, has_certificates: bool) -> Option<(&'static [u8], &'static str)> {
    match has_certificates {
        true if first == PREFACE[0] => Some((
            NOT_PLAIN,
            "it speaks in plain text, and this agent has certificates: \
             the frontend lacks --agent-certfile, --agent-keyfile and --agent-ca-file",
        )),
        false if first == HANDSHAKE => Some((
            NOT_TLS,
            "it speaks TLS, and this agent has no certificates: \
             the agent lacks --agent-certfile, --agent-keyfile and --agent-ca-file",
        )),
        _ => None,
    }
}

/// Answers whoever can't be understood, and waits until they have heard it: a connection that is
/// closed before all of it was read loses what was said last.
async fn turn_away(
    mut stream: TcpStream,
    answer: &[u8],
    why: &'static str,
) -> io::Result<io::Error> {
    stream.write_all(answer).await?;
    stream.shutdown().await?;
    while stream.read(&mut [0; 1024]).await? > 0 {}
    Ok(io::Error::new(io::ErrorKind::InvalidData, why))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpSocket;
    use tokio_stream::StreamExt;
    use tonic::transport::server::Connected;

    use super::*;

    /// A connection of a client that has said this.
    async fn saying(to: std::net::SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    async fn is_closed(mut stream: TcpStream) -> bool {
        let read = timeout(Duration::from_secs(10), stream.read(&mut [0; 1])).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    #[tokio::test]
    async fn who_does_not_begin_to_speak_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let bounds = Bounds { handshake: Duration::from_millis(50), ..Bounds::default() };
        let mut connections = accept(listener, None, bounds);
        for bytes in [&b""[..], &PREFACE[..23], &[b'x'; 24], b"GET / HTTP/1.1\r\n\r\n"] {
            assert!(is_closed(saying(to, bytes).await).await, "{bytes:?}");
        }
        let _client = saying(to, &[PREFACE, b"more"].concat()).await;
        let mut wire = connections.next().await.unwrap().unwrap();
        assert_eq!(wire.connect_info(), Peer::at(to.ip()));
        let mut said = [0; PREFACE.len() + 4];
        // It may be read in pieces.
        wire.read_exact(&mut said[..5]).await.unwrap();
        wire.read_exact(&mut said[5..]).await.unwrap();
        assert_eq!(said[..], [PREFACE, b"more"].concat());
    }

    #[tokio::test]
    async fn who_speaks_tls_where_none_is_spoken_hears_that_it_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let _connections = accept(listener, None, Bounds::default());
        let mut client = saying(to, &[&[HANDSHAKE, 3, 1][..], &[7; 5000]].concat()).await;
        let mut heard = Vec::new();
        timeout(Duration::from_secs(10), client.read_to_end(&mut heard)).await.unwrap().unwrap();
        assert_eq!(heard, NOT_TLS);
    }

    #[tokio::test]
    async fn an_address_has_as_many_connections_at_most_as_it_leaves_to_others() {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut connections =
            accept(listener, None, Bounds { connections: 8, ..Bounds::default() });
        let from = async |machine: u8| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 0, machine], 0).into()).unwrap();
            let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
            // It may be closed already.
            let _ = stream.write_all(PREFACE).await;
            stream
        };
        let mut clients = Vec::new();
        let mut wires = Vec::new();
        for (machine, most) in [(1, 4), (2, 2), (3, 1)] {
            for _ in 0..most {
                clients.push(from(machine).await);
                wires.push(
                    timeout(Duration::from_secs(10), connections.next())
                        .await
                        .unwrap()
                        .unwrap()
                        .unwrap(),
                );
            }
            assert!(is_closed(from(machine).await).await, "{machine}");
        }
        // The first one has more than it leaves to others, until it has less.
        assert!(is_closed(from(1).await).await);
        wires.drain(..3);
        let _client = from(1).await;
        assert!(
            timeout(Duration::from_secs(10), connections.next()).await.unwrap().unwrap().is_ok()
        );
    }
}
