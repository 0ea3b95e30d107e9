//! What surrounds every answer: the request's identity, and for completions its record and its count.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::Response;
use chiasm_backend::{RequestId, TraceContext};
use tower_service::Service;
use tracing::{Instrument, Span, field};

use crate::cpu::CpuBudget;
use crate::error::Refusal;
use crate::frontend::Frontend;
use crate::record::Record;
use crate::routes;

/// The header of a request's identity, in both directions.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The identity of a request, which [`answer`] leaves with it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: RequestId,
    pub(crate) trace: Option<TraceContext>,
}

/// Answers a request by the paths of `app`, within all that surrounds an answer. This is no layer of `app`: one costs a request
/// two allocations and a copy of the layers within it.
pub(crate) async fn answer(app: Router, frontend: Arc<Frontend>, mut request: Request) -> Response {
    let identity = Identity::of(request.headers());
    let span = tracing::info_span!("request", id = %identity.id, trace_id = field::Empty);
    if let Some(trace) = &identity.trace {
        span.record("trace_id", trace.trace_id());
    }
    let echoed = HeaderValue::from_str(identity.id.as_str());
    request.extensions_mut().insert(identity);
    let mut response = recorded(app, frontend, request).instrument(span).await;
    if let Ok(id) = echoed {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

impl Identity {
    /// The client's, or a new one. One that is too long or has characters that are not safe in a log is not taken over.
    fn of(headers: &HeaderMap) -> Self {
        let given = header(headers, "x-request-id").and_then(RequestId::new);
        let id = given.unwrap_or_else(|| RequestId::from_random(rand::random()));
        let parent = header(headers, "traceparent");
        let trace = parent.and_then(|parent| TraceContext::parse(parent, header(headers, "tracestate")));
        Self { id, trace }
    }
}

/// Counts an answered completion and keeps its record.
async fn recorded(mut app: Router, frontend: Arc<Frontend>, mut request: Request) -> Response {
    let endpoint = match request.uri().path() {
        routes::CHAT if request.method() == Method::POST => "chat",
        routes::COMPLETIONS if request.method() == Method::POST => "completions",
        _ => return call(&mut app, request).await,
    };
    let record = Record::new(endpoint, Span::current());
    request.extensions_mut().insert(record.clone());
    request.extensions_mut().insert(CpuBudget::new(frontend.limits.request_cost));
    let response = call(&mut app, request).await;
    let status = response.status().as_u16();
    record.answered(status, response.extensions().get::<Refusal>().map(|Refusal(message)| message.clone()));
    frontend.metrics.answered(endpoint, status);
    response
}

async fn call(app: &mut Router, request: Request) -> Response {
    // A router is always ready, and never fails.
    match app.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
