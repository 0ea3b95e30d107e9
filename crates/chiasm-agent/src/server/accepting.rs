//! Accepting connections of frontends.

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

use super::shares::{ShareGuard, Shares};
use super::steps::Steps;
use crate::peer::Peer;
use crate::tls::AgentTls;
use crate::wire::Wire;

/// The pause after a failed accept, which is usually caused by a lack of file descriptors.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The minimum interval between two log lines of the same kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// The HTTP/2 client preface, sent right after connecting. It is awaited before the HTTP/2 server
/// takes over, whose keep-alive pings only start after it.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The number of cores for each thread that computes TLS handshakes. There is always one thread.
const CORES_PER_STEP: usize = 4;

/// The first byte of a TLS ClientHello.
const TLS_HANDSHAKE: u8 = 0x16;
/// The answer to a plain-text frontend of an agent with TLS: a TLS alert for an unexpected message.
const TLS_REQUIRED: &[u8] = &[0x15, 3, 3, 0, 2, 2, 10];
/// The answer to a TLS frontend of an agent without TLS, which the frontend can't take for TLS.
const TLS_UNSUPPORTED: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";

/// The bounds on connections.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The timeout for the TLS handshake and the HTTP/2 preface.
    handshake: Duration,
    /// The maximum number of connections. A frontend has three, and an address may have at most as
    /// many as it leaves to others.
    connections: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), connections: 1024 }
    }
}

/// Accepts connections of frontends until the returned stream is dropped.
pub(super) fn accept(
    listener: TcpListener,
    tls: Option<Arc<AgentTls>>,
    bounds: Bounds,
) -> ReceiverStream<io::Result<Wire>> {
    let (accepted, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let slots = Shares::new(ByteBudget::new(bounds.connections), 1);
        let full_log = LogThrottle::default();
        let mismatch_log = Arc::new(LogThrottle::default());
        let cores = available_parallelism().map_or(1, usize::from);
        let steps = Arc::new(Steps::new((cores / CORES_PER_STEP).max(1)));
        loop {
            let (stream, address) = tokio::select! {
                () = accepted.closed() => return,
                next = listener.accept() => match next {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "can't accept connections of frontends");
                        sleep(ACCEPT_RETRY_PAUSE).await;
                        continue;
                    }
                },
            };
            let address = address.ip().to_canonical();
            let Ok(slot) = slots.for_peer(Peer::from_address(address)).acquire(1) else {
                if full_log.is_due() {
                    tracing::warn!(
                        max_connections = bounds.connections,
                        %address,
                        "closing a connection: \
                         the frontends at this address have their share of connections"
                    );
                }
                continue;
            };
            let accepted = accepted.clone();
            let tls = tls.clone().map(|tls| (tls, steps.clone()));
            let mismatch_log = mismatch_log.clone();
            tokio::spawn(async move {
                let handshake = handshake(stream, address, tls, slot, &mismatch_log);
                match timeout(bounds.handshake, handshake).await {
                    // Fails if the server has stopped.
                    Ok(Ok(wire)) => drop(accepted.send(Ok(wire)).await),
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "a frontend's handshake failed");
                    }
                    Err(_) => tracing::debug!("a frontend's handshake timed out"),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

/// A limit on how often a message is logged.
#[derive(Default)]
struct LogThrottle(Mutex<Option<Instant>>);

impl LogThrottle {
    /// Returns `true` if the message is to be logged now.
    fn is_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| last.elapsed() > LOG_INTERVAL);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

/// Performs the handshake of a connection up to the HTTP/2 preface.
///
/// A frontend that uses TLS where it should not, or the other way round, gets an answer that says
/// so, and a throttled log line.
async fn handshake(
    stream: TcpStream,
    address: IpAddr,
    tls: Option<(Arc<AgentTls>, Arc<Steps>)>,
    slot: ShareGuard,
    mismatch_log: &LogThrottle,
) -> io::Result<Wire> {
    // Each token is a message of its own.
    stream.set_nodelay(true)?;
    let mut first = [0];
    stream.peek(&mut first).await?;
    if let Some((answer, why)) = tls_mismatch(first[0], tls.is_some()) {
        if mismatch_log.is_due() {
            tracing::warn!(%address, why, "a frontend is refused");
        }
        return Err(refuse(stream, answer, why).await?);
    }
    let peer = Peer::from_address(address);
    let mut wire = match tls {
        Some((tls, steps)) => Wire::encrypted(tls_handshake(stream, peer, &tls, &steps).await?),
        None => Wire::plain(stream),
    };
    let mut received = [0; PREFACE.len()];
    wire.read_exact(&mut received).await?;
    if received != *PREFACE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the frontend does not use HTTP/2"));
    }
    Ok(wire.with_peer(peer, PREFACE, slot))
}

/// Performs the TLS handshake. The answer to a ClientHello, which anybody can send, takes a key
/// exchange and a signature: a millisecond with RSA.
async fn tls_handshake(
    stream: TcpStream,
    peer: Peer,
    tls: &Arc<AgentTls>,
    steps: &Steps,
) -> io::Result<TlsStream<TcpStream>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let server = tls.configs().await.server;
    steps.run(peer, move || hello.into_stream(server)).await?.await
}

