//! Writing to one peer.

use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncWriteExt;
use tokio::sync::{mpsc, oneshot};

use crate::address::Writing;
use crate::frames::put_message;

/// How many messages may wait to be sent to a peer that does not read them.
pub const MAX_WAITING: usize = 1024;

/// How long a socket that is gone goes on sending what it was given.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Bytes of messages that are written together.
const BATCH: usize = 256 << 10;
/// Pieces that are written with one call of the system.
const PIECES: usize = 64;

/// Sends messages to one peer. Once it is dropped, what waits is still sent, for a second at most.
pub(crate) struct Outgoing {
    messages: mpsc::Sender<Vec<Bytes>>,
    /// Nothing is sent: it ends with this.
    _kept: oneshot::Sender<()>,
}

impl Outgoing {
    pub(crate) fn to(mut peer: Writing) -> Self {
        let (messages, waiting) = mpsc::channel(MAX_WAITING);
        let (_kept, kept) = oneshot::channel::<()>();
        tokio::spawn(async move {
            let enough = async {
                let _ = kept.await;
                tokio::time::sleep(LAST_WORDS).await;
            };
            tokio::select! {
                sent = send(&mut peer, waiting) => if let Err(error) = sent {
                    tracing::debug!(%error, "a peer can't be written to");
                },
                () = enough => {}
            }
        });
        Self { messages, _kept }
    }

    /// Waits while there is no room. Whether the peer may still get it.
    pub(crate) async fn send(&self, frames: Vec<Bytes>) -> bool {
        self.messages.send(frames).await.is_ok()
    }
}

async fn send(peer: &mut Writing, mut messages: mpsc::Receiver<Vec<Bytes>>) -> io::Result<()> {
    let (mut pieces, mut small) = (Vec::new(), BytesMut::new());
    while let Some(message) = messages.recv().await {
        put_message(&mut pieces, &mut small, message);
        while small.len() < BATCH
            && pieces.len() < PIECES
            && let Ok(message) = messages.try_recv()
        {
            put_message(&mut pieces, &mut small, message);
        }
        pieces.push(small.split().freeze());
        write_all(peer, &mut pieces).await?;
        pieces.clear();
    }
    peer.shutdown().await
}

/// Writes one message.
pub(crate) async fn write_message(to: &mut Writing, frames: Vec<Bytes>) -> io::Result<()> {
    let (mut pieces, mut small) = (Vec::new(), BytesMut::new());
    put_message(&mut pieces, &mut small, frames);
    pieces.push(small.freeze());
    write_all(to, &mut pieces).await
}

/// Writes all of the pieces.
async fn write_all(to: &mut Writing, pieces: &mut [Bytes]) -> io::Result<()> {
    let mut first = 0;
    while first < pieces.len() {
        let mut slices = [IoSlice::new(&[]); PIECES];
        let rest = &pieces[first..];
        for (slice, piece) in slices.iter_mut().zip(rest) {
            *slice = IoSlice::new(piece);
        }
        let mut written = to.write_vectored(&slices[..rest.len().min(PIECES)]).await?;
        if written == 0 && rest.iter().any(|piece| !piece.is_empty()) {
            return Err(io::ErrorKind::WriteZero.into());
        }
        while let Some(piece) = pieces.get_mut(first)
            && written >= piece.len()
        {
            written -= piece.len();
            first += 1;
        }
        if let Some(piece) = pieces.get_mut(first) {
            piece.advance(written);
        }
    }
    Ok(())
}
