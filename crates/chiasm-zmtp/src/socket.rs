//! The sockets.

use std::io;
use std::net::IpAddr;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::codec::FramedRead;

use crate::address::{Listener, Reading, Stream, Writing};
use crate::frames::{Frames, Said};
use crate::introduction::{Kind, introduce};
use crate::sending::write_message;

/// The most peers of one socket, and the most connections to it that have not introduced themselves
/// yet.
pub const MAX_PEERS: usize = 64;

/// The time within which a connection has to complete its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long nothing is accepted after that has failed: mostly for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What happens to a socket.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer has introduced itself.
    Connected {
        /// The name that it gives itself, and if it gives none one of five bytes that begins with a
        /// zero.
        identity: Bytes,
        /// Where it comes from, an IPv4 address as such; `None` by a Unix socket.
        from: Option<IpAddr>,
    },
    /// A peer says something.
    Message {
        /// The identity of the peer that says it.
        identity: Bytes,
        /// One or more.
        frames: Vec<Bytes>,
    },
    /// A peer's connection is lost, after all that came from it. Nobody is told of a connection
    /// whose identity another one has taken over.
    Disconnected {
        /// The identity that the peer had.
        identity: Bytes,
    },
}

/// Why a message can't be sent.
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

/// Hears peers and sends to each by its identity. Dropping it closes it, a moment later.
#[derive(Debug)]
pub struct Router(Socket);

/// Hears peers. Dropping it closes it, a moment later.
#[derive(Debug)]
pub struct Pull(Socket);

impl Router {
    /// Listens at `tcp://host:port`, where a port of 0 stands for any free one, or at `ipc://path`.
    ///
    /// # Errors
    /// What is given is no address, or can't be listened on.
    pub async fn bind(address: &str) -> io::Result<Self> {
        Self::bind_within(address, HANDSHAKE_TIMEOUT).await
    }

    /// Listens as [`bind`](Self::bind) does, for peers that complete their handshakes within this
    /// time.
    ///
    /// # Errors
    /// Those of [`bind`](Self::bind).
    pub async fn bind_within(address: &str, handshake_timeout: Duration) -> io::Result<Self> {
        Socket::bind(Kind::Router, address, handshake_timeout).await.map(Self)
    }

    /// The address as bound.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Waits for what happens next. May be dropped at any time; nothing is lost. Peers are read in
    /// here only.
    pub async fn next(&mut self) -> Event {
        self.0.next().await
    }

    /// Whether there is a peer of this identity, as far as [`next`](Self::next) has told.
    pub fn has(&self, identity: &[u8]) -> bool {
        self.0.peers.iter().any(|peer| peer.identity == identity)
    }

    /// Sends a message of one frame or more. Waits while the peer does not read what was sent
    /// before; dropped then, the peer is sent nothing any more.
    ///
    /// # Errors
    /// There is no such peer any more. One that goes later may not have got it.
    pub async fn send(&mut self, identity: &[u8], frames: Vec<Bytes>) -> Result<(), SendError> {
        let peer = self
            .0
            .peers
            .iter_mut()
            .find(|peer| peer.identity == identity)
            .ok_or(SendError::NoPeer)?;
        // What comes after half a message can't be understood.
        let mut writing = peer.writing.take().ok_or(SendError::Lost)?;
        if let Err(error) = write_message(&mut writing, frames).await {
            tracing::debug!(?identity, %error, "a peer can't be written to");
            return Err(SendError::Lost);
        }
        peer.writing = Some(writing);
        Ok(())
    }

    /// Closes it: when this returns the address is free.
    pub async fn close(mut self) {
        self.0.accepting.shutdown().await;
    }
}

impl Pull {
    /// Listens as [`Router::bind`] does.
    ///
    /// # Errors
    /// What is given is no address, or can't be listened on.
    pub async fn bind(address: &str) -> io::Result<Self> {
        Socket::bind(Kind::Pull, address, HANDSHAKE_TIMEOUT).await.map(Self)
    }

    /// The address as bound.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Waits for what happens next. May be dropped at any time; nothing is lost. Peers are read in
    /// here only.
    pub async fn next(&mut self) -> Event {
        self.0.next().await
    }

    /// How many peers there are, as far as [`next`](Self::next) has told.
    pub fn peers(&self) -> usize {
        self.0.peers.len()
    }

    /// Closes it: when this returns the address is free.
    pub async fn close(mut self) {
        self.0.accepting.shutdown().await;
    }
}

