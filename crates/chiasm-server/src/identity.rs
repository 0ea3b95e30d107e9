//! The identity of a request.

use std::sync::Arc;

use axum::http::HeaderMap;
use chiasm_backend::{RequestId, TraceContext};
use tokio::time::Instant;

use crate::connection::Connection;

/// The identity of a request, an extension of it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: RequestId,
    pub(crate) trace: Option<TraceContext>,
    /// The time at which the request's head had been read.
    pub(crate) arrived: Instant,
    /// The connection that the request came by.
    pub(crate) connection: Arc<Connection>,
}

impl Identity {
    /// The client's, or a new one. One that is too long or has characters that are not safe in a
    /// log is not taken over.
    pub(crate) fn new(headers: &HeaderMap, connection: Arc<Connection>) -> Self {
        let given = text(headers, "x-request-id").and_then(RequestId::new);
        let id = given.unwrap_or_else(|| RequestId::from_random(rand::random()));
        let parent = text(headers, "traceparent");
        let trace =
            parent.and_then(|parent| TraceContext::parse(parent, text(headers, "tracestate")));
        Self { id, trace, arrived: Instant::now(), connection }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
