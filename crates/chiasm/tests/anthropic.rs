//! Anthropic's Messages API with a simulated engine. `anthropic_client.py` tests it with
//! Anthropic's own package.

use std::time::Duration;

use crate::support::event_grammar::{ParsedAnswer, Piece};
use crate::support::{Answer, Server, demo_model, event_grammar};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

async fn serve(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let args = [&model, "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    let server = Server::start(&[&args, flags].concat());
    server.wait_ready(1, Duration::from_secs(20)).await;
    server
}

/// Returns a body with these fields and the model's name.
fn body(fields: Value) -> Value {
    let mut body = json!({"model": "m"});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

/// Returns a request with a user message and additional fields.
fn request(text: &str, fields: Value) -> Value {
    let mut body = body(json!({"max_tokens": 64, "messages": [{"role": "user", "content": text}]}));
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

/// Parses the events of a streamed answer, which must keep their grammar.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    event_grammar::messages(&answer.text);
    let event = |text: &str| {
        let (name, data) = text
            .strip_prefix("event: ")
            .and_then(|text| text.split_once("\ndata: "))
            .expect("an event");
        let body: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(body["type"], name);
        body
    };
    answer.text.split_terminator("\n\n").map(event).collect()
}

/// Asserts that the request was refused with `status`. Returns the error's type and message.
#[track_caller]
fn assert_refused(answer: &Answer, status: u16) -> (String, String) {
    assert_eq!(answer.status, status, "{}", answer.text);
    let body = answer.json();
    assert_eq!(body["type"], "error");
    let text = |field: &str| body["error"][field].as_str().expect("text").to_owned();
    (text("type"), text("message"))
}

/// Covers a model that thinks between its calls, and one that ends inside its second call.
#[tokio::test]
async fn apis_keep_the_order_of_the_models_output() {
    let call =
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>";
    let half = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Ro";
    let thought = "<think>hm</think>";
    let flags = ["--tool-call-parser", "glm45", "--reasoning-parser", "glm45", "--sim-answer"];
    for (answer, has_ended) in [
        (format!("{thought}{call}{thought}{call}"), true),
        (format!("{thought}{call}{half}"), false),
    ] {
        let server = serve(&[&flags[..], &[&answer]].concat()).await;
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let fields =
            json!({"max_tokens": 500, "tools": [{"name": "look", "input_schema": schema}]});
        let whole = event_grammar::whole_message(
            &server.post(MESSAGES, &request("Go.", fields.clone())).await.ok(),
        );
        let mut streamed = request("Go.", fields);
        streamed["stream"] = json!(true);
        let message = event_grammar::messages(&server.post(MESSAGES, &streamed).await.text);
        assert_eq!(message, whole);

        let function = json!({"name": "look", "parameters": schema});
        let mut chat = json!({
            "model": "m",
            "messages": [{"role": "user", "content": "Go."}],
            "max_tokens": 500,
            "tools": [{"type": "function", "function": function}],
        });
        let whole = event_grammar::whole_chat(&server.chat(&chat).await.ok());
        chat["stream"] = json!(true);
        let chat = event_grammar::chat(&server.chat(&chat).await.text).remove(0);
        assert_eq!(chat.unordered(), whole);

        let mut responses_body = json!({
            "model": "m",
            "input": "Go.",
            "max_output_tokens": 500,
            "tools": [{"type": "function", "name": "look", "parameters": schema}],
        });
        let whole = server.post("/v1/responses", &responses_body).await.ok();
        let whole = event_grammar::whole_response(&whole);
        responses_body["stream"] = json!(true);
        let streamed = server.post("/v1/responses", &responses_body).await;
        let response = event_grammar::responses(&streamed.text);
        assert_eq!(response, whole);

        let ends = [&chat, &message, &response].map(|answer| answer.end.as_deref());
        let expected = if has_ended {
            ["tool_calls", "tool_use", "completed"]
        } else {
            ["stop", "end_turn", "incomplete"]
        };
        assert_eq!(ends, expected.map(Some));
        let kinds = |answer: &ParsedAnswer| {
            let kind = |piece: &Piece| match piece {
                Piece::Reasoning(_) => "reasoning",
                Piece::Text(_) => "text",
                Piece::Call(_) => "call",
            };
            answer.pieces.iter().map(kind).collect::<Vec<_>>()
        };
        let expected: &[&str] = if has_ended {
            &["reasoning", "call", "reasoning", "call"]
        } else {
            &["reasoning", "call", "call"]
        };
        for answer in [&chat, &message, &response] {
            assert_eq!(kinds(answer), expected);
        }
    }
}

#[tokio::test]
async fn thinking_budget_is_accepted_without_reasoning() {
    let server = serve(&["--reasoning-parser", "none"]).await;
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    let body = request("Tell a short story.", json!({"max_tokens": 2000, "thinking": thinking}));
    let whole = server.post(MESSAGES, &body).await.ok();
    assert_eq!(whole["content"][0]["type"], "text");
    // vLLM's own field is refused without a reasoning parser, as in vLLM.
    let chat = json!({"model": "m", "thinking_token_budget": 1024, "messages": body["messages"]});
    assert_eq!(server.chat(&chat).await.refused(400), "thinking_token_budget");
}

#[tokio::test]
async fn streamed_message_equals_whole_message() {
    let server = serve(&[]).await;
    // With different salts nothing is cached, so the simulated engine gives the same answer.
    let whole = server
        .post(MESSAGES, &request("Tell a short story.", json!({"cache_salt": "a"})))
        .await
        .ok();
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"]),
        (&json!("message"), &json!("assistant"), &json!("m"))
    );
    assert!(whole["id"].as_str().is_some_and(|id| id.starts_with("msg_")), "{whole}");
    assert_eq!(
        (&whole["stop_reason"], &whole["stop_sequence"]),
        (&json!("end_turn"), &Value::Null)
    );
    assert_eq!(whole["content"].as_array().expect("blocks").len(), 1);

    let streamed = request("Tell a short story.", json!({"cache_salt": "b", "stream": true}));
    let events = events(&server.post(MESSAGES, &streamed).await);
    let names: Vec<_> =
        events.iter().map(|event| event["type"].as_str().expect("a name")).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, whole["content"][0]["text"].as_str().expect("text"));
    let last = &events[events.len() - 2];
    assert_eq!(
        (&last["usage"], &last["delta"]["stop_reason"]),
        (&whole["usage"], &whole["stop_reason"])
    );
    let start = &events[0]["message"];
    assert_eq!(start["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!((&start["usage"]["output_tokens"], &start["content"]), (&json!(0), &json!([])));

    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"messages\",status=\"200\"}").await,
        2.0
    );
    assert!(server.wait_for_log_line("stream_end=\"finished\"").contains("endpoint=\"messages\""));
}

