//! Connections of frontends.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;

use crate::tls::AgentTls;
use crate::wire::{Peer, Wire};

/// Handshakes at a time. Others wait with the system.
const MOST_HANDSHAKES: usize = 256;
/// After no connection could be accepted, mostly because the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is told that there are too many connections.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// What each client of HTTP/2 says first, as soon as it is connected. One that says nothing would be waited for without an end: what
/// serves it asks for signs of life once it has heard this.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What connections may take.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// How long a frontend may take to agree on TLS, and to begin to speak.
    handshake: Duration,
    /// Connections at once. A frontend has three.
    connections: usize,
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
        let handshakes = Arc::new(Semaphore::new(MOST_HANDSHAKES));
        let places = Arc::new(Semaphore::new(bounds.connections));
        let mut told: Option<Instant> = None;
        loop {
            let Ok(turn) = handshakes.clone().acquire_owned().await else { return };
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
            let Ok(place) = places.clone().try_acquire_owned() else {
                if told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
                    told = Some(Instant::now());
                    tracing::warn!(most = bounds.connections, "connections are closed: frontends have too many");
                }
                continue;
            };
            let (accepted, tls, from) = (accepted.clone(), tls.clone(), Peer(Some(from.ip().to_canonical())));
            tokio::spawn(async move {
                let _turn = turn;
                match timeout(bounds.handshake, shake(stream, from, tls, place)).await {
                    // Nobody serves any more if it is not taken.
                    Ok(Ok(wire)) => drop(accepted.send(Ok(wire)).await),
                    Ok(Err(error)) => tracing::debug!(%error, "a frontend's connection is closed"),
                    Err(_) => tracing::debug!("a frontend's connection is closed: it did not begin to speak in time"),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

/// A connection that has begun to speak HTTP/2.
async fn shake(
    stream: TcpStream,
    from: Peer,
    tls: Option<Arc<AgentTls>>,
    place: OwnedSemaphorePermit,
) -> io::Result<Wire> {
    // Each token is a message of its own.
    stream.set_nodelay(true)?;
    let mut wire = match tls {
        Some(tls) => Wire::encrypted(TlsAcceptor::from(tls.sides().await.server).accept(stream).await?),
        None => Wire::plain(stream),
    };
    let mut said = [0; PREFACE.len()];
    wire.read_exact(&mut said).await?;
    match said == *PREFACE {
        true => Ok(wire.placed(from, PREFACE, place)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak HTTP/2")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
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
        assert_eq!(wire.connect_info(), Peer(Some(to.ip())));
        let mut said = [0; PREFACE.len() + 4];
        // It may be read in pieces.
        wire.read_exact(&mut said[..5]).await.unwrap();
        wire.read_exact(&mut said[5..]).await.unwrap();
        assert_eq!(said[..], [PREFACE, b"more"].concat());
    }

    #[tokio::test]
    async fn there_are_no_more_connections_than_have_places() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let mut connections = accept(listener, None, Bounds { connections: 2, ..Bounds::default() });
        let mut clients = Vec::new();
        let mut wires = Vec::new();
        for _ in 0..2 {
            clients.push(saying(to, PREFACE).await);
            wires.push(connections.next().await.unwrap().unwrap());
        }
        assert!(is_closed(saying(to, PREFACE).await).await);
        wires.pop();
        let _client = saying(to, PREFACE).await;
        assert!(timeout(Duration::from_secs(10), connections.next()).await.unwrap().unwrap().is_ok());
    }
}
