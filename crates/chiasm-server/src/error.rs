//! Conversion of errors to HTTP statuses, headers and bodies. The layers below know nothing of
//! HTTP.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chiasm_api::{ApiError, ErrorKind, excerpt};
use chiasm_cpu::CpuError;
use chiasm_media::MediaError;
use chiasm_pipeline::{Attempts, Cause, RequestError};
use chiasm_processor::ProcessorError;

use crate::paths::{LOAD_LORA, ModelEndpoint, UNLOAD_LORA};

/// The status 529, Anthropic's `overloaded_error`: the server has more requests than it can take.
const OVERLOADED: u16 = 529;

/// A failed request, ready to be sent to the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{error}")]
pub(crate) struct HttpError {
    /// The HTTP status.
    pub(crate) status: StatusCode,
    /// The error, not yet in the format of an API.
    pub(crate) error: ApiError,
    /// The value of `Retry-After`; `None` for one second if the status has the header.
    pub(crate) retry_after: Option<Duration>,
    /// The request's attempts, if a server that takes whole requests may still answer the request.
    /// In that case the client does not get this error.
    pub(crate) left_to_servers: Option<Box<Attempts>>,
}

impl HttpError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let error = ApiError::new(kind_of(status), code, message);
        Self { status, error, retry_after: None, left_to_servers: None }
    }

    /// Returns a 400 error: the client can fix the request by changing `param`.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::invalid(param, message).into()
    }

    /// Returns a 413 error: a field has too large a value, or requests too large an answer.
    pub(crate) fn too_many(param: &str, message: String) -> Self {
        ApiError::too_many(param, message).into()
    }

    /// Returns a 500 error: the fault is ours or the engine's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        ApiError::internal(message).into()
    }

    /// Returns a 503 error: the request can't be taken now, for the reason that `code` names. Worth
    /// a retry.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    /// Returns a 404 error: this server has another model than the requested one.
    pub(crate) fn no_such_model(requested: &str, served: &str) -> Self {
        let requested = excerpt(requested);
        let message =
            format!("the model '{requested}' does not exist; this server serves '{served}'");
        Self::new(StatusCode::NOT_FOUND, "model_not_found", message).at("model")
    }

    /// Returns a 404 error: there is no LoRA adapter of this name or at this path.
    pub(crate) fn no_adapter(param: &str, message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, "adapter_not_found", message).at(param)
    }

    /// Returns a 404 error: there is no such path, or the server runs without its endpoint.
    pub(crate) fn no_such_path(path: &str) -> Self {
        let message = if path == LOAD_LORA || path == UNLOAD_LORA {
            format!("'{path}' needs --allow-runtime-lora-updating")
        } else {
            format!("there is no path '{}'; docs/api.md lists the paths", excerpt(path))
        };
        Self::new(StatusCode::NOT_FOUND, "no_such_path", message)
    }

    /// Returns a 404 error: responses are not stored.
    pub(crate) fn no_such_response(id: &str) -> Self {
        let id = excerpt(id);
        let message = format!("response '{id}' not found: this server does not store responses");
        Self::new(StatusCode::NOT_FOUND, "response_not_found", message).at("response_id")
    }

    /// Returns a 405 error: the path takes only the `allowed` methods.
    pub(crate) fn method_not_allowed(method: &Method, allowed: &str) -> Self {
        let method = excerpt(method.as_str());
        let message = format!("this path does not support {method}; it supports {allowed}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// Returns a 431 error: the request line and the headers have more than `limit` bytes.
    pub(crate) fn large_head(limit: usize) -> Self {
        let message = format!("the head of the request has more than {limit} bytes");
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_value", message)
    }

    /// Returns a 400 error: the body could not be read to its end.
    pub(crate) fn unreadable_body() -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_body", "the body could not be read").at("body")
    }

    /// Returns a 400 error: the request has no `Host` header, or several.
    pub(crate) fn no_host() -> Self {
        Self::invalid("host", "an HTTP/1.1 request must have exactly one 'Host' header")
    }

    /// Returns a 417 error: the request has an expectation other than `100-continue`.
    pub(crate) fn expectation_failed() -> Self {
        let message = "the only supported expectation is '100-continue'";
        Self::new(StatusCode::EXPECTATION_FAILED, "invalid_value", message).at("expect")
    }

    /// Returns a 401 error: the API key is missing or wrong.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// Returns a 400 error: CORS does not allow the request that a browser announced in a
    /// preflight. `header` is the preflight's header at fault.
    pub(crate) fn refused_preflight(header: &str, message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "cors_refused", message).at(header)
    }

    /// Returns a 415 error: according to `header` the body is not plain JSON.
    pub(crate) fn unsupported_body(header: &str, message: &str) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message).at(header)
    }

    /// Returns a 429 error: this client uses its whole share, and other clients are active.
    pub(crate) fn over_share(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
    }

    /// Returns a 408 error: the body arrived too slowly.
    pub(crate) fn slow_body(message: String) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_body", message).at("body")
    }

    /// Returns a 413 error: the body has too many bytes.
    pub(crate) fn large_body(message: String) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_body", message).at("body")
    }

    fn from_processor(error: &ProcessorError, message: String) -> Self {
        let (status, code) = match error {
            ProcessorError::NoPython { .. } | ProcessorError::Unsupported(_) => {
                (StatusCode::BAD_REQUEST, "media_unsupported")
            }
            ProcessorError::Unavailable(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "processor_unavailable")
            }
            ProcessorError::QueueFull => (StatusCode::SERVICE_UNAVAILABLE, "processor_busy"),
            ProcessorError::TimedOut { .. } => (StatusCode::GATEWAY_TIMEOUT, "processor_timeout"),
            _ => (StatusCode::UNPROCESSABLE_ENTITY, "media_refused"),
        };
        Self::new(status, code, message)
    }

    /// Sets the field at fault if the error does not name one yet.
    #[must_use]
    pub(crate) fn at(self, param: &str) -> Self {
        Self { error: self.error.at(param), ..self }
    }

    /// Returns the same error with another status.
    #[must_use]
    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        let error = ApiError { kind: kind_of(status), ..self.error };
        Self { status, error, ..self }
    }

    /// Returns the field at fault, if there is one.
    pub(crate) fn param(&self) -> Option<&str> {
        self.error.param.as_deref()
    }
}

