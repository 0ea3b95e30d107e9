//! Sockets that connect to a frontend, and reconnect as libzmq does.
//!
//! `zeromq` 0.7 differs from libzmq in these points:
//! - `connect` waits for the peer and gives up after its timeout, with pauses that double up to
//!   30 s. So it is called repeatedly with a short timeout.
//! - A connected DEALER or PUSH never reconnects, and `recv` on it never returns again. So the
//!   monitor is watched, and a lost socket is replaced.
//! - A PUSH does not read, so it notices a lost peer one lost message late. So the receiver of the
//!   same frontend reports the loss.
//! - `send` only queues; after the socket is dropped a background task writes the rest.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use zeromq::util::PeerIdentity;
use zeromq::{Endpoint, Socket, SocketEvent, SocketOptions, SocketRecv, ZmqMessage};

use crate::error::SimError;

/// The deadline for one attempt to connect, in which `zeromq` tries after 0, 50, 150, 350 and
/// 750 ms.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between two connections; libzmq's default `ZMQ_RECONNECT_IVL`.
pub(crate) const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// A connected socket and its monitor.
pub(crate) struct Connection<S> {
    pub(crate) socket: S,
    events: BoxStream<'static, SocketEvent>,
}

impl<S: Socket> Connection<S> {
    /// Connects, and tries until it succeeds.
    pub(crate) async fn open(address: &str, identity: Option<[u8; 2]>) -> Self {
        loop {
            let mut options = SocketOptions::default();
            options.connect_timeout(CONNECT_TIMEOUT);
            if let Some(Ok(identity)) =
                identity.map(|identity| PeerIdentity::try_from(&identity[..]))
            {
                options.peer_identity(identity);
            }
            let mut socket = S::with_options(options);
            let events = socket.monitor().boxed();
            match socket.connect(address).await {
                Ok(()) => return Self { socket, events },
                Err(error) => tracing::debug!(address, %error, "not connected yet"),
            }
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }

    /// Returns the socket, and a future that completes when the peer is gone.
    fn split(&mut self) -> (&mut S, impl Future<Output = ()>) {
        let events = &mut self.events;
        let lost = async move {
            while let Some(event) = events.next().await {
                if matches!(event, SocketEvent::Disconnected(_)) {
                    return;
                }
            }
        };
        (&mut self.socket, lost)
    }
}

impl<S: Socket + SocketRecv> Connection<S> {
    /// Receives the next message. Returns `None` when the peer is gone.
    pub(crate) async fn receive(&mut self) -> Option<ZmqMessage> {
        let (socket, lost) = self.split();
        tokio::select! {
            biased;
            message = socket.recv() => message.ok(),
            () = lost => None,
        }
    }
}

/// Checks that an address can be parsed.
pub(crate) fn check_address(address: &str) -> Result<(), SimError> {
    match address.parse::<Endpoint>() {
        Ok(_) => Ok(()),
        Err(error) => Err(SimError::Config(format!(
            "{address:?} is not an address like tcp://127.0.0.1:5555 or ipc:///path: {error}"
        ))),
    }
}
