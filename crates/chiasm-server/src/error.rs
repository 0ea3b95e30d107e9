//! The one place where everything that can go wrong becomes an HTTP status and OpenAI's error body.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chiasm_media::{Fault, MediaError};
use chiasm_processor::ProcessorError;
use serde_json::{Value, json};

use crate::cpu::CpuError;
use crate::pipeline::{Attempts, Cause, RequestError};

/// A failed request, ready to be told to the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// The fault and its remedy, for people.
    pub message: String,
    /// The request field at fault, such as `messages[2].content[1].image_url`.
    pub param: Option<String>,
    /// A stable word for programs, such as `unsupported_field`. Nothing here decides by it.
    pub code: &'static str,
    /// The value of `Retry-After`; `None` for a second where the status has one.
    pub retry_after: Option<Duration>,
    /// The request's attempts, if a server that is given messages may still answer it. The client
    /// is not told this error then.
    pub left_to_servers: Option<Box<Attempts>>,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after: None, left_to_servers: None }
    }

    /// 400: the client can fix it by changing `param`.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    /// 400: a field that would change the answer and is not implemented.
    pub(crate) fn unsupported(param: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported; remove it from the request");
        Self { code: "unsupported_field", ..Self::invalid(param, message) }
    }

    /// 400: a field that must be there is not.
    pub(crate) fn missing(param: &str) -> Self {
        Self { code: "missing_field", ..Self::invalid(param, format!("'{param}' is required")) }
    }

    /// 400: the body is no JSON.
    pub(crate) fn invalid_json(error: impl std::fmt::Display) -> Self {
        Self { code: "invalid_json", ..Self::invalid("body", format!("the body is not valid JSON: {error}")) }
    }

    /// 413: a field holds more than may be built of it.
    pub(crate) fn too_many(param: &str, message: String) -> Self {
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..Self::invalid(param, message) }
    }

    /// 503: the request can't be taken now, for the reason that `code` names; worth trying again.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    /// 500: our fault or the engine's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// 404: another model is served here.
    pub(crate) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("the model '{asked}' is not served here; '{served}' is");
        Self { param: Some("model".to_owned()), ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message) }
    }

    /// 404: there is no LoRA adapter of this name, or at this path.
    pub(crate) fn no_adapter(param: &str, message: String) -> Self {
        Self { param: Some(param.to_owned()), ..Self::new(StatusCode::NOT_FOUND, "adapter_not_found", message) }
    }

    /// 404: nothing is at this path.
    pub(crate) fn no_such_path() -> Self {
        let message = "no such path; docs/serving.md lists those that exist";
        Self::new(StatusCode::NOT_FOUND, "no_such_path", message)
    }

    /// 404: the response was not kept, as none is.
    pub(crate) fn no_such_response(id: &str) -> Self {
        let message = format!("there is no response '{id}': this server keeps none");
        Self {
            param: Some("response_id".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "response_not_found", message)
        }
    }

    /// 405: the path takes another method.
    pub(crate) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path does not take that method")
    }

    /// 400: the body could not be read to its end.
    pub(crate) fn unreadable_body() -> Self {
        Self { code: "invalid_body", ..Self::invalid("body", "the body could not be read") }
    }

    /// 400: a request that names no host, or several.
    pub(crate) fn no_host() -> Self {
        Self::invalid("host", "a request of HTTP/1.1 must have one 'Host' header")
    }

    /// 417: the client expects something else than to be told when to send its body.
    pub(crate) fn expectation_failed() -> Self {
        let message = "'100-continue' is the only expectation that is met";
        Self { status: StatusCode::EXPECTATION_FAILED, ..Self::invalid("expect", message) }
    }

    /// 401: a key is missing or wrong.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// 400: a page of another web site may not send what its browser asks about; `header` of the question says what.
    pub(crate) fn refused_page(header: &str, message: &str) -> Self {
        Self { code: "cors_refused", ..Self::invalid(header, message) }
    }

    /// 415: `header` says that the body is not plain JSON.
    pub(crate) fn unsupported_body(header: &str, message: &str) -> Self {
        let refused = Self::invalid(header, message);
        Self { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, code: "unsupported_media_type", ..refused }
    }

    /// 429: this client has its share of what there is, and others ask too.
    pub(crate) fn over_share(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
    }

    /// 408: the body came too slowly.
    pub(crate) fn slow_body(message: String) -> Self {
        Self { status: StatusCode::REQUEST_TIMEOUT, code: "invalid_body", ..Self::invalid("body", message) }
    }

    /// 413: the body has too many bytes.
    pub(crate) fn large_body(message: String) -> Self {
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, code: "invalid_body", ..Self::invalid("body", message) }
    }

    fn from_processor(error: &ProcessorError, message: String) -> Self {
        let (status, code) = match error {
            ProcessorError::NoPython { .. } | ProcessorError::NotServed(_) => {
                (StatusCode::BAD_REQUEST, "media_unsupported")
            }
            ProcessorError::Gone(_) => (StatusCode::SERVICE_UNAVAILABLE, "processor_unavailable"),
            ProcessorError::Busy => (StatusCode::SERVICE_UNAVAILABLE, "processor_busy"),
            ProcessorError::TimedOut { .. } => (StatusCode::GATEWAY_TIMEOUT, "processor_timeout"),
            _ => (StatusCode::UNPROCESSABLE_ENTITY, "media_refused"),
        };
        Self::new(status, code, message)
    }

    /// Names the field when the error does not yet name one.
    #[must_use]
    pub(crate) fn at(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| param.to_owned());
        self
    }

    /// OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`.
    pub(crate) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            529 => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// The error of a refused request, an extension of its response for the log.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status.as_u16(), 429 | 503 | 529) {
            let seconds = self.retry_after.map_or(1, |after| after.as_secs_f64().ceil().max(1.0) as u64);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(Refusal { code: self.code, param: self.param, message: self.message });
        response
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let RequestError { cause, field } = error;
        let message = cause.to_string();
        let told = match &cause {
            Cause::Invalid(_) => Self::new(StatusCode::BAD_REQUEST, "invalid_value", message),
            Cause::TooManyItems(_) => Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_value", message),
            Cause::Cpu(CpuError::TooCostly { .. }) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_costly", message)
            }
            Cause::ContextFull { .. } => Self::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message),
            Cause::Media(error) => Self::from(error),
            Cause::Prompt(error) if error.is_request_fault() => {
                let param = error.parameter().map(str::to_owned);
                Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_prompt", message) }
            }
            Cause::Image(error) if error.fault() == chiasm_vision::Fault::Request => {
                Self::new(StatusCode::BAD_REQUEST, "invalid_image", message)
            }
            Cause::Processor(error) => Self::from_processor(error, message),
            Cause::NoWorker(_) | Cause::NoOtherWorker | Cause::Silent => Self::unavailable("no_engine", message),
            Cause::NoAdapter(_) => Self::unavailable("no_adapter", message).at("model"),
            Cause::Busy(_) => Self::unavailable("engines_busy", message),
            Cause::LeftToServers { why, tried } => Self {
                left_to_servers: Some(Box::new(tried.clone())),
                ..Self::from(RequestError::from((**why).clone()))
            },
            Cause::EngineGone(_) => Self::new(StatusCode::BAD_GATEWAY, "engine_failed", message),
            Cause::ServerFailed { status: 504, .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message),
            Cause::ServerFailed { .. } => Self::new(StatusCode::BAD_GATEWAY, "engine_failed", message),
            Cause::KeyRefused { .. } => Self::new(StatusCode::BAD_GATEWAY, "key_refused", message),
            Cause::Overloaded { status, retry_after, .. } => {
                let refused = match status {
                    429 => Self::over_share(message),
                    _ => Self::unavailable("engines_busy", message),
                };
                Self { retry_after: Some(*retry_after), ..refused }
            }
            Cause::UnknownModel { .. } => Self::new(StatusCode::NOT_FOUND, "model_not_found", message).at("model"),
            Cause::Rejected { status, .. } => {
                let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
                Self::new(status, "invalid_value", message)
            }
            Cause::Quarantined => Self::new(StatusCode::BAD_GATEWAY, "quarantined", message),
            Cause::TimedOut { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message),
            _ => Self::internal(message),
        };
        match field {
            Some(field) => told.at(&field),
            None => told,
        }
    }
}