/// Returns the error kind of a status.
fn kind_of(status: StatusCode) -> ErrorKind {
    match status.as_u16() {
        401 => ErrorKind::Unauthenticated,
        403 => ErrorKind::Forbidden,
        404 => ErrorKind::NotFound,
        413 => ErrorKind::TooLarge,
        415 => ErrorKind::UnsupportedType,
        422 => ErrorKind::Unprocessable,
        429 => ErrorKind::RateLimited,
        502 => ErrorKind::BadGateway,
        503 => ErrorKind::Unavailable,
        504 => ErrorKind::TimedOut,
        OVERLOADED => ErrorKind::Overloaded,
        400..=499 => ErrorKind::Invalid,
        _ => ErrorKind::Internal,
    }
}

/// Returns the status of an error kind.
fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Unauthenticated => StatusCode::UNAUTHORIZED,
        ErrorKind::Forbidden => StatusCode::FORBIDDEN,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::UnsupportedType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorKind::Unprocessable => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        ErrorKind::BadGateway => StatusCode::BAD_GATEWAY,
        ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        // 529 is a valid status, so the default is never used.
        ErrorKind::Overloaded => {
            StatusCode::from_u16(OVERLOADED).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
        }
        ErrorKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
    }
}

/// The error of a refused request, attached to the response as an extension, for the log.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub(crate) ApiError);

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.error.openai_body())).into_response();
        if matches!(self.status.as_u16(), 429 | 503 | OVERLOADED) {
            let seconds =
                self.retry_after.map_or(1, |after| after.as_secs_f64().ceil().max(1.0) as u64);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(Refusal(self.error));
        response
    }
}

