use chiasm_request::{Prompt, ToolChoice};
use serde_json::json;

use super::*;
use crate::ErrorKind;

fn with(extra: &Value) -> Value {
    let mut body = json!({"model": "m", "input": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn parse(extra: &Value) -> Result<ResponsesRequest, ApiError> {
    ResponsesRequest::parse(Intake::from_json(&with(extra))).map(|(request, _)| request)
}

fn chat(request: ResponsesRequest) -> Chat {
    match request.generate.prompt {
        Prompt::Chat(chat) => chat,
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_map_to_request() {
    let request = parse(&json!({
        "instructions": "be short",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "tool_choice": "required",
        "parallel_tool_calls": false,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    }))
    .unwrap();
    let sampling = &request.generate.sampling;
    assert_eq!(
        (sampling.max_tokens, sampling.temperature, sampling.top_p),
        (Some(7), Some(0.5), Some(0.25))
    );
    assert_eq!((sampling.seed, sampling.n), (Some(3), 1));
    let tools = request.generate.tools.clone().unwrap();
    assert_eq!((tools.choice, tools.in_parallel), (ToolChoice::Required, false));
    let chat = chat(request);
    let roles: Vec<_> = chat.messages.iter().map(|message| message.role.as_str()).collect();
    assert_eq!(roles, ["system", "user"]);
    assert_eq!(chat.messages[0].content, Some(ChatContent::Text("be short".to_owned())));
    assert_eq!(chat.reasoning_effort.as_deref(), Some("low"));
    assert_eq!(chat.tools, Some(tools.tools));
    assert!(chat.add_generation_prompt && !chat.continue_final_message);
}

#[test]
fn penalties_reach_sampling() {
    let sampling = |extra: Value| parse(&extra).unwrap().generate.sampling;
    let given = sampling(json!({"presence_penalty": 0.5, "frequency_penalty": -2}));
    assert_eq!((given.presence_penalty, given.frequency_penalty), (Some(0.5), Some(-2.0)));
    let silent = sampling(json!({}));
    assert_eq!((silent.presence_penalty, silent.frequency_penalty), (None, None));
}

#[test]
fn either_field_requests_text_logprobs() {
    let include = json!(["message.output_text.logprobs"]);
    for (extra, top) in [
        (json!({}), None),
        (json!({"top_logprobs": 0, "include": ["reasoning.encrypted_content"]}), None),
        (json!({"include": include}), Some(0)),
        (json!({"top_logprobs": 3}), Some(3)),
        (json!({"top_logprobs": 20, "include": include}), Some(20)),
    ] {
        let sampling = parse(&extra).unwrap().generate.sampling;
        assert_eq!((sampling.logprobs, sampling.logprobs_of_text), (top, top.is_some()), "{extra}");
    }
}

#[test]
fn incomplete_answer_is_continued() {
    let item =
        json!({"type": "message", "role": "assistant", "status": "incomplete", "content": "a"});
    let chat = chat(parse(&json!({"input": [item]})).unwrap());
    assert!(!chat.add_generation_prompt && chat.continue_final_message);
}

#[test]
fn text_formats_match_chat_formats() {
    let format = |format: Value| parse(&json!({"text": {"format": format}}));
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let given = json!({"type": "json_schema", "name": "n", "strict": true, "schema": schema});
    let structured = |request: ResponsesRequest| request.generate.sampling.structured.unwrap();
    let enforced = structured(format(given.clone()).unwrap());
    assert_eq!(
        (enforced.constraint, enforced.field),
        (Constraint::JsonSchema(schema.to_string().into()), "text.format.schema")
    );
    assert_eq!(
        structured(format(json!({"type": "json_object"})).unwrap()).constraint,
        Constraint::JsonObject
    );
    assert!(format(json!({"type": "text"})).unwrap().generate.sampling.structured.is_none());
    for (wrong, field) in [
        (json!({"type": "yaml"}), "text.format.type"),
        (json!({}), "text.format.type"),
        (json!({"type": "json_schema", "name": "n"}), "text.format.schema"),
        (json!({"type": "json_schema", "schema": 3}), "text.format.schema"),
        (json!({"type": "json_object", "schema": {}}), "text.format.schema"),
    ] {
        assert_eq!(format(wrong).err().unwrap().param.as_deref(), Some(field));
    }
    let both = json!({"text": {"format": given}, "structured_outputs": {"regex": "a"}});
    assert_eq!(parse(&both).err().unwrap().param.as_deref(), Some("structured_outputs"));
}

#[test]
fn unsupported_field_is_refused_by_name() {
    for (extra, field) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"conversation": {"id": "conv_1"}}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"prompt": {"id": "pmpt_1"}}), "prompt"),
        (
            json!({"include": ["message.output_text.logprobs", "message.output_text.bytes"]}),
            "include[1]",
        ),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"top_logprobs": -1}), "top_logprobs"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"frequency_penalty": "high"}), "frequency_penalty"),
        (json!({"truncation": "left"}), "truncation"),
        (json!({"client_metadata": "a"}), "client_metadata"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"text": {"colour": "red"}}), "text.colour"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort"),
        (json!({"reasoning": {"depth": 3}}), "reasoning.depth"),
        (json!({"reasoning": {"context": "current_turn"}}), "reasoning.context"),
        (json!({"reasoning": {"mode": "pro"}}), "reasoning.mode"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"max_tokens": 3}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"n": 2}), "n"),
        (json!({"response_format": {"type": "text"}}), "response_format"),
        (
            json!({"stream": true, "stream_options": {"include_usage": true}}),
            "stream_options.include_usage",
        ),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
        (json!({"user": 3}), "user"),
        (json!({"instructions": ["x"]}), "instructions"),
        (json!({"temprature": 1}), "temprature"),
    ] {
        let error = parse(&extra).err().unwrap();
        assert_eq!(
            (error.kind, error.param.as_deref()),
            (ErrorKind::Invalid, Some(field)),
            "{extra}"
        );
    }
    let error = parse(&json!({"previous_response_id": "resp_1"})).err().unwrap();
    assert!(error.message.contains("stores no state"), "{error}");
}

#[test]
fn noop_values_are_accepted() {
    parse(&json!({
        "store": true,
        "background": false,
        "previous_response_id": null,
        "conversation": null,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "top_logprobs": 0,
        "max_tool_calls": 3,
        "client_metadata": {"x-codex-installation-id": "i"},
        "stream": true,
        "stream_options": {"include_obfuscation": false},
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {
            "effort": null,
            "summary": "auto",
            "context": "auto",
            "mode": "standard",
        },
    }))
    .unwrap();
    parse(&json!({"truncation": "auto"})).unwrap();
}

#[test]
fn charge_covers_echoed_fields() {
    let charged = |instructions: &str| {
        let (request, charge) = ResponsesRequest::parse(Intake::from_json(&with(
            &json!({"instructions": instructions}),
        )))
        .unwrap();
        (request.echo.bytes(), charge.bytes())
    };
    let (short_echo, short_charge) = charged("x");
    let (long_echo, long_charge) = charged(&"x".repeat(10_001));
    assert_eq!(long_echo - short_echo, 10_000);
    // The maximum for planning, the text itself, and its echo.
    let added = long_charge - short_charge;
    assert!(added >= 100_000 - 1024, "{added}");
}

#[test]
fn name_of_chats_gets_the_name_here() {
    let error = parse(&json!({"max_tokens": 5})).err().unwrap();
    let expected = "'max_tokens' is not supported; did you mean 'max_output_tokens'?";
    assert_eq!(error.message, expected);
}
