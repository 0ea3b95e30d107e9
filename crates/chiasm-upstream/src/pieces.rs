//! The body of an answer as it comes, in as few pieces as may be.

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

use crate::server::{AskError, lost};

/// A piece that comes so soon behind another one has probably been read together with more of them.
const TOGETHER: Duration = Duration::from_millis(1);
/// Bytes that are not kept back for more.
const ENOUGH: usize = 64 << 10;

/// The pieces of an answer's body.
///
/// A server writes each event by itself, and a task of the HTTP client hands each piece over by
/// itself, however many it has read at once: what is done for each, above all writing it to the
/// client, would be done many times in vain. So a piece of several that follow each other at once
/// waits until all tasks that are ready have had their turn, the client's among them, and is told
/// with what has come by then. A token that comes alone waits for nothing.
pub(crate) struct Pieces {
    body: reqwest::Body,
    /// The bytes that have come: a single piece as it is, or several pieces joined.
    first: Option<Bytes>,
    joined: BytesMut,
    /// The time at which the last piece, or the head, came.
    came: Instant,
    /// The last piece has followed the one before at once.
    is_burst: bool,
    /// All others have had their turn since the last piece.
    has_waited: bool,
    /// The end of the body.
    end: Option<Result<(), AskError>>,
}

impl Pieces {
    /// The body of an answer whose head has just come.
    pub(crate) fn of(response: Response) -> Self {
        Self::of_body(response.into())
    }

    fn of_body(body: reqwest::Body) -> Self {
        Self {
            body,
            first: None,
            joined: BytesMut::new(),
            came: Instant::now(),
            is_burst: false,
            has_waited: false,
            end: None,
        }
    }

    fn hold(&mut self, piece: Bytes) {
        let now = Instant::now();
        self.is_burst = now - self.came < TOGETHER;
        self.has_waited = false;
        self.came = now;
        if self.first.is_none() && self.joined.is_empty() {
            self.first = Some(piece);
            return;
        }
        if let Some(first) = self.first.take() {
            self.joined.extend_from_slice(&first);
        }
        self.joined.extend_from_slice(&piece);
    }

    fn held(&self) -> usize {
        self.first.as_ref().map_or(self.joined.len(), Bytes::len)
    }

    fn release(&mut self) -> Option<Bytes> {
        self.first
            .take()
            .or_else(|| (!self.joined.is_empty()).then(|| mem::take(&mut self.joined).freeze()))
    }
}

impl Stream for Pieces {
    type Item = Result<Bytes, AskError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while self.end.is_none() && self.held() < ENOUGH {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(piece) = frame.into_data().ok().filter(|piece| !piece.is_empty()) {
                        self.hold(piece);
                    }
                }
                Poll::Ready(Some(Err(error))) => self.end = Some(Err(lost(error))),
                Poll::Ready(None) => self.end = Some(Ok(())),
                Poll::Pending if self.held() == 0 => return Poll::Pending,
                Poll::Pending if self.is_burst && !self.has_waited => {
                    self.has_waited = true;
                    // It has the runtime wake this task behind all that are ready, and is not
                    // needed for more.
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

    /// A body that is handed over one piece after the other, as the HTTP client's task does it.
    struct Handed(mpsc::Receiver<io::Result<Bytes>>);

    impl Body for Handed {
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
        (sender, Pieces::of_body(reqwest::Body::wrap(Handed(receiver))))
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
    async fn pieces_that_come_at_once_are_told_in_one() {
        let (sender, mut pieces) = body();
        hand_over(sender, (0..8).map(|number| vec![number; 3]));
        let told = pieces.next().await.unwrap().unwrap();
        assert_eq!(told, (0..8).flat_map(|number| [number; 3]).collect::<Vec<_>>());
        assert!(pieces.next().await.is_none() && pieces.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_piece_that_comes_alone_waits_for_nothing() {
        let (sender, mut pieces) = body();
        for _ in 0..3 {
            assert!(pieces.next().now_or_never().is_none());
            advance(TOGETHER).await;
            sender.try_send(Ok(Bytes::from_static(b"a"))).unwrap();
            assert_eq!(pieces.next().now_or_never().unwrap().unwrap().unwrap(), "a");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_enough_is_kept_back() {
        let (sender, mut pieces) = body();
        hand_over(sender, (0..6).map(|_| vec![0; ENOUGH / 2]));
        for _ in 0..3 {
            assert_eq!(pieces.next().await.unwrap().unwrap().len(), ENOUGH);
        }
        assert!(pieces.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_before_an_error_is_told_before_it() {
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
