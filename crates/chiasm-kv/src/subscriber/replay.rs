//! One replay: a request for the messages that an engine has kept. `follow` detects gaps and
//! decides when to replay.
//!
//! The frames are those of `ZmqEventPublisher._service_replay` of vLLM 0.32: the request is `["",
//! first seq]`, each reply `["", topic, seq, payload]`, and the end marker `["", "", −1, ""]`.
//!
//! The engine keeps 10,000 messages, but its socket drops replies, including the end marker, if the
//! receiver is 1,000 replies behind (libzmq's default high-water mark, which vLLM does not change).
//! A long replay may therefore skip numbers that the engine still has. Another request, from the
//! first skipped number, retrieves them.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::Connection;
use tokio::time::timeout;

/// The sequence number of the end marker: −1 as the engine writes it.
const END: [u8; 8] = [0xff; 8];

/// The ratio of the timeout of the first reply to that of each further reply. The engine may be
/// busy before the first reply.
const GAP_TIMEOUT_DIVISOR: u32 = 10;

/// An open replay. Each replay has its own connection, so replies to an abandoned request can't mix
/// with later ones.
pub(super) struct Replay {
    connection: Connection,
    /// The timeout before the first reply.
    timeout: Duration,
    has_begun: bool,
}

pub(super) enum Reply {
    Message {
        seq: u64,
        payload: Bytes,
    },
    /// A reply in a form that no engine sends.
    Unreadable,
    End,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReplayFailure {
    #[error("the connection to the engine failed: {0}")]
    Connection(#[from] io::Error),
    #[error("the engine sent no reply for {0:?}")]
    Silence(Duration),
    #[error("messages {from} to {to} were dropped on the way")]
    Dropped { from: u64, to: u64 },
}

/// Requests all kept messages from number `first` on.
pub(super) async fn request(
    endpoint: &str,
    first: u64,
    connect_timeout: Duration,
    timeout: Duration,
) -> Result<Replay, ReplayFailure> {
    let mut connection = Connection::connect_dealer(endpoint, connect_timeout).await?;
    connection.send(vec![Bytes::new(), Bytes::copy_from_slice(&first.to_be_bytes())]).await?;
    Ok(Replay { connection, timeout, has_begun: false })
}

impl Replay {
    /// Returns the next reply. The engine sends all replies in one go, so a pause after the first
    /// one means that the rest was dropped.
    pub(super) async fn next(&mut self) -> Result<Reply, ReplayFailure> {
        let limit = if self.has_begun { self.timeout / GAP_TIMEOUT_DIVISOR } else { self.timeout };
        let received = timeout(limit, self.connection.next()).await;
        let frames = received.map_err(|_| ReplayFailure::Silence(limit))??;
        self.has_begun = true;
        // Later versions may add frames.
        let [delimiter, _topic, seq, payload, ..] = &frames[..] else {
            return Ok(Reply::Unreadable);
        };
        Ok(match <[u8; 8]>::try_from(&seq[..]) {
            Ok(END) => Reply::End,
            Ok(seq) if delimiter.is_empty() => {
                Reply::Message { seq: u64::from_be_bytes(seq), payload: payload.clone() }
            }
            _ => Reply::Unreadable,
        })
    }
}
