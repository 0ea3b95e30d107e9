//! The layers around every answer: the request's identity, and the record and metrics of requests
//! to the model.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chiasm_backend::RequestId;
use futures_util::FutureExt;
use tower_service::Service;
use tracing::{Instrument, Span, field};

use crate::access::CurrentKeys;
use crate::connection::Connection;
use crate::cors::Cors;
use crate::error::{HttpError, Refusal};
use crate::identity::Identity;
use crate::paths::ModelEndpoint;
use crate::record::{Record, Recorder};
use crate::root_path::RootPath;
use crate::traces::ActiveTrace;
use crate::{error, http_rules, paths};

/// The header of a request's identity, in requests and responses.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The settings and state of the layers around an answer.
pub(crate) struct RequestLayers {
    pub(crate) cors: Option<Cors>,
    pub(crate) keys: Arc<CurrentKeys>,
    pub(crate) root_path: Option<RootPath>,
    /// `true` if there are endpoints for loading and unloading adapters. Requests to them are
    /// counted only in this case.
    pub(crate) adapters_may_change: bool,
    pub(crate) recorder: Arc<Recorder>,
}

/// Answers a request with the routes of `app`, within all layers.
///
/// This is not a tower layer of `app`, which would cost each request two allocations and a copy of
/// the layers within it.
pub(crate) async fn answer(
    app: Router,
    layers: Arc<RequestLayers>,
    connection: Arc<Connection>,
    mut request: Request,
) -> Response {
    let identity = Identity::new(request.headers(), connection);
    let span = tracing::info_span!("request", id = %identity.id, trace_id = field::Empty);
    let id = HeaderValue::from_str(identity.id.as_str());
    request.extensions_mut().insert(identity);
    if let Some(target) = layers.root_path.as_ref().and_then(|root| root.strip(request.uri())) {
        *request.uri_mut() = target;
    }
    let origin = layers.cors.as_ref().map(|_| request.headers().get(header::ORIGIN).cloned());
    let path = request.uri().clone();
    let response = answer_and_record(app, &layers, request).instrument(span).await;
    let mut response = error::to_api_format(path.path(), response);
    if let Ok(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let (Some(cors), Some(origin)) = (&layers.cors, origin) {
        cors.add_headers(origin.as_ref(), response.headers_mut());
    }
    response
}

/// Answers a request and records its outcome, if its endpoint is counted.
async fn answer_and_record(
    mut app: Router,
    layers: &Arc<RequestLayers>,
    mut request: Request,
) -> Response {
    let endpoint = counted_endpoint(&request, layers.adapters_may_change);
    let trace = endpoint.and_then(|_| begin_trace(layers, &mut request));
    if let Some(trace) = request.extensions().get::<Identity>().and_then(|id| id.trace.as_ref()) {
        Span::current().record("trace_id", trace.trace_id());
    }
    let Some(endpoint) = endpoint else { return call(&mut app, layers, request).await };
    let record = Record::new(endpoint, Span::current(), trace, layers.recorder.clone());
    request.extensions_mut().insert(record.clone());
    let response = call(&mut app, layers, request).await;
    let status = response.status().as_u16();
    let refusal = response.extensions().get::<Refusal>();
    if let Some(Refusal(error)) = refusal {
        layers.recorder.metrics.count_refusal(status, error.code);
    }
    record.set_response(status, refusal);
    response
}

/// Returns the endpoint's name in metrics and the log; `None` if requests to it are not recorded.
fn counted_endpoint(request: &Request, adapters_may_change: bool) -> Option<&'static str> {
    if request.method() != Method::POST {
        return None;
    }
    let path = request.uri().path();
    if let Some(endpoint) = ModelEndpoint::at(path) {
        return Some(endpoint.name());
    }
    match path {
        paths::TOKENIZE => Some("tokenize"),
        paths::DETOKENIZE => Some("detokenize"),
        paths::LOAD_LORA if adapters_may_change => Some("load_lora_adapter"),
        paths::UNLOAD_LORA if adapters_may_change => Some("unload_lora_adapter"),
        _ => None,
    }
}

/// Begins the request's trace and makes its span the request's trace context. Returns `None` if the
/// trace is not recorded.
fn begin_trace(layers: &RequestLayers, request: &mut Request) -> Option<(RequestId, ActiveTrace)> {
    let traces = layers.recorder.traces.as_ref()?;
    let identity = request.extensions_mut().get_mut::<Identity>()?;
    let (context, active) = traces.begin(identity.trace.as_ref());
    identity.trace = Some(context);
    active.map(|trace| (identity.id.clone(), trace))
}

/// Checks a request and answers it with the routes of `app`. A panic becomes an error response and
/// leaves other requests of the connection alone.
async fn call(app: &mut Router, layers: &RequestLayers, request: Request) -> Response {
    if let Err(error) = http_rules::check(&request) {
        return error.into_response();
    }
    if let Some(preflight) = layers.cors.as_ref().and_then(|cors| cors.preflight(&request)) {
        return preflight;
    }
    let expects_continue = http_rules::expects_continue(request.version(), request.headers());
    if let Some(refused) = layers.keys.current().refusal(&request) {
        return if expects_continue { http_rules::close_if_refused(refused) } else { refused };
    }
    let method = request.method().clone();
    // A router is always ready, and never fails.
    let response = match AssertUnwindSafe(app.call(request)).catch_unwind().await {
        Ok(Ok(response)) => name_allowed_methods(&method, response),
        Err(_) => {
            HttpError::internal("the request failed because of a bug; the server's log has details")
                .into_response()
        }
        Ok(Err(never)) => match never {},
    };
    if expects_continue { http_rules::close_if_refused(response) } else { response }
}

/// Adds the allowed methods to the message of the router's 405 error. The router sets `Allow` only
/// after it has the error. Responses of upstream servers are left alone.
fn name_allowed_methods(method: &Method, response: Response) -> Response {
    let is_own = response.status() == StatusCode::METHOD_NOT_ALLOWED
        && response.extensions().get::<Refusal>().is_some();
    let allowed = response.headers().get(header::ALLOW).filter(|_| is_own).cloned();
    let Some(allowed) = allowed else { return response };
    let methods = allowed.to_str().unwrap_or_default().replace(',', ", ");
    let mut named = HttpError::method_not_allowed(method, &methods).into_response();
    named.headers_mut().insert(header::ALLOW, allowed);
    named
}
