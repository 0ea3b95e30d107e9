//! Outgoing connections: SUB and DEALER.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::codec::FramedRead;

use crate::address::{Reader, Stream, Writer};
use crate::frames::{FrameDecoder, Incoming};
use crate::handshake::{Kind, handshake};
use crate::sending::write_message;

/// The pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A connection to one socket. It does not reconnect. Dropping it closes it.
pub struct Connection {
    incoming: FramedRead<Reader, FrameDecoder>,
    writer: Writer,
}

impl Connection {
    /// Connects a SUB to a PUB or XPUB at `tcp://host:port` or `ipc://path`, and subscribes to the
    /// messages whose first frame begins with `topic`. Retries for `timeout` if the connection or
    /// the handshake fails.
    ///
    /// # Errors
    /// The error of the last attempt, or a timeout.
    pub async fn subscribe(address: &str, topic: &[u8], timeout: Duration) -> io::Result<Self> {
        let mut connection = Self::open(Kind::Sub, address, timeout).await?;
        let subscription = [&[1], topic].concat();
        connection.send(vec![subscription.into()]).await?;
        Ok(connection)
    }

    /// Connects a DEALER to a ROUTER, with retries as in [`subscribe`](Self::subscribe).
    ///
    /// # Errors
    /// The error of the last attempt, or a timeout.
    pub async fn connect_dealer(address: &str, timeout: Duration) -> io::Result<Self> {
        Self::open(Kind::Dealer, address, timeout).await
    }

    async fn open(kind: Kind, address: &str, timeout: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + timeout;
        loop {
            let attempt = timeout_at(deadline, async {
                let Stream { reader, mut writer, .. } = Stream::connect(address).await?;
                let (incoming, _) = handshake(kind, reader, &mut writer).await?;
                Ok(Self { incoming, writer })
            });
            match attempt.await {
                Ok(Err(_)) if Instant::now() + RETRY_PAUSE < deadline => sleep(RETRY_PAUSE).await,
                Ok(result) => return result,
                Err(elapsed) => return Err(elapsed.into()),
            }
        }
    }

    /// Sends a message of one or more frames. Not cancel-safe: a partly written message leaves the
    /// connection unusable.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn send(&mut self, frames: Vec<Bytes>) -> io::Result<()> {
        write_message(&mut self.writer, frames).await
    }

    /// Returns the frames of the next message. Cancel-safe.
    ///
    /// # Errors
    /// The connection is lost, or the peer has sent invalid ZMTP or too large a message. The error
    /// is [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if the peer has closed the connection
    /// after its last message.
    pub async fn next(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            match self.incoming.next().await {
                Some(Ok(Incoming::Message(frames))) => return Ok(frames),
                // Version 3.0 has no commands that need a response.
                Some(Ok(Incoming::Command(_))) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}
