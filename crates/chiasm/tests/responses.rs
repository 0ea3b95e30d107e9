//! The Responses API with a simulated engine. `real_vllm` tests it with the `openai` package and
//! real engines.

use std::time::Duration;

use crate::support::{Answer, Server, demo_model, event_grammar};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let args =
        [&[&model, "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"][..], extra]
            .concat();
    let server = Server::start(&args);
    server.wait_ready(1, Duration::from_secs(20)).await;
    server
}

/// Returns a request with additional fields.
fn body(fields: Value) -> Value {
    let mut body =
        json!({"model": "m", "input": "Say something.", "max_output_tokens": 20, "temperature": 0});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

/// Parses the events of a streamed answer, which must keep their grammar.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    event_grammar::responses(&answer.text);
    let parse = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value =
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    answer.text.split_terminator("\n\n").map(parse).collect()
}

#[tokio::test]
async fn response_equals_its_stream() {
    let server = serve(&[]).await;
    let request = body(json!({"instructions": "Be short.", "metadata": {"a": "b"}, "store": true}));
    // A simulated engine's answer depends on how much of the prompt is cached. From now on, all of
    // it is.
    server.post(PATH, &request).await.ok();
    let answer = server.post(PATH, &request).await;
    let whole = answer.ok();
    assert_eq!(answer.header("x-chiasm-worker"), "worker_0");
    assert_eq!(whole["id"], format!("resp_{}", answer.header("x-request-id")));
    let text = whole["output"][0]["content"][0]["text"].as_str().expect("text").to_owned();
    assert!(!text.is_empty());
    assert_eq!(
        (&whole["metadata"], &whole["instructions"]),
        (&json!({"a": "b"}), &json!("Be short."))
    );

    let messages = json!([
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Say something."},
    ]);
    let chat = json!({"model": "m", "messages": messages, "max_tokens": 20, "temperature": 0});
    let chat = server.chat(&chat).await.ok();
    assert_eq!(chat["choices"][0]["message"]["content"], text.as_str());
    for (response_field, chat_field) in
        [("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")]
    {
        assert_eq!(whole["usage"][response_field], chat["usage"][chat_field]);
    }

    let mut streamed = request;
    streamed["stream"] = json!(true);
    let events = events(&server.post(PATH, &streamed).await);
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).map(Some).collect::<Vec<_>>());
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(
        deltas.map(|event| event["delta"].as_str().expect("text")).collect::<String>(),
        text
    );
    let last = &events.last().expect("events")["response"];
    for field in ["status", "output", "tools", "usage"] {
        let comparable = |response: &Value| match field {
            "output" => response[field][0]["content"].clone(),
            "usage" => response[field]["total_tokens"].clone(),
            _ => response[field].clone(),
        };
        assert_eq!(comparable(last), comparable(&whole), "{field}");
    }
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"responses\",status=\"200\"}").await,
        3.0
    );
    assert_eq!(server.metric("chiasm_in_flight_requests").await, 0.0);
    server.wait_for_log("endpoint=\"responses\"");
}

/// Concatenates the texts of tokens with log probabilities.
fn join_tokens(tokens: &Value) -> String {
    let tokens = tokens.as_array().expect("tokens");
    tokens.iter().map(|token| token["token"].as_str().expect("text")).collect()
}

#[tokio::test]
async fn log_probabilities_cover_only_the_text() {
    let answer = "<think>Let me see.</think>\n\nFine. \
                  <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let flags =
        ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--sim-answer", answer];
    let server = serve(&flags).await;
    let tools = json!([{"type": "function", "name": "f"}]);
    let fields = json!({
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "tools": tools,
        "max_output_tokens": 200,
    });
    let whole = server.post(PATH, &body(fields.clone())).await.ok();
    let kinds: Vec<_> =
        whole["output"].as_array().expect("items").iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    let part = &whole["output"][1]["content"][0];
    assert_eq!(join_tokens(&part["logprobs"]), "\n\nFine.");
    assert_eq!(part["text"], "\n\nFine.");
    assert!(part["logprobs"].as_array().expect("tokens").iter().all(|token| {
        token["top_logprobs"].as_array().is_some_and(|top| top.len() == 2)
            && token["logprob"].is_f64()
    }));
    assert_eq!(whole["top_logprobs"], 2);

    let mut streamed = body(fields);
    streamed["stream"] = json!(true);
    let events = events(&server.post(PATH, &streamed).await);
    let with_type = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas: Vec<Value> = with_type("response.output_text.delta")
        .flat_map(|event| event["logprobs"].as_array().expect("tokens").clone())
        .collect();
    assert_eq!(json!(deltas), part["logprobs"]);
    let done = with_type("response.output_text.done").next().expect("an event");
    assert_eq!(done["logprobs"], part["logprobs"]);
    let last = &events.last().expect("events")["response"];
    assert_eq!(last["output"][1]["content"][0]["logprobs"], part["logprobs"]);
}