/// Converts a refusal to the error format of the API at `path`, whichever part of the server
/// refused the request.
pub(crate) fn to_api_format(path: &str, mut response: Response) -> Response {
    let Some(Refusal(error)) = response.extensions().get() else { return response };
    if !ModelEndpoint::at(path).is_some_and(ModelEndpoint::has_anthropic_errors) {
        return response;
    }
    let body = error.anthropic_body().to_string();
    response.headers_mut().remove(header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(body);
    response
}

impl From<ApiError> for HttpError {
    fn from(error: ApiError) -> Self {
        Self { status: status_of(error.kind), error, retry_after: None, left_to_servers: None }
    }
}

impl From<MediaError> for HttpError {
    fn from(error: MediaError) -> Self {
        ApiError::from(error).into()
    }
}

impl From<RequestError> for HttpError {
    fn from(error: RequestError) -> Self {
        let RequestError { cause, field } = error;
        let message = cause.to_string();
        let http_error = match &cause {
            Cause::Invalid(_) => Self::new(StatusCode::BAD_REQUEST, "invalid_value", message),
            Cause::TooManyItems(_) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_value", message)
            }
            Cause::Cpu(CpuError::TooCostly { .. }) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_costly", message)
            }
            Cause::ContextFull { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
            }
            Cause::Media(error) => ApiError::from(error).into(),
            Cause::Prompt(error) if error.is_request_fault() => {
                let http_error = Self::new(StatusCode::BAD_REQUEST, "invalid_prompt", message);
                match error.parameter() {
                    Some(parameter) => http_error.at(parameter),
                    None => http_error,
                }
            }
            Cause::Image(_) if cause.is_image_fault_of_request() => {
                Self::new(StatusCode::BAD_REQUEST, "invalid_image", message)
            }
            Cause::Processor(error) => Self::from_processor(error, message),
            Cause::StalePlan(_) => Self::unavailable("processor_unavailable", message),
            Cause::NoWorker(_) | Cause::NoOtherWorker | Cause::Silent => {
                Self::unavailable("no_engine", message)
            }
            Cause::NoAdapter(_) => Self::unavailable("no_adapter", message).at("model"),
            Cause::Busy(_) => Self::unavailable("engines_busy", message),
            Cause::LeftToServers { cause, attempts } => Self {
                left_to_servers: Some(Box::new(attempts.clone())),
                ..Self::from(RequestError::from((**cause).clone()))
            },
            Cause::EngineGone(_) => Self::new(StatusCode::BAD_GATEWAY, "engine_failed", message),
            Cause::ServerFailed { status: 504, .. } => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
            }
            Cause::ServerFailed { .. } => {
                Self::new(StatusCode::BAD_GATEWAY, "engine_failed", message)
            }
            Cause::KeyRefused { .. } => Self::new(StatusCode::BAD_GATEWAY, "key_refused", message),
            Cause::Overloaded { status, retry_after, .. } => {
                let refused = match status {
                    429 => Self::over_share(message),
                    _ => Self::unavailable("engines_busy", message),
                };
                Self { retry_after: Some(*retry_after), ..refused }
            }
            Cause::UnknownModel { .. } => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", message).at("model")
            }
            Cause::Rejected { status, .. } => {
                let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
                Self::new(status, "invalid_value", message)
            }
            Cause::Quarantined => Self::new(StatusCode::BAD_GATEWAY, "quarantined", message),
            Cause::TimedOut { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message),
            _ => Self::internal(message),
        };
        match field {
            Some(field) => http_error.at(&field),
            None => http_error,
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use chiasm_api::ErrorKind;
    use chiasm_media::MediaError;

    use super::*;

    #[test]
    fn long_model_name_is_cut() {
        let HttpError { error, .. } = HttpError::no_such_model(&"m".repeat(1 << 20), "served");
        assert!(error.message.contains("mmm…' does not exist"), "{}", error.message);
        assert!(error.message.len() < 200, "{}", error.message);
    }

    #[test]
    fn upstream_faults_get_gateway_statuses() {
        let message = || "words".to_owned();
        for (cause, status, retry_after) in [
            (Cause::ServerFailed { status: 500, message: message() }, 502, None),
            (Cause::ServerFailed { status: 503, message: message() }, 502, None),
            (Cause::ServerFailed { status: 504, message: message() }, 504, None),
            (Cause::KeyRefused { message: message() }, 502, None),
            (Cause::UnknownModel { message: message() }, 404, None),
            (Cause::Rejected { status: 422, message: message() }, 422, None),
            (overloaded(429, 6.2), 429, Some("7")),
            (overloaded(503, 0.0), 503, Some("1")),
        ] {
            let response = HttpError::from(RequestError::from(cause)).into_response();
            let header =
                response.headers().get(header::RETRY_AFTER).map(|value| value.to_str().unwrap());
            assert_eq!((response.status().as_u16(), header), (status, retry_after));
        }
    }

    #[test]
    fn stale_plan_is_retryable() {
        let stale = Cause::StalePlan("the video has other frames".to_owned());
        let response = HttpError::from(RequestError::from(stale)).into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }

    fn overloaded(status: u16, seconds: f64) -> Cause {
        Cause::Overloaded {
            status,
            retry_after: Duration::from_secs_f64(seconds),
            message: "words".to_owned(),
        }
    }

    #[test]
    fn innermost_field_name_is_kept() {
        let error =
            HttpError::from(RequestError::from(MediaError::Busy).at("messages[0]").at("messages"));
        assert_eq!((error.status.as_u16(), error.param()), (503, Some("messages[0]")));
    }

    #[tokio::test]
    async fn only_anthropic_paths_get_anthropic_errors() {
        let text = async |path: &str| {
            let response =
                to_api_format(path, HttpError::invalid("top_k", "too much").into_response());
            assert_eq!(
                (response.status().as_u16(), response.headers()["content-type"].as_bytes()),
                (400, &b"application/json"[..])
            );
            String::from_utf8(to_bytes(response.into_body(), 1000).await.unwrap().to_vec()).unwrap()
        };
        let expected = "{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\
                        \"message\":\"top_k: too much\"}}";
        assert_eq!(text(ModelEndpoint::Messages.path()).await, expected);
        assert_eq!(text(ModelEndpoint::CountTokens.path()).await, expected);
        assert!(text("/v1/messages/").await.starts_with(r#"{"error""#));
    }

    #[test]
    fn error_kind_survives_conversion_to_status() {
        for kind in [
            ErrorKind::Invalid,
            ErrorKind::Unauthenticated,
            ErrorKind::Forbidden,
            ErrorKind::NotFound,
            ErrorKind::TooLarge,
            ErrorKind::UnsupportedType,
            ErrorKind::Unprocessable,
            ErrorKind::RateLimited,
            ErrorKind::Internal,
            ErrorKind::BadGateway,
            ErrorKind::Unavailable,
            ErrorKind::Overloaded,
            ErrorKind::TimedOut,
        ] {
            assert_eq!(kind_of(status_of(kind)), kind);
        }
    }
}
