//! What surrounds every answer: the request's identity, and for completions its record and its count.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use chiasm_backend::{RequestId, TraceContext};
use tracing::{Instrument, Span, field};

use crate::error::Refusal;
use crate::frontend::Frontend;
use crate::record::Record;

/// The header of a request's identity, in both directions.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The identity of a request, which the layer below leaves with it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: RequestId,
    pub(crate) trace: Option<TraceContext>,
}

/// Gives every request an identity, its client's or a new one: in a span around all that is done for it, and in a header of
/// the answer. One that is too long or has characters that are not safe in a log is not taken over.
pub(crate) async fn identify(mut request: Request, next: Next) -> Response {
    let given = header(request.headers(), "x-request-id").and_then(RequestId::new);
    let id = given.unwrap_or_else(|| RequestId::from_random(rand::random()));
    let parent = header(request.headers(), "traceparent");
    let trace = parent.and_then(|parent| TraceContext::parse(parent, header(request.headers(), "tracestate")));
    let span = tracing::info_span!("request", %id, trace_id = field::Empty);
    if let Some(trace) = &trace {
        span.record("trace_id", trace.trace_id());
    }
    let echoed = HeaderValue::from_str(id.as_str());
    request.extensions_mut().insert(Identity { id, trace });
    let mut response = next.run(request).instrument(span).await;
    if let Ok(id) = echoed {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Counts an answered request and keeps its record.
pub(crate) async fn record(State(frontend): State<Arc<Frontend>>, mut request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let endpoint = match path {
        Some("/v1/chat/completions") => "chat",
        _ => "completions",
    };
    let record = Record::new(endpoint, Span::current());
    request.extensions_mut().insert(record.clone());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    record.answered(status, response.extensions().get::<Refusal>().map(|Refusal(message)| message.clone()));
    frontend.metrics.answered(endpoint, status);
    response
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
