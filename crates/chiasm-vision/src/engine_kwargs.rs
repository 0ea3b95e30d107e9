//! How a request's `mm_processor_kwargs` go together with those of the engine.

use serde_json::{Map, Value};

/// The request's, and what they leave open as the engine's have it: key by key, and so within
/// objects (`_recursively_merge_mm_processor_kwargs` in vLLM's `config/multimodal.py`).
pub(crate) fn merged(
    engine: &Map<String, Value>,
    request: Map<String, Value>,
) -> Map<String, Value> {
    let mut merged = engine.clone();
    for (key, value) in request {
        let value = match (merged.remove(&key), value) {
            (Some(Value::Object(engine)), Value::Object(request)) => {
                Value::Object(self::merged(&engine, request))
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
    fn a_request_wins_key_by_key() {
        // The values are those of vLLM's function.
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
            assert_eq!(Value::Object(merged(&object(&engine), object(&request))), expected);
        }
    }
}
