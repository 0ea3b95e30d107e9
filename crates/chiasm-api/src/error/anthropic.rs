//! Anthropic's error format.

use serde_json::{Value, json};

use super::{ApiError, ErrorKind};

/// Returns Anthropic's error body.
pub(super) fn error_body(error: &ApiError) -> Value {
    let kind = match error.kind {
        ErrorKind::Unauthenticated => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::RateLimited => "rate_limit_error",
        ErrorKind::Unavailable | ErrorKind::Overloaded => "overloaded_error",
        ErrorKind::TimedOut => "timeout_error",
        ErrorKind::Internal | ErrorKind::BadGateway => "api_error",
        ErrorKind::Invalid | ErrorKind::UnsupportedType | ErrorKind::Unprocessable => {
            "invalid_request_error"
        }
    };
    let message = &error.message;
    let message = match error.param.as_deref().filter(|param| !message.contains(param)) {
        Some(param) => format!("{param}: {message}"),
        None => message.clone(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kinds_map_to_anthropic_types() {
        for (kind, expected) in [
            (ErrorKind::Unauthenticated, "authentication_error"),
            (ErrorKind::NotFound, "not_found_error"),
            (ErrorKind::RateLimited, "rate_limit_error"),
            (ErrorKind::Unavailable, "overloaded_error"),
            (ErrorKind::Internal, "api_error"),
            (ErrorKind::TooLarge, "request_too_large"),
        ] {
            assert_eq!(error_body(&ApiError::new(kind, "x", "y"))["error"]["type"], expected);
        }
    }

    #[test]
    fn message_names_the_field_once() {
        let message = |error: ApiError| error_body(&error)["error"]["message"].clone();
        assert_eq!(message(ApiError::missing("max_tokens")), "'max_tokens' is required");
        assert_eq!(message(ApiError::invalid("top_k", "too much")), "top_k: too much");
    }
}
