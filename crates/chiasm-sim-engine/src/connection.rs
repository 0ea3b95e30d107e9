//! Sockets that connect to a frontend, and go on trying as libzmq does.
//!
//! What `zeromq` 0.7 does differently from libzmq, and what is done about it here:
//! - `connect` waits for the peer and gives up after its timeout, with pauses that double up to 30
//!   s: it is called again and again with a short timeout.
//! - A connected DEALER or PUSH never reconnects, and `recv` on it never returns again: the monitor
//!   is watched, and a lost socket is replaced.
//! - A PUSH does not read, so it notices a lost peer one lost message late: whoever reads from the
//!   same frontend says so.
//! - `send` only queues; dropping the socket lets a task in the background write out the rest.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use zeromq::util::PeerIdentity;
use zeromq::{Endpoint, Socket, SocketEvent, SocketOptions};

use crate::error::SimError;

/// Within it, `zeromq` tries after 0, 50, 150, 350 and 750 ms.
const ATTEMPT: Duration = Duration::from_secs(1);
/// libzmq's default `ZMQ_RECONNECT_IVL`.
pub(crate) const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// A connected socket and word of its loss.
pub(crate) struct Connection<S> {
    pub(crate) socket: S,
    events: BoxStream<'static, SocketEvent>,
}

impl<S: Socket> Connection<S> {
    /// Connects, however long it takes.
    pub(crate) async fn open(address: &str, identity: Option<[u8; 2]>) -> Self {
        loop {
            let mut options = SocketOptions::default();
            options.connect_timeout(ATTEMPT);
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

    /// The socket to receive from, and a future that ends when the peer is gone.
    pub(crate) fn split(&mut self) -> (&mut S, impl Future<Output = ()>) {
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

/// Refuses what could never be connected to.
pub(crate) fn check_address(address: &str) -> Result<(), SimError> {
    match address.parse::<Endpoint>() {
        Ok(_) => Ok(()),
        Err(error) => Err(SimError::Config(format!(
            "{address:?} is not an address like tcp://127.0.0.1:5555 or ipc:///path: {error}"
        ))),
    }
}
