//! Tool calls: prompts and forced calls match `vllm serve`, and a tool loop works.

use serde_json::{Value, json};

use super::modalities::short_request;
use super::requests::ids;
use crate::support::Server;

/// The flags of `vllm serve` for tools; Chiasm detects the format from the chat template.
pub(crate) const TOOL_FLAGS: &[&str] =
    &["--enable-auto-tool-choice", "--tool-call-parser", "hermes"];

/// Returns a function whose calls are short even for a random model.
fn function(name: &str, parameter: &str, values: &[&str]) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {(parameter): {"type": "string", "enum": values}},
        "required": [parameter],
        "additionalProperties": false,
    });
    json!({"type": "function", "function": {
        "name": name,
        "description": format!("the {name}"),
        "parameters": parameters,
        "strict": true,
    }})
}

fn functions() -> Value {
    json!([
        function("weather", "city", &["Paris", "Hangzhou"]),
        function("light", "state", &["on", "off"]),
        function("look", "at", &["the fox", "the dog"]),
    ])
}

/// Returns a `logit_bias` against tab, line feed, carriage return and space. A random model would
/// write white space wherever JSON allows it.
fn no_white_space() -> Value {
    json!({"197": -100, "198": -100, "201": -100, "220": -100})
}

/// Returns a `tool_choice` that forces this function.
fn named_choice(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Returns requests with functions, to compare with `vllm serve`.
pub(crate) fn tool_requests() -> Vec<Value> {
    let settings = [
        json!({"tool_choice": "required", "parallel_tool_calls": false}),
        json!({"tool_choice": "required"}),
        json!({"tool_choice": named_choice("light")}),
        // The functions are strict, so calls in the middle of text are constrained.
        json!({"tool_choice": "auto"}),
        json!({"tool_choice": "none"}),
    ];
    let with_tools = |settings: Value| {
        let mut request = short_request(json!("the quick brown fox jumps over the lazy dog"));
        request["max_tokens"] = json!(80);
        request["ignore_eos"] = json!(false);
        request["tools"] = functions();
        request
            .as_object_mut()
            .expect("an object")
            .extend(settings.as_object().cloned().unwrap_or_default());
        request
    };
    settings.map(with_tools).to_vec()
}

/// Checks a tool loop of three forced calls and their results, whole and streamed.
pub(crate) async fn check_tool_loop(server: &Server) {
    let mut messages =
        vec![json!({"role": "user", "content": "the quick brown fox jumps over the lazy dog"})];
    for (choice, name) in [
        (json!("required"), None),
        (named_choice("light"), Some("light")),
        (named_choice("look"), Some("look")),
    ] {
        let mut request = short_request(json!(""));
        request["messages"] = json!(messages);
        request["tools"] = functions();
        request["tool_choice"] = choice;
        request["parallel_tool_calls"] = json!(false);
        request["max_tokens"] = json!(120);
        request["ignore_eos"] = json!(false);
        request["logit_bias"] = no_white_space();
        let answer = server.chat(&request).await.ok();
        let message = &answer["choices"][0]["message"];
        let finish = &answer["choices"][0]["finish_reason"];
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{answer}"));
        let [call] = calls.as_slice() else { panic!("one call: {answer}") };
        let function = &call["function"];
        assert!(name.is_none_or(|name| function["name"] == name), "{answer}");
        assert_eq!(*finish, if name.is_some() { "stop" } else { "tool_calls" }, "{answer}");
        assert!(
            message["content"].is_null() && call["id"].is_string() && call["type"] == "function",
            "{answer}"
        );
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
        assert!(is_allowed(&function["name"], &arguments), "{answer}");

        request["stream"] = json!(true);
        let streamed = streamed_call(&server.chat(&request).await.chunks());
        assert_eq!(
            streamed,
            (function["name"].clone(), function["arguments"].clone(), finish.clone()),
            "{answer}"
        );

        messages.push(json!({"role": "assistant", "content": null, "tool_calls": calls}));
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "done"}));
    }
    let mut request = short_request(json!(""));
    request["messages"] = json!(messages);
    request["tools"] = functions();
    request["tool_choice"] = json!("none");
    let answer = server.chat(&request).await.ok();
    assert!(
        answer["choices"][0]["message"]["content"].as_str().is_some_and(|text| !text.is_empty()),
        "{answer}"
    );
    assert_eq!(answer["choices"][0]["message"].get("tool_calls"), None, "{answer}");
}

