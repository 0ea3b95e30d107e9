//! Server-sent events: OpenAI's have one `data:` line per chunk, and `data: [DONE]` at the end.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt, once};
use serde::Serialize;

use crate::error::ApiError;

/// Most chunks of an answer take less: the head, a word and a few nulls.
const USUAL_BYTES: usize = 384;

/// A streamed answer of events that are ready to be sent, and OpenAI's mark of its end.
pub(crate) fn response(stream: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    events(stream.chain(once(async { Bytes::from_static(b"data: [DONE]\n\n") })))
}

/// A streamed answer of events that are ready to be sent, and nothing else.
pub(crate) fn events(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let mut response = Response::new(Body::from_stream(events.map(Ok::<_, Infallible>)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// One event with this body as JSON.
pub(crate) fn event(body: &impl Serialize) -> Bytes {
    let mut event = Vec::with_capacity(USUAL_BYTES);
    event.extend_from_slice(b"data: ");
    if let Err(error) = serde_json::to_writer(&mut event, body) {
        return self::error(&ApiError::internal(format!("a chunk could not be written: {error}")));
    }
    event.extend_from_slice(b"\n\n");
    event.into()
}

/// An error in the middle of a stream: OpenAI's error body as the last chunk.
pub(crate) fn error(error: &ApiError) -> Bytes {
    format!("data: {}\n\n", error.body()).into()
}
