//! Server-sent events: one `data:` line per chunk, `data: [DONE]` at the end where the protocol has it.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt};
use serde::Serialize;

use crate::error::ApiError;

/// The last event of OpenAI's streams.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// A streamed answer, each item of which is one or more whole events.
pub(crate) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let mut response = Response::new(Body::from_stream(events.map(Ok::<_, Infallible>)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Appends an event with a name.
pub(crate) fn write_named(events: &mut Vec<u8>, name: &str, body: &impl Serialize) {
    let begin = events.len();
    events.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    match serde_json::to_writer(&mut *events, body) {
        Ok(()) => events.extend_from_slice(b"\n\n"),
        Err(failed) => write_failed(events, begin, &failed),
    }
}

/// Replaces an event that could not be written, and begins at `begin`, by an error.
pub(crate) fn write_failed(events: &mut Vec<u8>, begin: usize, failed: &serde_json::Error) {
    events.truncate(begin);
    write_error(events, &ApiError::internal(format!("an event could not be written: {failed}")));
}

/// Appends an error in the middle of a stream: OpenAI's error body as its last chunk.
pub(crate) fn write_error(events: &mut Vec<u8>, error: &ApiError) {
    events.extend_from_slice(format!("data: {}\n\n", error.body()).as_bytes());
}