/// Checks that a forced call is the same through the other APIs. Anthropic's has no logit bias.
pub(crate) async fn check_forced_call_of_other_apis(server: &Server) {
    let text = "the quick brown fox jumps over the lazy dog";
    let mut chat = short_request(json!(text));
    chat["tools"] = functions();
    chat["tool_choice"] = named_choice("light");
    chat["max_tokens"] = json!(100);
    chat["ignore_eos"] = json!(false);
    let forced_call = async |chat: &Value| {
        let answer = server.chat(chat).await.ok();
        let choice = &answer["choices"][0];
        (choice["message"]["tool_calls"][0]["function"].clone(), choice["finish_reason"].clone())
    };

    let (function, finish) = forced_call(&chat).await;
    let anthropic_tool = |tool: &Value| {
        let function = &tool["function"];
        json!({
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
            "strict": true,
        })
    };
    let tools: Vec<Value> =
        functions().as_array().into_iter().flatten().map(anthropic_tool).collect();
    let messages = json!({
        "model": "m",
        "max_tokens": 100,
        "temperature": 0,
        "tools": tools,
        "stream": true,
        "tool_choice": {"type": "tool", "name": "light"},
        "messages": [{"role": "user", "content": text}],
    });
    let answer = server.post("/v1/messages", &messages).await;
    let events = events(&answer.text);
    let start = events.iter().find(|event| event["content_block"]["type"] == "tool_use");
    assert_eq!(
        start.map(|event| &event["content_block"]["name"]),
        Some(&function["name"]),
        "{}",
        answer.text
    );
    let arguments: String =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(function["arguments"], arguments, "{}", answer.text);
    let reason = if finish == "length" { "max_tokens" } else { "tool_use" };
    assert!(events.iter().any(|event| event["delta"]["stop_reason"] == reason), "{}", answer.text);

    chat["logit_bias"] = no_white_space();
    let (function, _) = forced_call(&chat).await;
    let flat_tool = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = json!("function");
        function
    };
    let tools: Vec<Value> = functions().as_array().into_iter().flatten().map(flat_tool).collect();
    let request = json!({
        "model": "m",
        "max_output_tokens": 100,
        "temperature": 0,
        "tools": tools,
        "logit_bias": no_white_space(),
        "tool_choice": {"type": "function", "name": "light"},
        "input": text,
    });
    let answer = server.post("/v1/responses", &request).await.ok();
    let call = answer["output"]
        .as_array()
        .and_then(|items| items.iter().find(|item| item["type"] == "function_call"));
    let call = call.unwrap_or_else(|| panic!("{answer}"));
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&function["name"], &function["arguments"]),
        "{answer}"
    );
    assert_eq!(
        (&call["status"], &answer["status"]),
        (&json!("completed"), &json!("completed")),
        "{answer}"
    );
}

/// Checks that custom tools of the Responses API and `allowed_tools` constrain the engine.
pub(crate) async fn check_custom_with_allowed_tools(server: &Server) {
    let text = "the quick brown fox jumps over the lazy dog";
    for is_stream in [false, true] {
        // The constraint is the tool's name and an object with a text. A random model would write
        // the text until its token limit. The bias towards quotation marks makes it empty.
        let mut bias = no_white_space();
        bias["1"] = json!(100);
        let request = json!({
            "model": "m",
            "max_output_tokens": 100,
            "temperature": 0,
            "input": text,
            "logit_bias": bias,
            "stream": is_stream,
            "tools": [
                {"type": "custom", "name": "sql"},
                {"type": "custom", "name": "sh", "description": "runs it"},
            ],
            "tool_choice": {"type": "custom", "name": "sh"},
            "parallel_tool_calls": false,
        });
        let answer = server.post("/v1/responses", &request).await;
        let response = if is_stream {
            let last = events(&answer.text).pop();
            last.map(|event| event["response"].clone()).expect("a response")
        } else {
            answer.ok()
        };
        let items = response["output"].as_array().map(Vec::as_slice);
        let Some([call]) = items else { panic!("one call: {response}") };
        assert_eq!(
            (&call["type"], &call["name"]),
            (&json!("custom_tool_call"), &json!("sh")),
            "{response}"
        );
        assert_eq!(
            (&call["input"], &call["status"]),
            (&json!(""), &json!("completed")),
            "{response}"
        );
    }

    let mut prompts = Vec::new();
    for name in ["weather", "light", "look"] {
        let mut request = short_request(json!(text));
        request["tools"] = functions();
        let allowed = json!({"mode": "required", "tools": [named_choice(name)]});
        request["tool_choice"] = json!({"type": "allowed_tools", "allowed_tools": allowed});
        request["parallel_tool_calls"] = json!(false);
        request["max_tokens"] = json!(120);
        request["ignore_eos"] = json!(false);
        request["logit_bias"] = no_white_space();
        let answer = server.chat(&request).await.ok();
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().map(Vec::as_slice);
        let Some([call]) = calls else { panic!("one call: {answer}") };
        assert_eq!(
            (&call["function"]["name"], &choice["finish_reason"]),
            (&json!(name), &json!("tool_calls")),
            "{answer}"
        );
        let arguments = parse_json(call["function"]["arguments"].as_str().expect("text"));
        assert!(is_allowed(&call["function"]["name"], &arguments), "{answer}");
        prompts.push(ids(&answer).1);
    }
    assert!(
        prompts[0].is_array() && prompts.iter().all(|prompt| *prompt == prompts[0]),
        "every prompt contains all functions"
    );
}

/// Parses the data of all events of a stream.
fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(parse_json).collect()
}

fn parse_json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

/// Returns `true` if `arguments` fit the schema of the function `name`.
fn is_allowed(name: &Value, arguments: &Value) -> bool {
    let functions = functions();
    let function =
        functions.as_array().into_iter().flatten().find(|tool| tool["function"]["name"] == *name);
    let Some(parameters) =
        function.map(|function| &function["function"]["parameters"]["properties"])
    else {
        return false;
    };
    let parameters = parameters.as_object().expect("an object");
    let arguments = arguments.as_object().expect("an object");
    let is_valid = |(key, value): (&String, &Value)| {
        parameters.get(key).is_some_and(|schema| {
            schema["enum"].as_array().is_some_and(|values| values.contains(value))
        })
    };
    arguments.len() == 1 && arguments.iter().all(is_valid)
}

/// Returns name, arguments and finish reason of the only call in a stream.
fn streamed_call(chunks: &[Value]) -> (Value, Value, Value) {
    let mut name = Value::Null;
    let mut arguments = String::new();
    let mut finish = Value::Null;
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], 0);
            if call["id"].is_string() {
                assert!(name.is_null(), "one call");
                name = call["function"]["name"].clone();
            }
            arguments.push_str(call["function"]["arguments"].as_str().expect("text"));
        }
    }
    (name, Value::from(arguments), finish)
}
