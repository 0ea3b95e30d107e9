//! A listening socket that publishes: XPUB.

use std::io;
use std::time::Duration;

use bytes::Bytes;

use crate::handshake::Kind;
use crate::socket::{Event, HANDSHAKE_TIMEOUT, Socket};

/// The deadline for writing one message to one peer. Messages are a few bytes, so it passes only if
/// the peer's buffers are full.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// An XPUB socket: sends to all peers, and receives their subscriptions. Dropping it closes the
/// listener in the background.
///
/// Subscriptions are messages of one frame, `1` or `0` and a topic. They are returned, but do not
/// select what is sent: every peer gets every message.
#[derive(Debug)]
pub struct XPub(Socket);

impl XPub {
    /// Listens like [`Router::bind`](crate::Router::bind).
    ///
    /// # Errors
    /// The address is invalid, or the socket can't be bound to it.
    pub async fn bind(address: &str) -> io::Result<Self> {
        Socket::bind(Kind::XPub, address, HANDSHAKE_TIMEOUT).await.map(Self)
    }

    /// Returns the bound address.
    pub fn address(&self) -> &str {
        self.0.address()
    }

    /// Returns the next event. Cancel-safe. Peers are only read while this is polled.
    pub async fn next(&mut self) -> Event {
        self.0.next().await
    }

    /// Sends a message of one or more frames to all peers. A peer that does not receive it in time
    /// sees the end of its connection, and reconnects. Not cancel-safe: a dropped call may close
    /// connections for writing.
    pub async fn send_all(&mut self, frames: &[Bytes]) {
        self.0.send_all(frames, SEND_TIMEOUT).await;
    }
}
