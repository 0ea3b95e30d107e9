//! The two tasks that own an engine's sockets: one sends requests, one receives outputs.
//!
//! Both tasks end when the engine dies; either may be the first to detect that. They then close
//! their sockets, so that ports and paths are free for the engine's next start.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, Router};
use tokio::sync::mpsc;

use super::connection::{Connection, Outgoing};
use crate::error::DeathCause;
use crate::wire::{EngineMessage, output, request};

/// The time to read a disconnected engine's last outputs. They are in the socket's buffer already,
/// so this is enough. It must be well below the second within which a death must be detected.
const LAST_OUTPUTS_TIMEOUT: Duration = Duration::from_millis(200);

/// A guard that declares the engine dead when it is dropped, so that a task that panics does not
/// leave the connection open.
struct DeadOnDrop(Arc<Connection>);

impl Drop for DeadOnDrop {
    fn drop(&mut self) {
        self.0.mark_dead(DeathCause::TaskFailed);
    }
}

/// Sends queued messages, and detects the end of the input connection.
pub(super) async fn send_requests(
    mut socket: Router,
    identity: Bytes,
    mut messages: mpsc::UnboundedReceiver<Outgoing>,
    connection: Arc<Connection>,
) {
    let _guard = DeadOnDrop(connection.clone());
    let closed = connection.closed();
    tokio::pin!(closed);
    let cause = loop {
        // The engine may have disconnected during the handshake.
        if !socket.has_peer(&identity) {
            break DeathCause::Disconnected;
        }
        tokio::select! {
            message = messages.recv() => {
                let Some(message) = message else { break DeathCause::Closed };
                let (frames, request_id) = match message {
                    Outgoing::Add(request) => (request::encode(&request), Some(request.request_id)),
                    Outgoing::Frames(frames) => (frames, None),
                };
                if let Some(id) = request_id {
                    connection.registry().mark_sent(&id);
                }
                // The engine may be declared dead while it does not read.
                tokio::select! {
                    sent = socket.send(&identity, frames) => if let Err(error) = sent {
                        break DeathCause::SendFailed(error.to_string());
                    },
                    cause = &mut closed => break cause,
                }
            }
            // The socket detects a lost peer only while it is being read.
            event = socket.next() => if let Event::Message { frames, .. } = event {
                tracing::debug!(frames = frames.len(), "unexpected message on the input socket");
            },
            cause = &mut closed => break cause,
        }
    };
    if cause == DeathCause::Disconnected {
        let _ = tokio::time::timeout(LAST_OUTPUTS_TIMEOUT, connection.closed()).await;
    }
    connection.mark_dead(cause);
    drop(messages);
    socket.close().await;
}

/// Receives and dispatches the engine's outputs.
pub(super) async fn receive_outputs(mut socket: Pull, connection: Arc<Connection>) {
    let _guard = DeadOnDrop(connection.clone());
    let closed = connection.closed();
    tokio::pin!(closed);
    let cause = loop {
        tokio::select! {
            event = socket.next() => match event {
                Event::Message { frames, .. } => {
                    connection.liveness().record_message();
                    match output::decode_compact(&frames) {
                        Ok(EngineMessage::Outputs(outputs)) => connection.dispatch(outputs),
                        Ok(EngineMessage::Dead) => break DeathCause::Reported,
                        Err(error) => break DeathCause::Protocol(error),
                    }
                }
                // An engine that reconnects may be connected twice, until the end of its first
                // connection is detected.
                Event::Disconnected { .. } if socket.peer_count() == 0 => {
                    break DeathCause::Disconnected;
                }
                Event::Connected { .. } | Event::Disconnected { .. } => {}
            },
            cause = &mut closed => break cause,
        }
    };
    connection.mark_dead(cause);
    socket.close().await;
}
