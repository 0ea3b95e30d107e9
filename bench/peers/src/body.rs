//! The body of a request, in pieces: what many requests have in common is sent from where it is,
//! and never copied here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// Sent one after the other; their length is known, so that it goes ahead of them.
#[derive(Clone, Debug, Default)]
pub struct Pieces(VecDeque<Bytes>);

impl<const N: usize> From<[Bytes; N]> for Pieces {
    fn from(pieces: [Bytes; N]) -> Self {
        Self(pieces.into())
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}
