//! The identity of a request.

use std::sync::Arc;

use axum::http::HeaderMap;
use chiasm_backend::{RequestId, TraceContext};
use tokio::time::Instant;

use crate::connection::Connection;

/// The identity of a request, kept among its extensions.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: RequestId,
    pub(crate) trace: Option<TraceContext>,
    /// The time at which the request's head had been read.
    pub(crate) arrived: Instant,
    /// The connection of the request.
    pub(crate) connection: Arc<Connection>,
}

impl Identity {
    /// Returns the identity from the request's headers, or a new one. A client's id that is too
    /// long or has characters unsafe in a log is replaced.
    pub(crate) fn new(headers: &HeaderMap, connection: Arc<Connection>) -> Self {
        let client_id = text(headers, "x-request-id").and_then(RequestId::new);
        let id = client_id.unwrap_or_else(|| RequestId::from_random(rand::random()));
        let parent = text(headers, "traceparent");
        let trace =
            parent.and_then(|parent| TraceContext::parse(parent, text(headers, "tracestate")));
        Self { id, trace, arrived: Instant::now(), connection }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
