//! Detection of errors that a server itself caused.

use serde_json::Value;

/// Returns the first 200 characters of an error's message if the server caused the error.
///
/// Recognizes the codes and types of the three APIs, of vLLM and of Chiasm.
pub(crate) fn server_failure(name: &[u8], data: &Value) -> Option<String> {
    const SERVER_FAULTS: [&str; 11] = [
        "server_error",
        "internal_error",
        "internal_server_error",
        "InternalServerError",
        "api_error",
        "overloaded_error",
        "timeout_error",
        "timeout",
        "engine_failed",
        "service_unavailable_error",
        "ServiceUnavailableError",
    ];
    let error = match name {
        b"error" => data.get("error").unwrap_or(data),
        b"response.failed" => data.pointer("/response/error")?,
        _ => data.get("error")?,
    };
    let is_server_fault = ["code", "type"].iter().any(|field| match &error[field] {
        Value::Number(code) => code.as_u64().is_some_and(|code| code >= 500),
        Value::String(code) => SERVER_FAULTS.contains(&code.as_str()),
        _ => false,
    });
    is_server_fault
        .then(|| error["message"].as_str().unwrap_or_default().chars().take(200).collect())
}
