//! Server-sent events: one `data:` line per chunk, `data: [DONE]` at the end where the protocol has it.

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

/// A streamed answer of events that are ready to be sent.
pub(crate) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    stream(events.chain(once(async { Bytes::from_static(b"data: [DONE]\n\n") })))
}

/// A streamed answer whose events themselves tell its end.
pub(crate) fn stream(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
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

/// Appends an event with a name.
pub(crate) fn write_named(events: &mut Vec<u8>, name: &str, body: &impl Serialize) {
    let begin = events.len();
    events.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    match serde_json::to_writer(&mut *events, body) {
        Ok(()) => events.extend_from_slice(b"\n\n"),
        Err(failed) => {
            events.truncate(begin);
            events.extend(error(&ApiError::internal(format!("an event could not be written: {failed}"))));
        }
    }
}

/// An error in the middle of a stream: OpenAI's error body as the last chunk.
pub(crate) fn error(error: &ApiError) -> Bytes {
    format!("data: {}\n\n", error.body()).into()
}