#[tokio::test]
async fn count_tokens_includes_images() {
    let server = serve(&[]).await;
    let source =
        json!({"type": "base64", "media_type": "image/jpeg", "data": STANDARD.encode(DAWN.jpeg)});
    let call = json!({"type": "tool_use", "id": "t", "name": "camera", "input": {"zoom": 2}});
    let image = json!({"type": "image", "source": source});
    let messages = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [image]},
            {"type": "text", "text": "What is in this picture?"},
        ]},
    ]);
    let schema = json!({"type": "object", "properties": {"zoom": {"type": "number"}}});
    let fields = json!({
        "messages": messages,
        "tools": [{"name": "camera", "input_schema": schema}],
        "tool_choice": {"type": "none"},
        "system": "Be brief.",
    });
    let counted = server.post(COUNT_TOKENS, &body(fields.clone())).await.ok();
    let mut message_body = body(fields);
    message_body["max_tokens"] = json!(64);
    let answer = server.post(MESSAGES, &message_body).await;
    assert_eq!(answer.header("x-chiasm-worker"), "worker_0");
    assert!(answer.headers.contains_key("x-chiasm-overlap"));
    let answer = answer.ok();
    let text = answer["content"][0]["text"].as_str().expect("text");
    assert!(text.starts_with("1 image 280x224 (80 tokens, "), "{text}");
    let usage = |field: &str| answer["usage"][field].as_u64().expect("a count");
    let prompt =
        ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"].map(usage);
    assert_eq!(counted, json!({"input_tokens": prompt.iter().sum::<u64>()}));
    // The incomplete last block is not cached.
    assert!(prompt[0] < 16 && prompt[2] > 80, "{answer}");
    let again = server.post(MESSAGES, &message_body).await.ok();
    assert!(again["usage"]["cache_read_input_tokens"].as_u64() > Some(80), "{again}");
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"count_tokens\",status=\"200\"}").await,
        1.0
    );
}

