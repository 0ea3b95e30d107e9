//! The two tasks that own an engine's sockets: one sends requests, one receives outputs.
//!
//! Both end with the engine, whichever notices first. They then close their sockets, so that ports
//! and paths are free for its successor.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, Router};
use tokio::sync::mpsc;

use super::connection::{Connection, Outgoing};
use crate::error::DeathCause;
use crate::wire::{EngineMessage, output, request};

/// How long a lost engine's last outputs may take. They are in the socket's buffer already, so this
/// is plenty; it must stay well below the second within which a death has to be known.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Declares the engine gone when it is dropped: a task that panics must not leave a connection that
/// nobody serves.
struct LastOfTask(Arc<Connection>);

impl Drop for LastOfTask {
    fn drop(&mut self) {
        self.0.die(DeathCause::TaskFailed);
    }
}

/// Sends what is queued, and watches the connection.
pub(super) async fn send_requests(
    mut socket: Router,
    identity: Bytes,
    mut messages: mpsc::UnboundedReceiver<Outgoing>,
    connection: Arc<Connection>,
) {
    let _last = LastOfTask(connection.clone());
    let gone = connection.gone();
    tokio::pin!(gone);
    let cause = loop {
        // Also where it went during the handshake.
        if !socket.has(&identity) {
            break DeathCause::Disconnected;
        }
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
                // An engine that does not read may be declared gone for that.
                tokio::select! {
                    sent = socket.send(&identity, frames) => if let Err(error) = sent {
                        break DeathCause::SendFailed(error.to_string());
                    },
                    cause = &mut gone => break cause,
                }
            }
            // The socket notices a lost peer only while it is being read.
            event = socket.next() => if let Event::Message { frames, .. } = event {
                tracing::debug!(frames = frames.len(), "unexpected message on the input socket");
            },
            cause = &mut gone => break cause,
        }
    };
    if cause == DeathCause::Disconnected {
        let _ = tokio::time::timeout(LAST_WORDS, connection.gone()).await;
    }
    connection.die(cause);
    drop(messages);
    socket.close().await;
}

/// Dispatches what the engine says.
pub(super) async fn receive_outputs(mut socket: Pull, connection: Arc<Connection>) {
    let _last = LastOfTask(connection.clone());
    let gone = connection.gone();
    tokio::pin!(gone);
    let cause = loop {
        tokio::select! {
            event = socket.next() => match event {
                Event::Message { frames, .. } => {
                    connection.pulse().beat();
                    match output::receive(&frames) {
                        Ok(EngineMessage::Outputs(outputs)) => connection.dispatch(outputs),
                        Ok(EngineMessage::Dead) => break DeathCause::Reported,
                        Err(error) => break DeathCause::Protocol(error),
                    }
                }
                // An engine that has come back may be connected a second time before its former
                // connection is known to be lost.
                Event::Disconnected { .. } if socket.peers() == 0 => break DeathCause::Disconnected,
                Event::Connected { .. } | Event::Disconnected { .. } => {}
            },
            cause = &mut gone => break cause,
        }
    };
    connection.die(cause);
    socket.close().await;
}
