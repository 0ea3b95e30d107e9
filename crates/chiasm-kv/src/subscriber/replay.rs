//! One replay: ask an engine for the messages it kept.
//!
//! Frames as in `ZmqEventPublisher._service_replay` of vLLM 0.32: the request `["", first seq]`, each answer
//! `["", topic, seq, payload]`, at the end `["", "", −1, ""]`. The zeromq crate's DEALER neither adds nor strips the empty
//! delimiter, so it is written and checked here.
//!
//! The engine's socket drops answers, the end marker included, when the receiver is 1,000 of them behind (libzmq's default
//! high-water mark, which vLLM leaves in place), while it keeps 10,000 messages. So a long replay may skip numbers that the
//! engine still has; asking again from there brings them.

use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use tokio::time::sleep;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::connection::{disconnected, options};

/// −1 as the engine writes it.
const END: [u8; 8] = [0xff; 8];

/// The patience between two answers is this part of the patience before the first, when the engine may be busy.
const PAUSE: u32 = 10;

/// An open replay. A socket is used for one replay only: answers to a request that was given up can't mix with later
/// ones, and the zeromq crate's DEALER does not reconnect anyway.
pub(super) struct Replay<M> {
    socket: DealerSocket,
    monitor: M,
    patience: Duration,
    begun: bool,
}

pub(super) enum Answer {
    Message {
        seq: u64,
        payload: Bytes,
    },
    /// Not what an engine sends.
    Unreadable,
    End,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReplayFailure {
    #[error(transparent)]
    Socket(#[from] ZmqError),
    #[error("the engine said nothing for {0:?}")]
    Silence(Duration),
    #[error("messages {from} to {to} were dropped on the way")]
    Dropped { from: u64, to: u64 },
    #[error("the engine closed the connection")]
    Disconnected,
}

/// Asks for all kept messages from number `first` on.
pub(super) async fn request(
    endpoint: &str,
    first: u64,
    connect_timeout: Duration,
    patience: Duration,
) -> Result<Replay<impl Stream<Item = SocketEvent> + Unpin + use<>>, ReplayFailure> {
    let mut socket = DealerSocket::with_options(options(connect_timeout));
    let monitor = socket.monitor();
    socket.connect(endpoint).await?;
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&first.to_be_bytes()));
    socket.send(request).await?;
    Ok(Replay { socket, monitor, patience, begun: false })
}

impl<M: Stream<Item = SocketEvent> + Unpin> Replay<M> {
    /// The next answer. The engine sends them in one go, so once it has begun a pause means that the rest was dropped.
    pub(super) async fn next(&mut self) -> Result<Answer, ReplayFailure> {
        let patience = if self.begun { self.patience / PAUSE } else { self.patience };
        let frames = tokio::select! {
            // What arrived before the connection broke still counts.
            biased;
            message = self.socket.recv() => message?.into_vec(),
            () = disconnected(&mut self.monitor) => return Err(ReplayFailure::Disconnected),
            () = sleep(patience) => return Err(ReplayFailure::Silence(patience)),
        };
        self.begun = true;
        // More frames are a later version's business.
        let [delimiter, _topic, seq, payload, ..] = &frames[..] else {
            return Ok(Answer::Unreadable);
        };
        Ok(match <[u8; 8]>::try_from(&seq[..]) {
            Ok(END) => Answer::End,
            Ok(seq) if delimiter.is_empty() => {
                Answer::Message { seq: u64::from_be_bytes(seq), payload: payload.clone() }
            }
            _ => Answer::Unreadable,
        })
    }
}
