//! The body of an answer; its end is the end of the request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use crate::connection::Connection;

/// The body of an answer. When this is dropped, the whole body has been handed to the connection,
/// which then waits for its client again.
pub(super) struct AnswerBody {
    body: Body,
    connection: Arc<Connection>,
}

impl AnswerBody {
    pub(super) fn new(body: Body, connection: Arc<Connection>) -> Self {
        Self { body, connection }
    }
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.connection.finish_request();
    }
}