#[tokio::test]
async fn earlier_input_is_in_the_prompt() {
    let server = serve(&[]).await;
    let tokens = async |input: Value| {
        let answer = server.post(PATH, &body(json!({"input": input}))).await;
        answer.ok()["usage"]["input_tokens"].as_u64().expect("a number")
    };
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let text = json!({"type": "input_text", "text": "What is this?"});
    let image = json!({"type": "input_image", "image_url": url, "detail": "auto"});
    let without = tokens(json!([{"role": "user", "content": [text]}])).await;
    let with = tokens(json!([{"role": "user", "content": [text, image]}])).await;
    assert!(with > without + 50, "{with} and {without}");
    let with_call = tokens(json!([
        {"role": "user", "content": [text]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "it is a long and winding road"},
    ]));
    assert!(with_call.await > without + 5);
    let broken = json!({"type": "input_image", "image_url": "data:image/jpeg;base64,AAAA"});
    let refused =
        server.post(PATH, &body(json!({"input": [{"role": "user", "content": [broken]}]}))).await;
    assert!((400..500).contains(&refused.status), "{}", refused.text);
    assert_eq!(refused.refused(refused.status), "input[0].content[0].image_url");
}

#[tokio::test]
async fn custom_tool_of_a_namespace_is_called_with_text() {
    let arguments = r#"{"input": "echo \"hé\" > \\tmp\n"}"#;
    let call =
        &format!("<tool_call>{{\"name\": \"box__sh\", \"arguments\": {arguments}}}</tool_call>");
    let server = serve(&["--tool-call-parser", "hermes", "--sim-answer", call]).await;
    let custom = json!({"type": "custom", "name": "sh", "description": "runs it"});
    let tools =
        json!([{"type": "namespace", "name": "box", "description": "a box", "tools": [custom]}]);
    let allowed = json!([{"type": "custom", "name": "sh"}]);
    let mut request = body(json!({
        "tools": tools,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": allowed},
        "truncation": "auto",
        "max_output_tokens": 200,
    }));
    let whole = server.post(PATH, &request).await.ok();
    let text = "echo \"hé\" > \\tmp\n";
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["namespace"], &item["name"]),
        (&json!("custom_tool_call"), &json!("box"), &json!("sh"))
    );
    assert_eq!((&item["input"], &whole["status"]), (&json!(text), &json!("completed")));
    assert_eq!(
        (&whole["tools"], &whole["tool_choice"]),
        (&request["tools"], &request["tool_choice"])
    );

    request["stream"] = json!(true);
    let events = events(&server.post(PATH, &request).await);
    let deltas =
        events.iter().filter(|event| event["type"] == "response.custom_tool_call_input.delta");
    assert_eq!(
        deltas.map(|event| event["delta"].as_str().expect("text")).collect::<String>(),
        text
    );
    assert_eq!(events.last().expect("events")["response"]["output"][0]["input"], text);
}

#[tokio::test]
async fn truncated_or_refused_response_states_the_reason() {
    let server = serve(&["--api-key", "key", "--sim-max-model-len", "256"]).await;
    let post = async |fields: Value| {
        let url = format!("{}{PATH}", server.url);
        let request =
            server.client.post(url).bearer_auth("key").header("content-type", "application/json");
        Answer::read(request.body(body(fields).to_string()).send().await.expect("an answer")).await
    };
    assert_eq!(server.post(PATH, &body(json!({}))).await.status, 401);
    let cut = post(json!({"max_output_tokens": 2})).await.ok();
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(cut["output"][0]["status"], "incomplete");
    assert_eq!(
        post(json!({"previous_response_id": "resp_1"})).await.refused(400),
        "previous_response_id"
    );
    assert_eq!(
        post(json!({"tools": [{"type": "web_search"}]})).await.refused(400),
        "tools[0].type"
    );
    assert_eq!(post(json!({"model": "other"})).await.refused(404), "model");
    // The pipeline's error is about messages, which the Responses API calls input.
    assert_eq!(post(json!({"input": "word ".repeat(100_000)})).await.refused(400), "input");
}

#[tokio::test]
async fn stored_responses_are_not_found() {
    let server = serve(&[]).await;
    let get = reqwest::Method::GET;
    let post = reqwest::Method::POST;
    let delete = reqwest::Method::DELETE;
    for (method, path) in [(&get, ""), (&delete, ""), (&post, "/cancel"), (&get, "/input_items")] {
        let request =
            server.client.request(method.clone(), format!("{}{PATH}/resp_1{path}", server.url));
        let answer = Answer::read(request.send().await.expect("an answer")).await;
        assert_eq!(answer.refused(404), "response_id");
        assert!(
            answer.text.contains("resp_1") && answer.text.contains("does not store"),
            "{}",
            answer.text
        );
    }
    let get = server.client.get(format!("{}{PATH}", server.url)).send().await.expect("an answer");
    assert_eq!(get.status(), 405);
}
