//! Connections of frontends.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;

use crate::tls::AgentTls;
use crate::wire::Wire;

/// How long a frontend may take to agree on TLS.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at a time. Others wait with the system.
const MOST_HANDSHAKES: usize = 256;
/// After no connection could be accepted, mostly because the process has no file descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections that frontends make, until what is returned is dropped.
pub(super) fn accept(listener: TcpListener, tls: Option<Arc<AgentTls>>) -> ReceiverStream<io::Result<Wire>> {
    let (accepted, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let handshakes = Arc::new(Semaphore::new(MOST_HANDSHAKES));
        loop {
            let Ok(turn) = handshakes.clone().acquire_owned().await else { return };
            let stream = tokio::select! {
                () = accepted.closed() => return,
                next = listener.accept() => match next {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        tracing::warn!(%error, "no connection of a frontend can be accepted");
                        sleep(PAUSE).await;
                        continue;
                    }
                },
            };
            let (accepted, tls) = (accepted.clone(), tls.clone());
            tokio::spawn(async move {
                let _turn = turn;
                match timeout(HANDSHAKE, shake(stream, tls)).await {
                    // Nobody serves any more if it is not taken.
                    Ok(Ok(wire)) => drop(accepted.send(Ok(wire)).await),
                    Ok(Err(error)) => tracing::debug!(%error, "a frontend's connection is closed"),
                    Err(_) => tracing::debug!("a frontend's connection is closed: no TLS was agreed on in time"),
                }
            });
        }
    });
    ReceiverStream::new(connections)
}

async fn shake(stream: TcpStream, tls: Option<Arc<AgentTls>>) -> io::Result<Wire> {
    // Each token is a message of its own.
    stream.set_nodelay(true)?;
    let Some(tls) = tls else { return Ok(Wire::Plain(stream)) };
    let stream = TlsAcceptor::from(tls.sides().await.server).accept(stream).await?;
    Ok(Wire::Encrypted(Box::new(stream.into())))
}
