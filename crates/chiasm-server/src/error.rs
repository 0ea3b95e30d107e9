//! The one place where everything that can go wrong becomes an HTTP status and OpenAI's error body.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chiasm_engine::EngineError;
use chiasm_media::{Fault, MediaError};
use chiasm_prompt::PromptError;
use chiasm_vision::VisionError;
use serde_json::{Value, json};

/// A failed request, ready to be told to the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What went wrong and what to do, for people.
    pub message: String,
    /// The request field at fault, such as `messages[2].content[1].image_url`.
    pub param: Option<String>,
    /// A stable word for programs, such as `unsupported_field`.
    pub code: &'static str,
}

impl ApiError {
    /// 400: the client can fix it by changing `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: Some(param.into()),
            code: "invalid_value",
        }
    }

    /// 400: a field that would change the answer and is not implemented.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let param = param.into();
        Self {
            status: StatusCode::BAD_REQUEST,
            message: format!("'{param}' is not supported; remove it from the request"),
            param: Some(param),
            code: "unsupported_field",
        }
    }

    /// 503: no engine can take the request now; worth trying again.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, message: message.into(), param: None, code: "unavailable" }
    }

    /// 503, or another status that is put in its place: all engines are busy; worth trying again.
    pub fn busy(message: impl Into<String>) -> Self {
        Self { code: "overloaded", ..Self::unavailable(message) }
    }

    /// 500: our fault or the engine's.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, message: message.into(), param: None, code: "internal_error" }
    }

    /// 404: the model or the path is not here.
    pub fn not_found(message: impl Into<String>, code: &'static str) -> Self {
        Self { status: StatusCode::NOT_FOUND, message: message.into(), param: None, code }
    }

    /// Names the field when the error does not yet name one.
    #[must_use]
    pub fn at(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| param.to_owned());
        self
    }

    /// OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn body(&self) -> Value {
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status.as_u16(), 429 | 503 | 529) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<MediaError> for ApiError {
    fn from(error: MediaError) -> Self {
        let (status, code) = match error.fault() {
            Fault::BadRequest => (StatusCode::BAD_REQUEST, "invalid_media"),
            Fault::Forbidden => (StatusCode::FORBIDDEN, "media_forbidden"),
            Fault::NotFound => (StatusCode::NOT_FOUND, "media_not_found"),
            Fault::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "media_too_large"),
            Fault::Unsupported => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_unsupported"),
            Fault::Corrupt => (StatusCode::UNPROCESSABLE_ENTITY, "media_corrupt"),
            Fault::OriginFailed => (StatusCode::BAD_GATEWAY, "media_origin_failed"),
            Fault::Busy => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
            Fault::OriginTimeout => (StatusCode::GATEWAY_TIMEOUT, "media_origin_timeout"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "media_failed"),
        };
        Self { status, message: error.to_string(), param: None, code }
    }
}

impl From<PromptError> for ApiError {
    fn from(error: PromptError) -> Self {
        if !error.is_request_fault() {
            return Self::internal(error.to_string());
        }
        Self {
            status: StatusCode::BAD_REQUEST,
            message: error.to_string(),
            param: Some(error.parameter().unwrap_or("messages").to_owned()),
            code: "invalid_prompt",
        }
    }
}

impl From<VisionError> for ApiError {
    fn from(error: VisionError) -> Self {
        if error.fault() != chiasm_vision::Fault::Request {
            return Self::internal(error.to_string());
        }
        Self { status: StatusCode::BAD_REQUEST, message: error.to_string(), param: None, code: "invalid_image" }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::InvalidRequest { field, message } => Self::invalid(field, message),
            EngineError::Ended => Self::internal(error.to_string()),
            error => {
                Self { status: StatusCode::BAD_GATEWAY, message: error.to_string(), param: None, code: "engine_failed" }
            }
        }
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
    fn the_innermost_field_name_is_kept() {
        assert_eq!(ApiError::unsupported("a.b").at("a").param.as_deref(), Some("a.b"));
        assert_eq!(ApiError::internal("x").at("a").param.as_deref(), Some("a"));
    }
}
