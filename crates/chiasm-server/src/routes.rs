//! Paths, and what surrounds every answer: body limits, the bound on requests in flight, headers, metrics.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::{HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::LengthLimitError;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::answer;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::metrics::InFlight;
use crate::pipeline::Attempted;

/// The whole HTTP interface.
pub fn router(frontend: Arc<Frontend>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ready", get(ready))
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
        answer::chat(&frontend, held, read_json(&frontend, request).await?).await
    };
    finish(&frontend, "chat", answered.await)
}

async fn completions(State(frontend): State<Arc<Frontend>>, request: Request) -> Response {
    let answered = async {
        let held = admit(&frontend)?;
        answer::completions(&frontend, held, read_json(&frontend, request).await?).await
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

/// The body as JSON, within the limits of size and time. Big ones carry images and take milliseconds to parse, so that
/// happens off the async threads.
async fn read_json(frontend: &Frontend, request: Request) -> Result<Value, ApiError> {
    const SMALL: usize = 64 << 10;
    let invalid = |status, message| ApiError { status, code: "invalid_body", ..ApiError::invalid("body", message) };
    let limits = &frontend.limits;
    let too_large = || {
        let message = format!("the body has more than {} bytes (--max-body-bytes)", limits.body_bytes);
        invalid(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if request.body().size_hint().lower() > limits.body_bytes as u64 {
        return Err(too_large());
    }
    let read = to_bytes(request.into_body(), limits.body_bytes);
    let body = tokio::time::timeout(limits.body_timeout, read).await.map_err(|_| {
        let seconds = limits.body_timeout.as_secs_f64();
        let message = format!("the body did not arrive within {seconds} s (--body-timeout)");
        invalid(StatusCode::REQUEST_TIMEOUT, message)
    })?;
    let body = body.map_err(|error| match error.into_inner().is::<LengthLimitError>() {
        true => too_large(),
        false => invalid(StatusCode::BAD_REQUEST, "the body could not be read".to_owned()),
    })?;
    let parsed = if body.len() <= SMALL {
        serde_json::from_slice(&body)
    } else {
        frontend.cpu.run(move || serde_json::from_slice(&body)).await?
    };
    parsed.map_err(|error| ApiError {
        code: "invalid_json",
        ..ApiError::invalid("body", format!("the body is not valid JSON: {error}"))
    })
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

async fn metrics(State(frontend): State<Arc<Frontend>>) -> Response {
    match frontend.metrics.render(&frontend.fleet) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}
