//! Listening sockets: ROUTER and PULL, with a maximum number of peers and of handshakes.

use std::io;
use std::net::IpAddr;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::codec::FramedRead;

use crate::address::{Listener, Reader, Stream, Writer};
use crate::frames::{FrameDecoder, Incoming};
use crate::handshake::{Kind, handshake};
use crate::sending::write_message;

/// The maximum number of peers per socket, and of connections still in their handshake.
pub const MAX_PEERS: usize = 64;

/// The deadline for a peer's handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a failed accept, which is usually caused by a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An event on a socket.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer has completed its handshake.
    Connected {
        /// The peer's own identity. A peer without one gets an identity of five bytes that begins
        /// with a zero.
        identity: Bytes,
        /// The peer's address; `None` for a Unix socket. An IPv4-mapped address is given as IPv4.
        from: Option<IpAddr>,
    },
    /// A peer sent a message.
    Message {
        /// The sender's identity.
        identity: Bytes,
        /// The message's frames; never empty.
        frames: Vec<Bytes>,
    },
    /// A peer disconnected. Emitted after the peer's last message. Not emitted for a connection
    /// that was replaced by a newer one with the same identity.
    Disconnected {
        /// The peer's identity.
        identity: Bytes,
    },
}

/// The reason why a message can't be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// No peer has this identity.
    NoPeer,
    /// The peer's connection is lost.
    Lost,
}

impl std::fmt::Display for SendError {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(match self {
            Self::NoPeer => "no peer has this identity",
            Self::Lost => "the peer's connection is lost",
        })
    }
}

impl std::error::Error for SendError {}

/// A ROUTER socket: receives from all peers and sends to one by identity. Dropping it closes the
/// listener in the background; use [`close`](Self::close) to wait for it.
#[derive(Debug)]
pub struct Router(Socket);

/// A PULL socket: receives from all peers. Dropping it closes the listener in the background; use
/// [`close`](Self::close) to wait for it.
#[derive(Debug)]
pub struct Pull(Socket);

impl Router {
    /// Listens at `tcp://host:port` or `ipc://path`. Port 0 means any free port.
    ///
    /// # Errors
    /// The address is invalid, or the socket can't be bound to it.
    pub async fn bind(address: &str) -> io::Result<Self> {
        Self::bind_with_timeout(address, HANDSHAKE_TIMEOUT).await
    }

    /// Listens like [`bind`](Self::bind), with a deadline for the handshakes of peers.
    ///
    /// # Errors
    /// The errors of [`bind`](Self::bind).
    pub async fn bind_with_timeout(address: &str, handshake_timeout: Duration) -> io::Result<Self> {
        Socket::bind(Kind::Router, address, handshake_timeout).await.map(Self)
    }

    /// Returns the bound address.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Returns the next event. Cancel-safe. Peers are only read while this is polled, which gives
    /// back-pressure.
    pub async fn next(&mut self) -> Event {
        self.0.next().await
    }

    /// Returns `true` if a peer with this identity is connected, according to the events returned
    /// so far.
    pub fn has_peer(&self, identity: &[u8]) -> bool {
        self.0.peers.iter().any(|peer| peer.identity == identity)
    }

    /// Sends a message of one or more frames. Waits while the peer does not read. Not cancel-safe:
    /// a dropped call closes the connection for writing.
    ///
    /// # Errors
    /// [`SendError`] if the peer is gone. A peer that disconnects later may not have received the
    /// message.
    pub async fn send(&mut self, identity: &[u8], frames: Vec<Bytes>) -> Result<(), SendError> {
        let peer = self
            .0
            .peers
            .iter_mut()
            .find(|peer| peer.identity == identity)
            .ok_or(SendError::NoPeer)?;
        // A partly written message leaves the stream unusable, so the writer is only put back on
        // success.
        let mut writer = peer.writer.take().ok_or(SendError::Lost)?;
        if let Err(error) = write_message(&mut writer, frames).await {
            tracing::debug!(?identity, %error, "sending to a peer failed");
            return Err(SendError::Lost);
        }
        peer.writer = Some(writer);
        Ok(())
    }

