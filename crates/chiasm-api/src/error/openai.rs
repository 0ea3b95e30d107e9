//! OpenAI's error format.

use serde_json::{Value, json};

use super::{ApiError, ErrorKind};

/// Returns OpenAI's error body.
pub(super) fn error_body(error: &ApiError) -> Value {
    let kind = match error.kind {
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::RateLimited => "rate_limit_error",
        ErrorKind::Unavailable => "service_unavailable_error",
        ErrorKind::Overloaded => "overloaded_error",
        ErrorKind::Invalid
        | ErrorKind::Unauthenticated
        | ErrorKind::Forbidden
        | ErrorKind::TooLarge
        | ErrorKind::UnsupportedType
        | ErrorKind::Unprocessable => "invalid_request_error",
        ErrorKind::Internal | ErrorKind::BadGateway | ErrorKind::TimedOut => "server_error",
    };
    let ApiError { message, param, code, .. } = error;
    json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_field_is_named() {
        let body = error_body(&ApiError::unsupported("tools"));
        assert_eq!(body["error"]["param"], "tools");
        assert_eq!(body["error"]["type"], "invalid_request_error");
    }
}
