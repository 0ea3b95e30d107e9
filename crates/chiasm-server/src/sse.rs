//! Server-sent events: one `data:` line per chunk, `data: [DONE]` at the end.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt, once};
use serde_json::Value;

use crate::error::ApiError;

/// A streamed answer. An error in the middle becomes a last chunk with OpenAI's error body.
pub(crate) fn response(chunks: impl Stream<Item = Result<Value, ApiError>> + Send + 'static) -> Response {
    let events = chunks
        .map(|chunk| match chunk {
            Ok(chunk) => event(&chunk),
            Err(error) => event(&error.body()),
        })
        .chain(once(async { Bytes::from_static(b"data: [DONE]\n\n") }))
        .map(Ok::<_, Infallible>);
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn event(chunk: &Value) -> Bytes {
    format!("data: {chunk}\n\n").into()
}
