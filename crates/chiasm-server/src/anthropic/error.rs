//! Errors in Anthropic's words.

use axum::body::Body;
use axum::http::header;
use axum::response::Response;
use serde_json::{Value, json};

use super::{COUNT_TOKENS, MESSAGES};
use crate::error::{ApiError, Refusal};

/// Anthropic's body: `{"type": "error", "error": {"type", "message"}}`. It has no place for the field at fault, so the message
/// names it.
pub(super) fn body(status: u16, param: Option<&str>, message: &str) -> Value {
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let message = match param.filter(|param| !message.contains(param)) {
        Some(param) => format!("{param}: {message}"),
        None => message.to_owned(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// The same for a whole error.
pub(crate) fn body_of(error: &ApiError) -> Value {
    body(error.status.as_u16(), error.param.as_deref(), &error.message)
}

/// Tells a refusal at one of the two paths in Anthropic's words, whoever refused and why.
pub(crate) fn retold(path: &str, mut response: Response) -> Response {
    if path != MESSAGES && path != COUNT_TOKENS {
        return response;
    }
    let Some(Refusal { message, param, .. }) = response.extensions().get() else { return response };
    let body = body(response.status().as_u16(), param.as_deref(), message).to_string();
    response.headers_mut().remove(header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(body);
    response
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test]
    async fn refusals_are_retold_at_these_paths_alone() {
        let text = async |path: &str| {
            let response = retold(path, ApiError::invalid("top_k", "too much").into_response());
            assert_eq!(
                (response.status().as_u16(), response.headers()["content-type"].as_bytes()),
                (400, &b"application/json"[..])
            );
            String::from_utf8(to_bytes(response.into_body(), 1000).await.unwrap().to_vec()).unwrap()
        };
        let told = r#"{"type":"error","error":{"type":"invalid_request_error","message":"top_k: too much"}}"#;
        assert_eq!(text(MESSAGES).await, told);
        assert_eq!(text(COUNT_TOKENS).await, told);
        assert!(text("/v1/messages/").await.starts_with(r#"{"error""#));
    }

    #[test]
    fn statuses_have_anthropics_names_and_no_field_is_named_twice() {
        let kind = |error: ApiError| body_of(&error)["error"]["type"].clone();
        assert_eq!(kind(ApiError::unauthorized("x")), "authentication_error");
        assert_eq!(kind(ApiError::no_such_model("a", "b")), "not_found_error");
        assert_eq!(kind(ApiError::over_share("x")), "rate_limit_error");
        assert_eq!(kind(ApiError::unavailable("x", "y")), "overloaded_error");
        assert_eq!(kind(ApiError::internal("x")), "api_error");
        assert_eq!(kind(ApiError::large_body("x".to_owned())), "request_too_large");
        let told = body_of(&ApiError::missing("max_tokens"));
        assert_eq!(told["error"]["message"], "'max_tokens' is required");
    }
}
