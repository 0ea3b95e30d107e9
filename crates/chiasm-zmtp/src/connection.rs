//! Connections to sockets of others.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::codec::FramedRead;

use crate::address::{Reading, Stream, Writing};
use crate::frames::{Frames, Said};
use crate::introduction::{Kind, introduce};
use crate::sending::write_message;

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection to one socket, which is not made again when it is lost. Dropping it closes it.
pub struct Connection {
    said: FramedRead<Reading, Frames>,
    writing: Writing,
}

impl Connection {
    /// Subscribes to what a PUB or XPUB at `tcp://host:port` or `ipc://path` publishes, all whose
    /// first frame begins with `topic`. Where nobody listens, or somebody else does, it is tried
    /// again for as long as `within` says.
    ///
    /// # Errors
    /// Why it could not connect at last.
    pub async fn subscribe(address: &str, topic: &[u8], within: Duration) -> io::Result<Self> {
        let mut connection = Self::open(Kind::Sub, address, within).await?;
        let subscription = [&[1], topic].concat();
        connection.send(vec![subscription.into()]).await?;
        Ok(connection)
    }

    /// Connects a DEALER to a ROUTER, as [`subscribe`](Self::subscribe) does.
    ///
    /// # Errors
    /// Why it could not connect at last.
    pub async fn deal(address: &str, within: Duration) -> io::Result<Self> {
        Self::open(Kind::Dealer, address, within).await
    }

    async fn open(kind: Kind, address: &str, within: Duration) -> io::Result<Self> {
        let until = Instant::now() + within;
        loop {
            let opened = timeout_at(until, async {
                let Stream { reading, mut writing, .. } = Stream::connect(address).await?;
                let (said, _) = introduce(kind, reading, &mut writing).await?;
                Ok(Self { said, writing })
            });
            match opened.await {
                Ok(Err(_)) if Instant::now() + PAUSE < until => sleep(PAUSE).await,
                Ok(opened) => return opened,
                Err(late) => return Err(late.into()),
            }
        }
    }

    /// Sends a message of one frame or more. Dropped before its end, what is sent later can't be
    /// understood.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn send(&mut self, frames: Vec<Bytes>) -> io::Result<()> {
        write_message(&mut self.writing, frames).await
    }

    /// Waits for the frames of the next message. May be dropped at any time; nothing is lost.
    ///
    /// # Errors
    /// The connection is lost, or ended, [`UnexpectedEof`](io::ErrorKind::UnexpectedEof), after all
    /// that came over it; or what came is no ZMTP, or too much of it.
    pub async fn next(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            match self.said.next().await {
                Some(Ok(Said::Message(frames))) => return Ok(frames),
                // There are none that would have to be answered in version 3.0.
                Some(Ok(Said::Command(_))) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}
