//! Merging a request's `mm_processor_kwargs` with those of the engine.

use serde_json::{Map, Value};

/// Merges two sets of kwargs: the request's values override the engine's, key by key and
/// recursively within objects.
///
/// Follows `_recursively_merge_mm_processor_kwargs` in vLLM's `config/multimodal.py`.
pub(crate) fn merge(
    engine: &Map<String, Value>,
    request: Map<String, Value>,
) -> Map<String, Value> {
    let mut merged = engine.clone();
    for (key, value) in request {
        let value = match (merged.remove(&key), value) {
            (Some(Value::Object(engine)), Value::Object(request)) => {
                Value::Object(merge(&engine, request))
            }
            (_, value) => value,
        };
        merged.insert(key, value);
    }
    merged
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn request_kwargs_override_engine_kwargs_by_key() {
        // The expected values are the output of vLLM's function.
        for (engine, request, expected) in [
            (
                json!({"size": {"shortest_edge": 1, "longest_edge": 2}, "a": 1}),
                json!({"size": {"longest_edge": 5}, "b": 2}),
                json!({"size": {"shortest_edge": 1, "longest_edge": 5}, "a": 1, "b": 2}),
            ),
            (
                json!({"size": 300}),
                json!({"size": {"longest_edge": 5}}),
                json!({"size": {"longest_edge": 5}}),
            ),
            (json!({"size": {"longest_edge": 5}}), json!({"size": 300}), json!({"size": 300})),
            (json!({"size": {"longest_edge": 5}}), json!({"size": null}), json!({"size": null})),
        ] {
            let object = |value: &Value| value.as_object().unwrap().clone();
            assert_eq!(Value::Object(merge(&object(&engine), object(&request))), expected);
        }
    }
}