    /// Closes the socket. The address is free when this returns.
    pub async fn close(mut self) {
        self.0.accept_task.shutdown().await;
    }
}

impl Pull {
    /// Listens like [`Router::bind`].
    ///
    /// # Errors
    /// The address is invalid, or the socket can't be bound to it.
    pub async fn bind(address: &str) -> io::Result<Self> {
        Socket::bind(Kind::Pull, address, HANDSHAKE_TIMEOUT).await.map(Self)
    }

    /// Returns the bound address.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Returns the next event. Cancel-safe. Peers are only read while this is polled, which gives
    /// back-pressure.
    pub async fn next(&mut self) -> Event {
        self.0.next().await
    }

    /// Returns the number of connected peers, according to the events returned so far.
    pub fn peer_count(&self) -> usize {
        self.0.peers.len()
    }

    /// Closes the socket. The address is free when this returns.
    pub async fn close(mut self) {
        self.0.accept_task.shutdown().await;
    }
}

/// A listening socket of any kind.
#[derive(Debug)]
pub(crate) struct Socket {
    address: String,
    /// The single task that accepts connections.
    accept_task: JoinSet<()>,
    /// Peers that have completed their handshake.
    new_peers: mpsc::Receiver<Peer>,
    peers: Vec<Peer>,
    /// The index of the peer that is polled first, for round-robin fairness.
    first: usize,
    /// The number of peers so far without an identity of their own.
    unnamed: u32,
    /// The number of connections that were replaced by a newer one with the same identity.
    replacements: u64,
}

struct Peer {
    identity: Bytes,
    from: Option<IpAddr>,
    incoming: FramedRead<Reader, FrameDecoder>,
    /// `None` once writing has failed.
    writer: Option<Writer>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Peer")
            .field("identity", &self.identity)
            .field("from", &self.from)
            .finish_non_exhaustive()
    }
}

