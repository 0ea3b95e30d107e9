//! Answers that are held to a form or to some tokens: the same as those of `vllm serve`, and
//! refused where an engine fails of it.

use serde_json::{Value, json};

use super::modalities::ask;
use crate::support::Server;

/// Answers that have to be of a form, or of some tokens.
pub(crate) fn constrained_requests() -> Vec<Value> {
    let schema = json!({
        "type": "object", "properties": {"red": {"type": "boolean"}, "shape": {"enum": ["circle", "square"]}},
        "required": ["red", "shape"], "additionalProperties": false,
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
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": tag}),
        json!({"logit_bias": {"40": 100, "41": 100, "42": -100}}),
        json!({"allowed_token_ids": [50, 51, 52, 53]}),
        json!({"allowed_token_ids": [50, 51, 52, 53], "bad_words": ["S", "the fox"]}),
    ];
    let constrained = |settings: Value| {
        let mut request = ask(json!("the quick brown fox jumps over the lazy dog"));
        request["max_tokens"] = json!(40);
        request["ignore_eos"] = json!(false);
        let fields = settings.as_object().cloned().unwrap_or_default();
        request.as_object_mut().expect("an object").extend(fields);
        request
    };
    settings.map(constrained).to_vec()
}

/// Each names its field, and the engine goes on.
pub(crate) async fn what_an_engine_fails_of_is_refused(server: &Server) {
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
            let mut request = ask(json!("the quick brown fox"));
            request[field] = value.clone();
            request["stream"] = json!(stream);
            assert_eq!(server.chat(&request).await.refused(400), param, "{field}: {value}");
        }
    }
    // A grammar that it compiles and can't follow: it calls that unexpected, and the client is not
    // to blame.
    let mut request = ask(json!("the quick brown fox"));
    request["structured_outputs"] = json!({"grammar": "root ::= root"});
    assert_eq!(server.chat(&request).await.refused(500), "structured_outputs.grammar");
    assert_eq!(server.ready_workers().await, 1);
    server.chat(&ask(json!("the quick brown fox"))).await.ok();
}
