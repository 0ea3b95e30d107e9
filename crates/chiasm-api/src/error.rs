//! Errors as an API reports them to clients, independent of HTTP.

mod anthropic;
mod openai;

use std::borrow::Cow;

use chiasm_media::{Fault, MediaError};
use serde_json::Value;

/// The maximum length of an error message, in characters. Messages quote client input, which may be
/// megabytes long.
const MAX_MESSAGE_CHARS: usize = 2000;
/// The maximum length of [`ApiError::param`], in characters.
const MAX_PARAM_CHARS: usize = 300;
/// The maximum length of client input in an error message, in characters.
const MAX_EXCERPT_CHARS: usize = 100;

/// The kind of an error. Each API maps it to an error type, and the HTTP server maps it to a
/// status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid; the client can correct it.
    Invalid,
    /// The request has no valid key.
    Unauthenticated,
    /// The client is not allowed to do this.
    Forbidden,
    /// The requested object does not exist.
    NotFound,
    /// The request exceeds a size limit.
    TooLarge,
    /// The type of the body or of a media item is not supported.
    UnsupportedType,
    /// A media item is corrupt.
    Unprocessable,
    /// The client has used up its share of the capacity.
    RateLimited,
    /// The server or an engine failed.
    Internal,
    /// Another server, on which the request depends, failed.
    BadGateway,
    /// The request can't be accepted at the moment.
    Unavailable,
    /// The server has more requests than it can handle.
    Overloaded,
    /// The answer was not ready before its deadline.
    TimedOut,
}

/// An error as the client receives it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The cause and the remedy in plain text: at most 2,000 characters.
    pub message: String,
    /// The request field at fault, such as `messages[2].content[1].image_url`: at most 300
    /// characters.
    pub param: Option<String>,
    /// A stable machine-readable code, such as `unsupported_field`. No code in Chiasm depends on
    /// it.
    pub code: &'static str,
}

impl ApiError {
    /// Creates an error without a field at fault.
    pub fn new(kind: ErrorKind, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind, message: truncate(message.into(), MAX_MESSAGE_CHARS), param: None, code }
    }

    /// Creates an error for an invalid value of `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(truncate(param.into(), MAX_PARAM_CHARS)),
            ..Self::new(ErrorKind::Invalid, "invalid_value", message)
        }
    }

    /// Creates an error for a field that would change the answer but is not implemented.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("'{}' is not supported; remove it from the request", excerpt(&param));
        Self { code: "unsupported_field", ..Self::invalid(param, message) }
    }

    /// Creates an error for a missing required field.
    pub fn missing(param: &str) -> Self {
        Self { code: "missing_field", ..Self::invalid(param, format!("'{param}' is required")) }
    }

    /// Creates an error for a body that is not valid JSON.
    pub fn invalid_json(error: impl std::fmt::Display) -> Self {
        Self {
            code: "invalid_json",
            ..Self::invalid("body", format!("the body is not valid JSON: {error}"))
        }
    }

    /// Creates an error for a field that exceeds a limit on its element count or its memory.
    pub fn too_many(param: &str, message: String) -> Self {
        Self { kind: ErrorKind::TooLarge, ..Self::invalid(param, message) }
    }

    /// Creates an error caused by the server or an engine.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, "internal_error", message)
    }

    /// Sets the field at fault if the error does not name one yet.
    #[must_use]
    pub fn at(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| truncate(param.to_owned(), MAX_PARAM_CHARS));
        self
    }
}

impl ApiError {
    /// Returns OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn openai_body(&self) -> Value {
        openai::error_body(self)
    }

    /// Returns Anthropic's error body: `{"type": "error", "error": {"type", "message"}}`. This
    /// format has no place for the field at fault, so the message names the field.
    pub fn anthropic_body(&self) -> Value {
        anthropic::error_body(self)
    }
}

/// Returns the beginning of client input, for an error message.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

/// Truncates `text` to `max` characters. A truncated text ends with an additional `…`.
fn truncate(mut text: String, max: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<&MediaError> for ApiError {
    fn from(error: &MediaError) -> Self {
        let (kind, code) = match error.fault() {
            Fault::BadRequest => (ErrorKind::Invalid, "invalid_media"),
            Fault::Forbidden => (ErrorKind::Forbidden, "media_forbidden"),
            Fault::NotFound => (ErrorKind::NotFound, "media_not_found"),
            Fault::TooLarge => (ErrorKind::TooLarge, "media_too_large"),
            Fault::Unsupported => (ErrorKind::UnsupportedType, "media_unsupported"),
            Fault::Corrupt => (ErrorKind::Unprocessable, "media_corrupt"),
            Fault::OriginFailed => (ErrorKind::BadGateway, "media_origin_failed"),
            Fault::Busy => (ErrorKind::Unavailable, "memory_full"),
            Fault::OriginTimeout => (ErrorKind::TimedOut, "media_origin_timeout"),
            _ => (ErrorKind::Internal, "media_failed"),
        };
        Self::new(kind, code, error.to_string())
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
    fn innermost_field_name_is_kept() {
        assert_eq!(ApiError::unsupported("a.b").at("a").param.as_deref(), Some("a.b"));
        assert_eq!(ApiError::internal("x").at("a").param.as_deref(), Some("a"));
    }

    #[test]
    fn overlong_texts_are_truncated() {
        let long = "ö".repeat(1 << 20);
        let error = ApiError::invalid(long.as_str(), long.as_str());
        assert_eq!(error.message.chars().count(), MAX_MESSAGE_CHARS + 1);
        assert_eq!(error.param.unwrap().chars().count(), MAX_PARAM_CHARS + 1);
        let message = ApiError::unsupported(long.as_str()).message;
        assert!(message.chars().count() < 2 * MAX_EXCERPT_CHARS, "{message}");
        let exact = "ö".repeat(MAX_MESSAGE_CHARS);
        assert_eq!(ApiError::internal(exact.as_str()).message, exact);
    }
}
