//! Functions that a model calls: written and forced as by `vllm serve`, and an agent that lives by
//! them.

use serde_json::{Value, json};

use super::modalities::ask;
use super::requests::ids;
use crate::support::Server;

/// What `vllm serve` needs for them; Chiasm sees it in the chat template.
pub(crate) const TOOL_FLAGS: [&str; 3] =
    ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"];

/// A function whose calls are short, whatever the model.
fn function(name: &str, parameter: &str, values: &[&str]) -> Value {
    let parameters = json!({
        "type": "object", "properties": {(parameter): {"type": "string", "enum": values}}, "required": [parameter],
        "additionalProperties": false,
    });
    json!({"type": "function", "function": {
        "name": name, "description": format!("the {name}"), "parameters": parameters, "strict": true,
    }})
}

fn functions() -> Value {
    json!([
        function("weather", "city", &["Paris", "Hangzhou"]),
        function("light", "state", &["on", "off"]),
        function("look", "at", &["the fox", "the dog"]),
    ])
}

/// A model of chance would write white space wherever JSON may have some: tab, line feed, carriage
/// return, space.
fn no_white_space() -> Value {
    json!({"197": -100, "198": -100, "201": -100, "220": -100})
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Requests with functions, whose prompts and tokens are those of `vllm serve`.
pub(crate) fn tool_requests() -> Vec<Value> {
    let settings = [
        json!({"tool_choice": "required", "parallel_tool_calls": false}),
        json!({"tool_choice": "required"}),
        json!({"tool_choice": named("light")}),
        // Strict functions: what looks like a call is held to one, in the middle of text.
        json!({"tool_choice": "auto"}),
        json!({"tool_choice": "none"}),
    ];
    let with_tools = |settings: Value| {
        let mut request = ask(json!("the quick brown fox jumps over the lazy dog"));
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

/// An agent that is told what to call, calls it, and goes on with what came of it: whole, and
/// streamed.
pub(crate) async fn an_agent_calls_its_functions(server: &Server) {
    let mut messages =
        vec![json!({"role": "user", "content": "the quick brown fox jumps over the lazy dog"})];
    for (choice, name) in
        [(json!("required"), None), (named("light"), Some("light")), (named("look"), Some("look"))]
    {
        let mut request = ask(json!(""));
        request["messages"] = json!(messages);
        request["tools"] = functions();
        request["tool_choice"] = choice;
        request["parallel_tool_calls"] = json!(false);
        request["max_tokens"] = json!(120);
        request["ignore_eos"] = json!(false);
        request["logit_bias"] = no_white_space();
        let answer = server.chat(&request).await.ok();
        let (message, finish) =
            (&answer["choices"][0]["message"], &answer["choices"][0]["finish_reason"]);
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
    let mut request = ask(json!(""));
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

/// A forced call is the same by the other APIs, of which Anthropic's has no bias of tokens.
pub(crate) async fn other_apis_call_alike(server: &Server) {
    let text = "the quick brown fox jumps over the lazy dog";
    let mut chat = ask(json!(text));
    chat["tools"] = functions();
    chat["tool_choice"] = named("light");
    chat["max_tokens"] = json!(100);
    chat["ignore_eos"] = json!(false);
    let called = async |chat: &Value| {
        let answer = server.chat(chat).await.ok();
        let choice = &answer["choices"][0];
        (choice["message"]["tool_calls"][0]["function"].clone(), choice["finish_reason"].clone())
    };

    let (function, finish) = called(&chat).await;
    let flat = |tool: &Value| {
        let function = &tool["function"];
        json!({
            "name": function["name"], "description": function["description"], "input_schema": function["parameters"],
            "strict": true,
        })
    };
    let tools: Vec<Value> = functions().as_array().into_iter().flatten().map(flat).collect();
    let messages = json!({
        "model": "m", "max_tokens": 100, "temperature": 0, "tools": tools, "stream": true,
        "tool_choice": {"type": "tool", "name": "light"}, "messages": [{"role": "user", "content": text}],
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
    let (function, _) = called(&chat).await;
    let flat = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = json!("function");
        function
    };
    let tools: Vec<Value> = functions().as_array().into_iter().flatten().map(flat).collect();
    let request = json!({
        "model": "m", "max_output_tokens": 100, "temperature": 0, "tools": tools, "logit_bias": no_white_space(),
        "tool_choice": {"type": "function", "name": "light"}, "input": text,
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

/// A tool of the Responses API that is no function, and functions of which some alone may be
/// called: the engine is held to them.
pub(crate) async fn custom_and_allowed_tools_are_forced(server: &Server) {
    let text = "the quick brown fox jumps over the lazy dog";
    for is_stream in [false, true] {
        // The engine is held to the tool's name and to an object with a text. A model of chance
        // writes it until it is cut off, unless it likes quotation marks: then it is empty.
        let mut bias = no_white_space();
        bias["1"] = json!(100);
        let request = json!({
            "model": "m", "max_output_tokens": 100, "temperature": 0, "input": text, "logit_bias": bias, "stream": is_stream,
            "tools": [{"type": "custom", "name": "sql"}, {"type": "custom", "name": "sh", "description": "runs it"}],
            "tool_choice": {"type": "custom", "name": "sh"}, "parallel_tool_calls": false,
        });
        let answer = server.post("/v1/responses", &request).await;
        let response = match is_stream {
            false => answer.ok(),
            true => events(&answer.text)
                .pop()
                .map(|event| event["response"].clone())
                .expect("a response"),
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
        let mut request = ask(json!(text));
        request["tools"] = functions();
        let allowed = json!({"mode": "required", "tools": [named(name)]});
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
        let arguments = parsed(call["function"]["arguments"].as_str().expect("text"));
        assert!(is_allowed(&call["function"]["name"], &arguments), "{answer}");
        prompts.push(ids(&answer).1);
    }
    assert!(
        prompts[0].is_array() && prompts.iter().all(|prompt| *prompt == prompts[0]),
        "all functions are in each"
    );
}

/// The events of a stream.
fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(parsed).collect()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

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
    let is_one = |(key, value): (&String, &Value)| {
        parameters.get(key).is_some_and(|schema| {
            schema["enum"].as_array().is_some_and(|values| values.contains(value))
        })
    };
    arguments.len() == 1 && arguments.iter().all(is_one)
}

/// Name, arguments and reason of the end of the one call in a stream.
fn streamed_call(chunks: &[Value]) -> (Value, Value, Value) {
    let (mut name, mut arguments, mut finish) = (Value::Null, String::new(), Value::Null);
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
