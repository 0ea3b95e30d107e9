//! Errors that an API tells its clients, without a word about HTTP.

mod anthropic;
mod openai;

use chiasm_media::{Fault, MediaError};
use serde_json::Value;

/// The longest message of an error, in characters. Messages quote what clients sent, which may be
/// megabytes.
const MAX_MESSAGE_CHARS: usize = 2000;
/// The longest name of a field at fault, in characters.
const MAX_PARAM_CHARS: usize = 300;

/// The kind of an error, after which each API names its type. A server that speaks HTTP has one
/// status for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client can mend the request.
    Invalid,
    /// The request has no valid key.
    Unauthenticated,
    /// The client may not do this.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// The request is larger than it may be.
    TooLarge,
    /// The body, or a media item, is of a type that is not taken.
    UnsupportedType,
    /// A media item can't be understood.
    Unprocessable,
    /// The client has its share of what there is.
    RateLimited,
    /// The fault is the server's.
    Internal,
    /// The fault is that of a server behind this one.
    BadGateway,
    /// The request can't be taken now.
    Unavailable,
    /// The server has more requests than it can take.
    Overloaded,
    /// The answer did not come in time.
    TimedOut,
}

/// A failed request, as its client is told of it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The fault and its remedy, for people: at most 2,000 characters.
    pub message: String,
    /// The request field at fault, such as `messages[2].content[1].image_url`: at most 300
    /// characters.
    pub param: Option<String>,
    /// A stable word for programs, such as `unsupported_field`. Nothing here decides by it.
    pub code: &'static str,
}

impl ApiError {
    /// Creates an error that no field is at fault for.
    pub fn new(kind: ErrorKind, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind, message: shortened(message.into(), MAX_MESSAGE_CHARS), param: None, code }
    }

    /// Creates the error of a request that the client can mend by changing `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(shortened(param.into(), MAX_PARAM_CHARS)),
            ..Self::new(ErrorKind::Invalid, "invalid_value", message)
        }
    }

    /// Creates the error of a field that would change the answer and is not implemented.
    pub fn unsupported(param: impl Into<String>) -> Self {
        let param = param.into();
        let message = format!("'{param}' is not supported; remove it from the request");
        Self { code: "unsupported_field", ..Self::invalid(param, message) }
    }

    /// Creates the error of a field that must be there and is not.
    pub fn missing(param: &str) -> Self {
        Self { code: "missing_field", ..Self::invalid(param, format!("'{param}' is required")) }
    }

    /// Creates the error of a body that is no JSON.
    pub fn invalid_json(error: impl std::fmt::Display) -> Self {
        Self {
            code: "invalid_json",
            ..Self::invalid("body", format!("the body is not valid JSON: {error}"))
        }
    }

    /// Creates the error of a field that holds more than may be built of it.
    pub fn too_many(param: &str, message: String) -> Self {
        Self { kind: ErrorKind::TooLarge, ..Self::invalid(param, message) }
    }

    /// Creates an error that is the server's fault or the engine's.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, "internal_error", message)
    }

    /// Names the field if the error does not name one yet.
    #[must_use]
    pub fn at(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| shortened(param.to_owned(), MAX_PARAM_CHARS));
        self
    }
}

impl ApiError {
    /// Returns OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn openai_body(&self) -> Value {
        openai::error_body(self)
    }

    /// Returns Anthropic's error body: `{"type": "error", "error": {"type", "message"}}`. It has no
    /// place for the field at fault, so the message names it.
    pub fn anthropic_body(&self) -> Value {
        anthropic::error_body(self)
    }
}

/// Cuts `text` off behind `max` characters, and ends it with `…` then.
fn shortened(mut text: String, max: usize) -> String {
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
    fn long_message_and_field_are_cut_off() {
        let long = "ö".repeat(1 << 20);
        let error = ApiError::invalid(long.as_str(), long.as_str());
        assert_eq!(error.message.chars().count(), MAX_MESSAGE_CHARS + 1);
        assert_eq!(error.param.unwrap().chars().count(), MAX_PARAM_CHARS + 1);
        let exact = "ö".repeat(MAX_MESSAGE_CHARS);
        assert_eq!(ApiError::internal(exact.as_str()).message, exact);
    }
}
