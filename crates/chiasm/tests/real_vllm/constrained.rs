//! Constrained answers: the same as those of `vllm serve`, and refused where the engine can't apply
//! the constraint.

use serde_json::{Value, json};

use super::modalities::short_request;
use crate::support::Server;

/// Returns requests with constraints on the form or the tokens of answers.
pub(crate) fn schema_requests() -> Vec<Value> {
    let schema = json!({
        "type": "object",
        "properties": {"red": {"type": "boolean"}, "shape": {"enum": ["circle", "square"]}},
        "required": ["red", "shape"],
        "additionalProperties": false,
    });
    let tag = json!({
        "type": "structural_tag", "triggers": ["<f>"],
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
    });
    let settings = [
        json!({"structured_outputs": {"choice": ["a red \"square\"\n", "a blue circle"]}}),
        json!({"structured_outputs": {"regex": "[0-9]{4}-[a-f]{2}"}}),
        json!({"structured_outputs": {"grammar": "root ::= \"yes\" | \"no\" root"}}),
        json!({"structured_outputs": {"json": schema.to_string()}}),
        json!({"response_format": {
            "type": "json_schema",
            "json_schema": {"name": "shape", "schema": schema},
        }}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": tag}),
        json!({"logit_bias": {"40": 100, "41": 100, "42": -100}}),
        json!({"allowed_token_ids": [50, 51, 52, 53]}),
        json!({"allowed_token_ids": [50, 51, 52, 53], "bad_words": ["S", "the fox"]}),
    ];
    let constrained = |settings: Value| {
        let mut request = short_request(json!("the quick brown fox jumps over the lazy dog"));
        request["max_tokens"] = json!(40);
        request["ignore_eos"] = json!(false);
        let fields = settings.as_object().cloned().unwrap_or_default();
        request.as_object_mut().expect("an object").extend(fields);
        request
    };
    settings.map(constrained).to_vec()
}

/// Checks that invalid constraints are refused by the name of their field, and that the engine
/// survives them.
pub(crate) async fn check_refused_constraints(server: &Server) {
    for (field, value, param) in [
        ("structured_outputs", json!({"regex": "("}), "structured_outputs.regex"),
        (
            "structured_outputs",
            json!({"grammar": "root ::= nothing"}),
            "structured_outputs.grammar",
        ),
        ("structured_outputs", json!({"json": ""}), "structured_outputs.json"),
        ("structured_outputs", json!({"choice": []}), "structured_outputs.choice"),
        (
            "response_format",
            json!({"type": "structural_tag", "format": {"type": "nothing"}}),
            "response_format",
        ),
        ("logit_bias", json!({"4000000000": 1}), "logit_bias"),
        ("allowed_token_ids", json!([4_000_000_000_u32]), "allowed_token_ids"),
        ("stop_token_ids", json!([4_000_000_000_u32]), "stop_token_ids"),
    ] {
        for stream in [false, true] {
            let mut request = short_request(json!("the quick brown fox"));
            request[field] = value.clone();
            request["stream"] = json!(stream);
            assert_eq!(server.chat(&request).await.refused(400), param, "{field}: {value}");
        }
    }
    // vLLM compiles this grammar but can't follow it. It reports an unexpected error, so the status
    // is 500.
    let mut request = short_request(json!("the quick brown fox"));
    request["structured_outputs"] = json!({"grammar": "root ::= root"});
    assert_eq!(server.chat(&request).await.refused(500), "structured_outputs.grammar");
    assert_eq!(server.ready_workers().await, 1);
    server.chat(&short_request(json!("the quick brown fox"))).await.ok();
}
