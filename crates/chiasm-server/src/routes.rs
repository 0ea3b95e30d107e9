//! Paths, and what surrounds every answer: body limits, the bound on requests in flight, headers, metrics.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::answer;
use crate::body::read_json;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::metrics::InFlight;
use crate::pipeline::Attempted;
use crate::workers;

/// The whole HTTP interface.
pub fn router(frontend: Arc<Frontend>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/workers", get(workers))
        .route("/metrics", get(metrics))
        .fallback(async || ApiError::not_found("no such path; see the README for those that exist", "no_such_path"))
        .method_not_allowed_fallback(async || ApiError {
            status: StatusCode::METHOD_NOT_ALLOWED,
            ..ApiError::not_found("this path does not take that method", "method_not_allowed")
        })
        .with_state(frontend)
}

/// What a request holds while it is answered, also while its stream is being read.
pub(crate) struct Held {
    _slot: OwnedSemaphorePermit,
    _in_flight: InFlight,
}

async fn chat(State(frontend): State<Arc<Frontend>>, request: Request) -> Response {
    let answered = async {
        let held = admit(&frontend)?;
        let caller = frontend.caller(request.headers());
        answer::chat(&frontend, held, caller, read_json(&frontend, request.into_body()).await?).await
    };
    finish(&frontend, "chat", answered.await)
}

async fn completions(State(frontend): State<Arc<Frontend>>, request: Request) -> Response {
    let answered = async {
        let held = admit(&frontend)?;
        let caller = frontend.caller(request.headers());
        answer::completions(&frontend, held, caller, read_json(&frontend, request.into_body()).await?).await
    };
    finish(&frontend, "completions", answered.await)
}

fn finish(frontend: &Frontend, endpoint: &'static str, answered: Result<Response, ApiError>) -> Response {
    frontend.metrics.answered(endpoint, answered.as_ref().map(drop));
    answered.unwrap_or_else(|error| {
        tracing::debug!(endpoint, status = error.status.as_u16(), %error, "request refused");
        error.into_response()
    })
}

/// Takes one of the places for requests in flight.
fn admit(frontend: &Frontend) -> Result<Held, ApiError> {
    let slot = frontend.slots.clone().try_acquire_owned().map_err(|_| {
        ApiError::unavailable(format!(
            "{} requests are in flight, as many as allowed (--max-requests); try again later",
            frontend.limits.requests
        ))
    })?;
    Ok(Held { _slot: slot, _in_flight: frontend.metrics.in_flight() })
}

/// Headers that tell where a request went.
pub(crate) fn routing_headers(headers: &mut HeaderMap, attempted: &Attempted) {
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    put("x-chiasm-worker", attempted.worker.to_string());
    put("x-chiasm-overlap", format!("{}/{}", attempted.overlap_blocks, attempted.total_blocks));
    put("x-chiasm-transfer", attempted.transfer.name().to_owned());
}

async fn models(State(frontend): State<Arc<Frontend>>) -> Json<Value> {
    Json(json!({
        "object": "list",
        "data": [{
            "id": frontend.model.name,
            "object": "model",
            "created": frontend.fleet.created(),
            "owned_by": "chiasm",
            "max_model_len": frontend.fleet.shape().map(|shape| shape.max_model_len),
        }],
    }))
}

/// The process lives.
async fn health() -> &'static str {
    "ok\n"
}

/// At least one engine can take requests.
async fn ready(State(frontend): State<Arc<Frontend>>) -> Response {
    let workers = frontend.fleet.ready_workers();
    if workers == 0 {
        return ApiError::unavailable("no engine is ready").into_response();
    }
    Json(json!({"workers": workers})).into_response()
}

/// Every worker that can take requests, and what is known of it.
async fn workers(State(frontend): State<Arc<Frontend>>) -> Json<Value> {
    Json(workers::report(&frontend.fleet))
}

async fn metrics(State(frontend): State<Arc<Frontend>>) -> Response {
    match frontend.metrics.render(&frontend) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}
