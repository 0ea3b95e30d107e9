//! The two tasks that own an engine's sockets: one sends requests, one receives outputs.
//!
//! Both end with the engine, whichever notices first. They then close their sockets, so that ports and paths are
//! free for its successor.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use zeromq::{PullSocket, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqMessage};

use super::connection::{Connection, Outgoing};
use crate::error::DeathCause;
use crate::wire::{EngineMessage, output, request};

/// How long a lost engine's last outputs may take. They are in the socket's buffer already, so this is plenty;
/// it must stay well below the second within which a death has to be known.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A PULL socket that lets go of its peers on drop, which the crate's own does not.
pub(super) struct Outputs(pub(super) PullSocket);

impl Drop for Outputs {
    fn drop(&mut self) {
        self.0.backend().shutdown();
    }
}

/// Declares the engine gone when it is dropped: a task that panics must not leave a connection that nobody serves.
struct LastOfTask(Arc<Connection>);

impl Drop for LastOfTask {
    fn drop(&mut self) {
        self.0.die(DeathCause::TaskFailed);
    }
}

/// Connections made and lost.
pub(super) type Events = BoxStream<'static, SocketEvent>;

/// Sends what is queued, and watches the connection.
pub(super) async fn send_requests(
    mut socket: RouterSocket,
    mut events: Events,
    identity: Bytes,
    mut messages: mpsc::UnboundedReceiver<Outgoing>,
    connection: Arc<Connection>,
) {
    let _last = LastOfTask(connection.clone());
    let gone = connection.gone();
    tokio::pin!(gone);
    let cause = loop {
        tokio::select! {
            message = messages.recv() => {
                let Some(message) = message else { break DeathCause::Closed };
                let (frames, request_id) = match message {
                    Outgoing::Add(request) => (request::encode(&request), Some(request.request_id)),
                    Outgoing::Frames(frames) => (frames, None),
                };
                // Before it is sent: the engine may have it when sending fails.
                if let Some(id) = request_id {
                    connection.registry().sent(&id);
                }
                if let Err(error) = socket.send(addressed(&identity, frames)).await {
                    break DeathCause::SendFailed(error.to_string());
                }
            }
            // The socket notices a lost peer only while it is being read.
            received = socket.recv() => match received {
                Ok(message) => tracing::debug!(frames = message.len(), "unexpected message on the input socket"),
                Err(error) => tracing::debug!(%error, "reading the input socket failed"),
            },
            event = events.next() => {
                if let Some(SocketEvent::Disconnected(peer)) = event
                    && peer.as_ref() == &identity[..]
                {
                    break DeathCause::Disconnected;
                }
            }
            cause = &mut gone => break cause,
        }
    };
    if cause == DeathCause::Disconnected {
        let _ = tokio::time::timeout(LAST_WORDS, connection.gone()).await;
    }
    connection.die(cause);
    drop(messages);
    report(socket.close().await);
}

/// Dispatches what the engine says.
pub(super) async fn receive_outputs(mut socket: Outputs, mut events: Events, connection: Arc<Connection>) {
    let _last = LastOfTask(connection.clone());
    let gone = connection.gone();
    tokio::pin!(gone);
    // During the handshake connections may have come and gone: those of an engine before this one, or its own before it was
    // asked for the last time.
    let mut peers = 0;
    while let Some(Some(event)) = events.next().now_or_never() {
        peers = peers_after(peers, &event);
    }
    let cause = loop {
        tokio::select! {
            received = socket.0.recv() => {
                let message = match received {
                    Ok(message) => message,
                    Err(error) => {
                        tracing::debug!(%error, "reading the output socket failed");
                        break DeathCause::Disconnected;
                    }
                };
                connection.pulse().beat();
                match output::receive(&message.into_vec()) {
                    Ok(EngineMessage::Outputs(outputs)) => connection.dispatch(outputs),
                    Ok(EngineMessage::Dead) => break DeathCause::Reported,
                    Err(error) => break DeathCause::Protocol(error),
                }
            }
            Some(event) = events.next() => {
                peers = peers_after(peers, &event);
                // Comes after everything that the peer has sent.
                if peers == 0 && matches!(event, SocketEvent::Disconnected(_)) {
                    break DeathCause::Disconnected;
                }
            }
            cause = &mut gone => break cause,
        }
    };
    connection.die(cause);
    socket.0.backend().shutdown();
    report(socket.0.unbind_all().await);
}

/// The number of connections that there are after this event.
fn peers_after(peers: usize, event: &SocketEvent) -> usize {
    match event {
        SocketEvent::Accepted(..) => peers + 1,
        SocketEvent::Disconnected(_) => peers.saturating_sub(1),
        _ => peers,
    }
}

/// A message with its receiver in front.
pub(super) fn addressed(identity: &Bytes, frames: Vec<Bytes>) -> ZmqMessage {
    let mut message = ZmqMessage::from(identity.clone());
    frames.into_iter().for_each(|frame| message.push_back(frame));
    message
}

fn report(errors: Vec<zeromq::ZmqError>) {
    for error in errors {
        tracing::debug!(%error, "closing an engine's socket failed");
    }
}