impl Socket {
    pub(crate) async fn bind(
        kind: Kind,
        address: &str,
        handshake_timeout: Duration,
    ) -> io::Result<Self> {
        let listener = Listener::bind(address).await?;
        let address = listener.address()?;
        let (sender, new_peers) = mpsc::channel(MAX_PEERS);
        let mut accept_task = JoinSet::new();
        accept_task.spawn(accept(listener, kind, handshake_timeout, sender));
        Ok(Self {
            address,
            accept_task,
            new_peers,
            peers: Vec::new(),
            first: 0,
            unnamed: 0,
            replacements: 0,
        })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sends a message to all peers at the same time. Closes the connections of peers that do not
    /// receive it within `timeout` for writing.
    pub(crate) async fn send_all(&mut self, frames: &[Bytes], timeout: Duration) {
        let send = async |peer: &mut Peer| {
            // A partly written message leaves the stream unusable, so the writer is only put back
            // on success.
            let Some(mut writer) = peer.writer.take() else { return };
            let written = write_message(&mut writer, frames.to_vec());
            match tokio::time::timeout(timeout, written).await {
                Ok(Ok(())) => peer.writer = Some(writer),
                Ok(Err(error)) => {
                    tracing::debug!(identity = ?peer.identity, %error, "sending to a peer failed");
                }
                Err(elapsed) => {
                    tracing::warn!(identity = ?peer.identity, %elapsed, "a peer does not read");
                }
            }
        };
        join_all(self.peers.iter_mut().map(send)).await;
    }

    pub(crate) async fn next(&mut self) -> Event {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Event> {
        // A new peer comes first, so that the connection that it replaces emits no disconnect.
        if self.peers.len() < MAX_PEERS
            && let Poll::Ready(Some(peer)) = self.new_peers.poll_recv(context)
        {
            return Poll::Ready(self.admit(peer));
        }
        for offset in 0..self.peers.len() {
            let index = (self.first + offset) % self.peers.len();
            if let Poll::Ready(event) = self.poll_peer(index, context) {
                self.first = index + 1;
                return Poll::Ready(event);
            }
        }
        Poll::Pending
    }

    fn poll_peer(&mut self, index: usize, context: &mut Context<'_>) -> Poll<Event> {
        let peer = &mut self.peers[index];
        loop {
            match ready!(peer.incoming.poll_next_unpin(context)) {
                Some(Ok(Incoming::Message(frames))) => {
                    return Poll::Ready(Event::Message { identity: peer.identity.clone(), frames });
                }
                // Version 3.0 has no commands that need a response.
                Some(Ok(Incoming::Command(_))) => {}
                ended => {
                    if let Some(Err(error)) = ended {
                        let identity = &peer.identity;
                        tracing::debug!(?identity, %error, "a peer was disconnected");
                    }
                    let identity = self.peers.swap_remove(index).identity;
                    return Poll::Ready(Event::Disconnected { identity });
                }
            }
        }
    }

    /// Adds a peer. Replaces the connection of a peer with the same identity.
    fn admit(&mut self, mut peer: Peer) -> Event {
        if peer.identity.is_empty() {
            let [a, b, c, d] = self.unnamed.to_be_bytes();
            self.unnamed = self.unnamed.wrapping_add(1);
            peer.identity = Bytes::copy_from_slice(&[0, a, b, c, d]);
        }
        let event = Event::Connected { identity: peer.identity.clone(), from: peer.from };
        match self.peers.iter().position(|other| other.identity == peer.identity) {
            Some(index) => {
                let former = std::mem::replace(&mut self.peers[index], peer);
                self.replacements += 1;
                log_replacement(&self.address, self.replacements, &former, &self.peers[index]);
            }
            None => self.peers.push(peer),
        }
        event
    }
}

/// Logs that a connection was replaced by a newer one with the same identity. The newer one belongs
/// to a second peer, or to the same peer if it reconnects before the end of its old connection is
/// noticed.
///
/// Only counts that are powers of two are logged, because two peers with one identity may replace
/// each other forever.
fn log_replacement(address: &str, count: u64, former: &Peer, peer: &Peer) {
    if count.is_power_of_two() {
        tracing::warn!(
            address,
            identity = ?peer.identity,
            from = ?peer.from,
            former = ?former.from,
            count,
            "a new peer has the identity of a connected peer: the older connection is closed"
        );
    }
}

/// Accepts connections and performs their handshakes concurrently, until the socket is dropped.
async fn accept(
    listener: Listener,
    kind: Kind,
    handshake_timeout: Duration,
    new_peers: mpsc::Sender<Peer>,
) {
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if handshakes.len() < MAX_PEERS => match accepted {
                Ok(stream) => {
                    let peer = connect_peer(kind, stream);
                    handshakes.spawn(tokio::time::timeout(handshake_timeout, peer));
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection to a socket can't be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(ended) = handshakes.join_next() => match ended {
                Ok(Ok(Ok(peer))) => if new_peers.send(peer).await.is_err() { break },
                Ok(Ok(Err(error))) => tracing::debug!(%error, "a handshake failed"),
                Ok(Err(elapsed)) => tracing::debug!(%elapsed, "a handshake timed out"),
                Err(error) => tracing::debug!(%error, "a handshake task failed"),
            },
        }
    }
}

/// Performs the handshake of an accepted connection.
async fn connect_peer(kind: Kind, stream: Stream) -> io::Result<Peer> {
    let Stream { reader, mut writer, peer: from } = stream;
    let (incoming, identity) = handshake(kind, reader, &mut writer).await?;
    Ok(Peer { identity, from, incoming, writer: Some(writer) })
}
