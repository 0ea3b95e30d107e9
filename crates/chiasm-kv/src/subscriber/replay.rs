//! One replay: ask an engine for the messages it kept.
//!
//! Frames as in `ZmqEventPublisher._service_replay` of vLLM 0.32: the request `["", first seq]`,
//! each answer `["", topic, seq, payload]`, at the end `["", "", −1, ""]`.
//!
//! The engine's socket drops answers, the end marker included, when the receiver is 1,000 of them
//! behind (libzmq's default high-water mark, which vLLM leaves in place), while it keeps 10,000
//! messages. So a long replay may skip numbers that the engine still has; asking again from there
//! brings them.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::Connection;
use tokio::time::timeout;

/// −1 as the engine writes it.
const END: [u8; 8] = [0xff; 8];

/// The patience between two answers is this part of the patience before the first, when the engine
/// may be busy.
const PAUSE: u32 = 10;

/// An open replay. A connection is used for one replay only: answers to a request that was given up
/// can't mix with later ones.
pub(super) struct Replay {
    connection: Connection,
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
    #[error("the connection to the engine: {0}")]
    Connection(#[from] io::Error),
    #[error("the engine said nothing for {0:?}")]
    Silence(Duration),
    #[error("messages {from} to {to} were dropped on the way")]
    Dropped { from: u64, to: u64 },
}

/// Asks for all kept messages from number `first` on.
pub(super) async fn request(
    endpoint: &str,
    first: u64,
    connect_timeout: Duration,
    patience: Duration,
) -> Result<Replay, ReplayFailure> {
    let mut connection = Connection::deal(endpoint, connect_timeout).await?;
    connection.send(vec![Bytes::new(), Bytes::copy_from_slice(&first.to_be_bytes())]).await?;
    Ok(Replay { connection, patience, begun: false })
}

impl Replay {
    /// The next answer. The engine sends them in one go, so once it has begun a pause means that
    /// the rest was dropped.
    pub(super) async fn next(&mut self) -> Result<Answer, ReplayFailure> {
        let patience = if self.begun { self.patience / PAUSE } else { self.patience };
        let heard = timeout(patience, self.connection.next()).await;
        let frames = heard.map_err(|_| ReplayFailure::Silence(patience))??;
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