#[tokio::test]
async fn later_system_message_moves_where_template_allows() {
    let messages = json!([
        {"role": "system", "content": "One."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "system", "content": [{"type": "text", "text": "Two."}]},
        {"role": "user", "content": "z"},
    ]);
    let later = json!({"messages": messages, "system": "Zero."});
    let first =
        json!({"messages": [messages[1], messages[2], messages[4]], "system": "Zero.One.Two."});
    let head = "{% for m in messages %}";
    let guard = "{% if m.role == 'system' and not loop.first %}\
                 {{ raise_exception('system first') }}{% endif %}";
    let tail = "<{{ m.role }}>{{ m.content }}{% endfor %}";
    let mut counts = Vec::new();
    for template in [format!("{head}{guard}{tail}"), format!("{head}{tail}")] {
        let server = serve(&["--chat-template", &template]).await;
        let count = async |fields: &Value| {
            server.post(COUNT_TOKENS, &body(fields.clone())).await.ok()["input_tokens"]
                .as_u64()
                .expect("a count")
        };
        let mut message_body = body(later.clone());
        message_body["max_tokens"] = json!(4);
        server.post(MESSAGES, &message_body).await.ok();
        counts.push((count(&later).await, count(&first).await));
    }
    assert_eq!(counts[0].0, counts[0].1, "moved to the start for a strict template");
    assert!(counts[1].0 > counts[1].1, "left in place for other templates: {counts:?}");
}

#[tokio::test]
async fn stop_reason_names_the_cause() {
    let server = serve(&[]).await;
    let stopped =
        server.post(MESSAGES, &request("x", json!({"stop_sequences": [" of "]}))).await.ok();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" of "))
    );
    let short =
        server.post(MESSAGES, &request("x", json!({"max_tokens": 2, "stream": true}))).await;
    let events = events(&short);
    let last = &events[events.len() - 2];
    assert_eq!(
        (&last["delta"]["stop_reason"], &last["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(2))
    );
}

#[tokio::test]
async fn errors_have_anthropics_types() {
    let server = serve(&["--api-key", "secret"]).await;
    let with_key = async |header: &str, key: &str, body: &Value| {
        let request = server.client.post(format!("{}{MESSAGES}", server.url)).header(header, key);
        let request = request
            .header("content-type", "application/json")
            .header("anthropic-version", "2023-06-01");
        Answer::read(request.body(body.to_string()).send().await.expect("an answer")).await
    };
    let (kind, _) = assert_refused(&server.post(MESSAGES, &request("x", json!({}))).await, 401);
    assert_eq!(kind, "authentication_error");
    assert_eq!(
        assert_refused(&with_key("x-api-key", "wrong", &request("x", json!({}))).await, 401).0,
        "authentication_error"
    );
    with_key("authorization", "Bearer secret", &request("x", json!({}))).await.ok();
    let post = async |body: &Value| with_key("x-api-key", "secret", body).await;
    post(&request("x", json!({}))).await.ok();
    let broken_image = json!({"type": "image", "source": {"type": "base64", "data": "!"}});
    let tools = json!([{"name": "f", "input_schema": {}}]);
    for (fields, status, kind, named) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens"),
        (json!({"n": 2}), 400, "invalid_request_error", "'n'"),
        (json!({"model": "other"}), 404, "not_found_error", "other"),
        (
            json!({"messages": [{"role": "user", "content": [broken_image]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0].source: ",
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "tool", "name": "g"}}),
            400,
            "invalid_request_error",
            "tool_choice.name: ",
        ),
    ] {
        let (error_type, message) = assert_refused(&post(&request("x", fields)).await, status);
        assert_eq!(error_type, kind);
        assert!(message.contains(named), "{message} should name {named}");
    }
    let get = server.client.get(format!("{}{MESSAGES}", server.url)).header("x-api-key", "secret");
    let answer = Answer::read(get.send().await.expect("an answer")).await;
    assert_eq!(assert_refused(&answer, 405).0, "invalid_request_error");
    assert_eq!(answer.headers["content-length"], answer.text.len().to_string().as_str());
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"messages\",status=\"400\"}").await,
        4.0
    );
}