impl From<&MediaError> for ApiError {
    fn from(error: &MediaError) -> Self {
        let (status, code) = match error.fault() {
            Fault::BadRequest => (StatusCode::BAD_REQUEST, "invalid_media"),
            Fault::Forbidden => (StatusCode::FORBIDDEN, "media_forbidden"),
            Fault::NotFound => (StatusCode::NOT_FOUND, "media_not_found"),
            Fault::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "media_too_large"),
            Fault::Unsupported => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_unsupported"),
            Fault::Corrupt => (StatusCode::UNPROCESSABLE_ENTITY, "media_corrupt"),
            Fault::OriginFailed => (StatusCode::BAD_GATEWAY, "media_origin_failed"),
            Fault::Busy => (StatusCode::SERVICE_UNAVAILABLE, "memory_full"),
            Fault::OriginTimeout => (StatusCode::GATEWAY_TIMEOUT, "media_origin_timeout"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "media_failed"),
        };
        Self::new(status, code, error.to_string())
    }
}

impl From<MediaError> for ApiError {
    fn from(error: MediaError) -> Self {
        Self::from(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_field_is_a_400_that_names_it() {
        let error = ApiError::unsupported("tools");
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        assert_eq!(error.body()["error"]["param"], "tools");
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
    }

    #[test]
    fn server_faults_have_the_statuses_of_a_gateway() {
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
            let response = ApiError::from(RequestError::from(cause)).into_response();
            let told = response.headers().get(header::RETRY_AFTER).map(|value| value.to_str().unwrap());
            assert_eq!((response.status().as_u16(), told), (status, retry_after));
        }
    }

    fn overloaded(status: u16, seconds: f64) -> Cause {
        Cause::Overloaded { status, retry_after: Duration::from_secs_f64(seconds), message: "words".to_owned() }
    }

    #[test]
    fn the_innermost_field_name_is_kept() {
        assert_eq!(ApiError::unsupported("a.b").at("a").param.as_deref(), Some("a.b"));
        assert_eq!(ApiError::internal("x").at("a").param.as_deref(), Some("a"));
        let error = ApiError::from(RequestError::from(MediaError::Busy).at("messages[0]").at("messages"));
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (503, Some("messages[0]")));
    }
}
