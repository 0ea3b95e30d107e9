//! The body of an answer, in as few pieces as possible.

use std::mem;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::Stream;
use http_body::Body;
use reqwest::Response;
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::server::{RequestError, body_error};

/// The maximum gap between two pieces of a burst: the HTTP client probably read more pieces at
/// once.
const BURST_GAP: Duration = Duration::from_millis(1);
/// The number of held bytes that are returned without waiting for more.
const MAX_HELD_BYTES: usize = 64 << 10;

/// The pieces of an answer's body.
///
/// A server writes each event by itself, and the HTTP client's task hands over each piece by
/// itself, however many it has read at once. Handling each piece alone, above all writing it to the
/// client, would repeat the same work. So a piece that closely follows another one waits until all
/// ready tasks have run, the HTTP client's among them. It is returned together with the pieces that
/// arrived meanwhile. A token that arrives alone does not wait.
pub(crate) struct Pieces {
    body: reqwest::Body,
    /// The held bytes: a single piece as it is, or several pieces joined.
    first: Option<Bytes>,
    joined: BytesMut,
    /// The arrival time of the last piece, or of the head.
    arrived_at: Instant,
    /// `true` if the last piece closely followed the piece before it.
    is_burst: bool,
    /// `true` if all ready tasks have run since the last piece.
    has_waited: bool,
    /// The end of the body.
    end: Option<Result<(), RequestError>>,
}

impl Pieces {
    /// Creates the pieces of an answer whose head has just arrived.
    pub(crate) fn new(response: Response) -> Self {
        Self::from_body(response.into())
    }

    fn from_body(body: reqwest::Body) -> Self {
        Self {
            body,
            first: None,
            joined: BytesMut::new(),
            arrived_at: Instant::now(),
            is_burst: false,
            has_waited: false,
            end: None,
        }
    }

    fn hold(&mut self, piece: Bytes) {
        let now = Instant::now();
        self.is_burst = now - self.arrived_at < BURST_GAP;
        self.has_waited = false;
        self.arrived_at = now;
        if self.first.is_none() && self.joined.is_empty() {
            self.first = Some(piece);
            return;
        }
        if let Some(first) = self.first.take() {
            self.joined.extend_from_slice(&first);
        }
        self.joined.extend_from_slice(&piece);
    }

    fn held_bytes(&self) -> usize {
        self.first.as_ref().map_or(self.joined.len(), Bytes::len)
    }

    fn release(&mut self) -> Option<Bytes> {
        self.first
            .take()
            .or_else(|| (!self.joined.is_empty()).then(|| mem::take(&mut self.joined).freeze()))
    }
}

impl Stream for Pieces {
    type Item = Result<Bytes, RequestError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while self.end.is_none() && self.held_bytes() < MAX_HELD_BYTES {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(piece) = frame.into_data().ok().filter(|piece| !piece.is_empty()) {
                        self.hold(piece);
                    }
                }
                Poll::Ready(Some(Err(error))) => self.end = Some(Err(body_error(error))),
                Poll::Ready(None) => self.end = Some(Ok(())),
                Poll::Pending if self.held_bytes() == 0 => return Poll::Pending,
                Poll::Pending if self.is_burst && !self.has_waited => {
                    self.has_waited = true;
                    // Polling `yield_now` once makes the runtime wake this task after all ready
                    // tasks.
                    let _: Poll<()> = pin!(yield_now()).poll(context);
                    return Poll::Pending;
                }
                Poll::Pending => break,
            }
        }
        if let Some(pieces) = self.release() {
            return Poll::Ready(Some(Ok(pieces)));
        }
        let end = self.end.replace(Ok(()));
        Poll::Ready(end.and_then(Result::err).map(Err))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use futures_util::FutureExt;
    use futures_util::stream::StreamExt;
    use http_body::Frame;
    use tokio::sync::mpsc;
    use tokio::time::advance;

    use super::*;

    type Sender = mpsc::Sender<io::Result<Bytes>>;

    /// A body whose pieces are handed over one by one, as by the HTTP client's task.
    struct ChannelBody(mpsc::Receiver<io::Result<Bytes>>);

    impl Body for ChannelBody {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
        }
    }

    fn body() -> (Sender, Pieces) {
        let (sender, receiver) = mpsc::channel(1);
        (sender, Pieces::from_body(reqwest::Body::wrap(ChannelBody(receiver))))
    }

    fn hand_over(sender: Sender, pieces: impl IntoIterator<Item = Vec<u8>> + Send + 'static) {
        let pieces: Vec<_> = pieces.into_iter().collect();
        tokio::spawn(async move {
            for piece in pieces {
                sender.send(Ok(piece.into())).await.unwrap();
            }
        });
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_in_a_burst_are_joined() {
        let (sender, mut pieces) = body();
        hand_over(sender, (0..8).map(|number| vec![number; 3]));
        let joined = pieces.next().await.unwrap().unwrap();
        assert_eq!(joined, (0..8).flat_map(|number| [number; 3]).collect::<Vec<_>>());
        assert!(pieces.next().await.is_none() && pieces.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn lone_piece_is_returned_at_once() {
        let (sender, mut pieces) = body();
        for _ in 0..3 {
            assert!(pieces.next().now_or_never().is_none());
            advance(BURST_GAP).await;
            sender.try_send(Ok(Bytes::from_static(b"a"))).unwrap();
            assert_eq!(pieces.next().now_or_never().unwrap().unwrap().unwrap(), "a");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn held_bytes_are_bounded() {
        let (sender, mut pieces) = body();
        hand_over(sender, (0..6).map(|_| vec![0; MAX_HELD_BYTES / 2]));
        for _ in 0..3 {
            assert_eq!(pieces.next().await.unwrap().unwrap().len(), MAX_HELD_BYTES);
        }
        assert!(pieces.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_before_an_error_are_returned() {
        let (sender, mut pieces) = body();
        tokio::spawn(async move {
            sender.send(Ok(Bytes::from_static(b"a"))).await.unwrap();
            sender.send(Err(io::Error::other("it broke"))).await.unwrap();
        });
        assert_eq!(pieces.next().await.unwrap().unwrap(), "a");
        let error = pieces.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("it broke"), "{error}");
        assert!(pieces.next().await.is_none());
    }
}
