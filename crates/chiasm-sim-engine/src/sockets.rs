//! The two directions between the engine and its frontend, which survive restarts of the frontend.

use bytes::Bytes;
use chiasm_engine::wire::handshake::identity;
use tokio::sync::{mpsc, oneshot, watch};
use zeromq::{DealerSocket, PushSocket, SocketSend, ZmqMessage};

use crate::connection::{Connection, RECONNECT_PAUSE};
use crate::intake::Intake;

/// Receives from one of the frontend's input sockets until a message can't be decoded.
///
/// `ready` is sent once, at the first connection; a restarted frontend gets no second one, as from
/// vLLM. `connected` fires then. `losses` counts the losses of the frontend.
pub(crate) async fn receive(
    address: String,
    rank: u16,
    ready: Bytes,
    connected: oneshot::Sender<()>,
    losses: watch::Sender<u64>,
    intake: Intake,
) {
    let mut first = Some((ready, connected));
    loop {
        let mut connection = Connection::<DealerSocket>::open(&address, Some(identity(rank))).await;
        if let Some((ready, connected)) = first.take() {
            if connection.socket.send(ready.clone().into()).await.is_err() {
                first = Some((ready, connected));
                continue;
            }
            let _ = connected.send(());
        }
        while let Some(message) = connection.receive().await {
            if let Err(error) = intake.take(&message.into_vec()) {
                let problem = error.to_string();
                tracing::warn!(
                    problem,
                    "a message can't be decoded: like vLLM, the engine stops receiving"
                );
                return;
            }
        }
        tracing::debug!(address, "lost the frontend; waiting until it is back");
        losses.send_modify(|count| *count += 1);
        drop(connection);
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// Sends to one of the frontend's output sockets until the queue ends with an empty message.
pub(crate) async fn send(
    address: String,
    mut queue: mpsc::UnboundedReceiver<Vec<Bytes>>,
    mut losses: watch::Receiver<u64>,
) {
    let mut unsent = None;
    loop {
        let open = Connection::<PushSocket>::open(&address, None);
        tokio::pin!(open);
        let mut connection = loop {
            tokio::select! {
                connection = &mut open => break connection,
                frames = queue.recv(), if unsent.is_none() => match frames {
                    Some(frames) if !frames.is_empty() => unsent = Some(frames),
                    // The queue has ended, and no message is left to send.
                    _ => return,
                },
            }
        };
        losses.mark_unchanged();
        loop {
            let frames = match unsent.take() {
                Some(frames) => frames,
                None => tokio::select! {
                    frames = queue.recv() => match frames {
                        Some(frames) => frames,
                        None => return,
                    },
                    Ok(()) = losses.changed() => break,
                },
            };
            let Ok(message) = ZmqMessage::try_from(frames.clone()) else {
                return;
            };
            if connection.socket.send(message).await.is_err() {
                unsent = Some(frames);
                break;
            }
        }
        drop(connection);
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}
