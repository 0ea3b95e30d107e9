//! Response headers about a request's route.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chiasm_request::RouteOutcome;

/// Adds headers with the workers, cache overlap and timings of a request's route.
pub(crate) fn routing_headers(headers: &mut HeaderMap, route: &RouteOutcome) {
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    put("x-chiasm-worker", route.worker.to_string());
    if let Some(by) = &route.encoded {
        put("x-chiasm-encode-worker", by.worker.to_string());
    }
    if let Some(by) = &route.prefilled {
        put("x-chiasm-prefill-worker", by.worker.to_string());
    }
    put("x-chiasm-overlap", format!("{}/{}", route.overlap_blocks, route.total_blocks));
    put("x-chiasm-transfer", route.delivered.transfer().name().to_owned());
    put("server-timing", route.server_timing());
}
