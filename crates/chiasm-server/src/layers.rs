//! The layers around every answer: the request's identity, and for completions its record and its
//! count.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use chiasm_backend::{RequestId, TraceContext};
use futures_util::FutureExt;
use tokio::time::Instant;
use tower_service::Service;
use tracing::{Instrument, Span, field};

use crate::connections::Connection;
use crate::error::{HttpError, Refusal};
use crate::frontend::Frontend;
use crate::record::Record;
use crate::traces::Traced;
use crate::{error, http_rules, paths};

/// The header of a request's identity, in both directions.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The identity of a request, which [`answer`] leaves with it.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: RequestId,
    pub(crate) trace: Option<TraceContext>,
    /// The time at which the request's head had been read.
    pub(crate) arrived: Instant,
    /// The connection that the request came by.
    pub(crate) connection: Arc<Connection>,
}

/// Answers a request by the paths of `app`, within all that surrounds an answer. This is no layer of `app`: one costs a request
/// two allocations and a copy of the layers within it.
pub(crate) async fn answer(
    app: Router,
    frontend: Arc<Frontend>,
    connection: Arc<Connection>,
    mut request: Request,
) -> Response {
    let identity = Identity::of(request.headers(), connection);
    let span = tracing::info_span!("request", id = %identity.id, trace_id = field::Empty);
    if let Some(trace) = &identity.trace {
        span.record("trace_id", trace.trace_id());
    }
    let echoed = HeaderValue::from_str(identity.id.as_str());
    request.extensions_mut().insert(identity);
    if let Some(target) = frontend.root_path.as_ref().and_then(|root| root.strip(request.uri())) {
        *request.uri_mut() = target;
    }
    let page = frontend.cors.as_ref().map(|_| request.headers().get(header::ORIGIN).cloned());
    let path = request.uri().clone();
    let response = recorded(app, &frontend, request).instrument(span).await;
    let mut response = error::in_words_of(path.path(), response);
    if let Ok(id) = echoed {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let (Some(cors), Some(page)) = (&frontend.cors, page) {
        cors.tell(page.as_ref(), response.headers_mut());
    }
    response
}

impl Identity {
    /// The client's, or a new one. One that is too long or has characters that are not safe in a log is not taken over.
    fn of(headers: &HeaderMap, connection: Arc<Connection>) -> Self {
        let given = text(headers, "x-request-id").and_then(RequestId::new);
        let id = given.unwrap_or_else(|| RequestId::from_random(rand::random()));
        let parent = text(headers, "traceparent");
        let trace = parent.and_then(|parent| TraceContext::parse(parent, text(headers, "tracestate")));
        Self { id, trace, arrived: Instant::now(), connection }
    }
}

/// Counts an answered completion and keeps its record.
async fn recorded(mut app: Router, frontend: &Arc<Frontend>, mut request: Request) -> Response {
    let endpoint = match request.uri().path() {
        paths::CHAT if request.method() == Method::POST => "chat",
        paths::COMPLETIONS if request.method() == Method::POST => "completions",
        paths::RESPONSES if request.method() == Method::POST => "responses",
        paths::TOKENIZE if request.method() == Method::POST => "tokenize",
        paths::DETOKENIZE if request.method() == Method::POST => "detokenize",
        paths::LOAD_LORA if request.method() == Method::POST && frontend.adapters_may_change => "load_lora_adapter",
        paths::UNLOAD_LORA if request.method() == Method::POST && frontend.adapters_may_change => "unload_lora_adapter",
        paths::MESSAGES if request.method() == Method::POST => "messages",
        paths::COUNT_TOKENS if request.method() == Method::POST => "count_tokens",
        _ => return call(&mut app, frontend, request).await,
    };
    let traced = begin_trace(frontend, &mut request);
    let record = Record::new(endpoint, Span::current(), traced, frontend.clone());
    request.extensions_mut().insert(record.clone());
    let response = call(&mut app, frontend, request).await;
    let status = response.status().as_u16();
    let refusal = response.extensions().get::<Refusal>();
    if let Some(Refusal(error)) = refusal {
        frontend.metrics.refused(status, error.code);
    }
    record.answered(status, refusal);
    response
}

/// Begins the request's trace, if it is to be recorded: what is known of its identity from then on is the context of its own span.
fn begin_trace(frontend: &Frontend, request: &mut Request) -> Option<(RequestId, Traced)> {
    let traces = frontend.traces.as_ref()?;
    let identity = request.extensions_mut().get_mut::<Identity>()?;
    let (context, traced) = traces.begin(identity.trace.as_ref());
    Span::current().record("trace_id", context.trace_id());
    identity.trace = Some(context);
    traced.map(|traced| (identity.id.clone(), traced))
}

/// A panic is told to the client, and not to others on its connection.
async fn call(app: &mut Router, frontend: &Frontend, request: Request) -> Response {
    if let Err(error) = http_rules::check(&request) {
        return error.into_response();
    }
    if let Some(told) = frontend.cors.as_ref().and_then(|cors| cors.preflight(&request)) {
        return told;
    }
    let waits = http_rules::expects_continue(request.version(), request.headers());
    if let Some(refused) = frontend.keys.current().refusal(&request) {
        return if waits { http_rules::closing(refused) } else { refused };
    }
    // A router is always ready, and never fails.
    let response = match AssertUnwindSafe(app.call(request)).catch_unwind().await {
        Ok(Ok(response)) => response,
        Err(_) => HttpError::internal("the request failed; the log says how").into_response(),
        Ok(Err(never)) => match never {},
    };
    if waits { http_rules::closing(response) } else { response }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