#[derive(Debug)]
struct Socket {
    address: String,
    /// The one task that accepts connections.
    accepting: JoinSet<()>,
    arrivals: mpsc::Receiver<Peer>,
    peers: Vec<Peer>,
    /// Which peer is asked first, so that each has its turn.
    first: usize,
    /// How many peers without a name there were.
    unnamed: u32,
    /// The number of connections that have lost their identity to a newer one.
    takeovers: u64,
}

struct Peer {
    identity: Bytes,
    from: Option<IpAddr>,
    said: FramedRead<Reading, Frames>,
    /// Until writing has failed.
    writing: Option<Writing>,
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
    async fn bind(kind: Kind, address: &str, handshake_timeout: Duration) -> io::Result<Self> {
        let listener = Listener::bind(address).await?;
        let address = listener.address()?;
        // All that may have come are heard before anybody's end.
        let (arrived, arrivals) = mpsc::channel(MAX_PEERS);
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, kind, handshake_timeout, arrived));
        Ok(Self {
            address,
            accepting,
            arrivals,
            peers: Vec::new(),
            first: 0,
            unnamed: 0,
            takeovers: 0,
        })
    }

    async fn next(&mut self) -> Event {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Event> {
        if self.peers.len() < MAX_PEERS
            && let Poll::Ready(Some(peer)) = self.arrivals.poll_recv(context)
        {
            return Poll::Ready(self.welcome(peer));
        }
        for turn in 0..self.peers.len() {
            let index = (self.first + turn) % self.peers.len();
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
            match ready!(peer.said.poll_next_unpin(context)) {
                Some(Ok(Said::Message(frames))) => {
                    return Poll::Ready(Event::Message { identity: peer.identity.clone(), frames });
                }
                // There are none that would have to be answered in version 3.0.
                Some(Ok(Said::Command(_))) => {}
                ended => {
                    if let Some(Err(error)) = ended {
                        tracing::debug!(identity = ?peer.identity, %error, "a peer is not listened to any more");
                    }
                    let identity = self.peers.swap_remove(index).identity;
                    return Poll::Ready(Event::Disconnected { identity });
                }
            }
        }
    }

    /// Takes a peer in, in the place of one that has the same identity.
    fn welcome(&mut self, mut peer: Peer) -> Event {
        if peer.identity.is_empty() {
            let [a, b, c, d] = self.unnamed.to_be_bytes();
            self.unnamed = self.unnamed.wrapping_add(1);
            peer.identity = Bytes::copy_from_slice(&[0, a, b, c, d]);
        }
        let event = Event::Connected { identity: peer.identity.clone(), from: peer.from };
        match self.peers.iter().position(|other| other.identity == peer.identity) {
            Some(index) => {
                let former = std::mem::replace(&mut self.peers[index], peer);
                self.takeovers += 1;
                log_takeover(&self.address, self.takeovers, &former, &self.peers[index]);
            }
            None => self.peers.push(peer),
        }
        event
    }
}

/// Logs that a connection has lost its identity to a newer one. A peer that reconnects before the
/// end of its old connection is noticed looks like a second peer, too.
///
/// Logs only counts that are powers of two: two peers with one identity may replace each other for
/// ever.
fn log_takeover(address: &str, count: u64, former: &Peer, peer: &Peer) {
    if count.is_power_of_two() {
        tracing::warn!(
            address,
            identity = ?peer.identity,
            from = ?peer.from,
            former = ?former.from,
            count,
            "a second peer has a known identity: the first one's connection is closed"
        );
    }
}

/// Accepts connections and lets them introduce themselves, until nobody waits for them any more.
async fn accept(
    listener: Listener,
    kind: Kind,
    handshake_timeout: Duration,
    arrived: mpsc::Sender<Peer>,
) {
    let mut strangers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if strangers.len() < MAX_PEERS => match accepted {
                Ok(stream) => {
                    strangers.spawn(tokio::time::timeout(handshake_timeout, meet(kind, stream)));
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection to a socket can't be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(met) = strangers.join_next() => match met {
                Ok(Ok(Ok(peer))) => if arrived.send(peer).await.is_err() { break },
                Ok(Ok(Err(error))) => tracing::debug!(%error, "a connection is no peer"),
                Ok(Err(late)) => tracing::debug!(%late, "a connection does not introduce itself"),
                Err(error) => tracing::debug!(%error, "a connection's introduction failed"),
            },
        }
    }
}

async fn meet(kind: Kind, stream: Stream) -> io::Result<Peer> {
    let Stream { reading, mut writing, peer: from } = stream;
    let (said, identity) = introduce(kind, reading, &mut writing).await?;
    Ok(Peer { identity, from, said, writing: Some(writing) })
}