/// Returns the answer to a frontend that uses TLS where it should not, or the other way round, and
/// an explanation.
fn tls_mismatch(first: u8, has_certificates: bool) -> Option<(&'static [u8], &'static str)> {
    if has_certificates && first == PREFACE[0] {
        return Some((
            TLS_REQUIRED,
            "the frontend uses plain text, but this agent uses TLS: \
             give the frontend --agent-certfile, --agent-keyfile and --agent-ca-file",
        ));
    }
    if !has_certificates && first == TLS_HANDSHAKE {
        return Some((
            TLS_UNSUPPORTED,
            "the frontend uses TLS, but this agent uses plain text: \
             give the agent --agent-certfile, --agent-keyfile and --agent-ca-file",
        ));
    }
    None
}

/// Sends an answer to a frontend that uses the wrong protocol, and waits until it has disconnected:
/// a connection that is closed with unread bytes loses the answer.
async fn refuse(mut stream: TcpStream, answer: &[u8], why: &'static str) -> io::Result<io::Error> {
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

    /// Connects a client that sends these bytes.
    async fn client(to: std::net::SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    async fn is_closed(mut stream: TcpStream) -> bool {
        let read = timeout(Duration::from_secs(10), stream.read(&mut [0; 1])).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    #[tokio::test]
    async fn connection_without_preface_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let bounds = Bounds { handshake: Duration::from_millis(50), ..Bounds::default() };
        let mut connections = accept(listener, None, bounds);
        for bytes in [&b""[..], &PREFACE[..23], &[b'x'; 24], b"GET / HTTP/1.1\r\n\r\n"] {
            assert!(is_closed(client(to, bytes).await).await, "{bytes:?}");
        }
        let _client = client(to, &[PREFACE, b"more"].concat()).await;
        let mut wire = connections.next().await.unwrap().unwrap();
        assert_eq!(wire.connect_info(), Peer::from_address(to.ip()));
        let mut received = [0; PREFACE.len() + 4];
        // The preface may be read in pieces.
        wire.read_exact(&mut received[..5]).await.unwrap();
        wire.read_exact(&mut received[5..]).await.unwrap();
        assert_eq!(received[..], [PREFACE, b"more"].concat());
    }

    #[tokio::test]
    async fn tls_client_of_plain_agent_gets_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let _connections = accept(listener, None, Bounds::default());
        let mut client = client(to, &[&[TLS_HANDSHAKE, 3, 1][..], &[7; 5000]].concat()).await;
        let mut answer = Vec::new();
        timeout(Duration::from_secs(10), client.read_to_end(&mut answer)).await.unwrap().unwrap();
        assert_eq!(answer, TLS_UNSUPPORTED);
    }

    #[tokio::test]
    async fn address_has_at_most_as_many_connections_as_it_leaves() {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut connections =
            accept(listener, None, Bounds { connections: 8, ..Bounds::default() });
        let connect_from = async |machine: u8| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 0, machine], 0).into()).unwrap();
            let mut stream = socket.connect(([127, 0, 0, 1], port).into()).await.unwrap();
            // Fails if the connection has been closed already.
            let _ = stream.write_all(PREFACE).await;
            stream
        };
        let mut clients = Vec::new();
        let mut wires = Vec::new();
        for (machine, max) in [(1, 4), (2, 2), (3, 1)] {
            for _ in 0..max {
                clients.push(connect_from(machine).await);
                wires.push(
                    timeout(Duration::from_secs(10), connections.next())
                        .await
                        .unwrap()
                        .unwrap()
                        .unwrap(),
                );
            }
            assert!(is_closed(connect_from(machine).await).await, "{machine}");
        }
        // The first address has more than it leaves to others, until some are closed.
        assert!(is_closed(connect_from(1).await).await);
        wires.drain(..3);
        let _client = connect_from(1).await;
        assert!(
            timeout(Duration::from_secs(10), connections.next()).await.unwrap().unwrap().is_ok()
        );
    }
}
