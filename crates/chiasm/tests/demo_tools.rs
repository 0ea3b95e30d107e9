//! Tools of the demo's model, as an agent uses them with `chiasm demo --keep`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, demo_model};

const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";

async fn serve() -> Server {
    let model = demo_model().display().to_string();
    let server =
        Server::start(&[&model, "--served-model-name", "m", "--sim", "1", "--sim-answer", CALL]);
    server.wait_ready(1, Duration::from_secs(20)).await;
    server
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}})
}

/// Returns a conversation with a tool call and its result.
fn conversation() -> Value {
    let tool =
        json!({"type": "function", "function": {"name": "weather", "parameters": parameters()}});
    let call = json!({"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Ulm\"}"}});
    json!({"model": "m", "tools": [tool], "messages": [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]})
}

#[tokio::test]
async fn demo_model_calls_tools_in_all_apis() {
    let server = serve().await;
    let chat = server.chat(&conversation()).await.ok();
    let call = &chat["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("weather"), &json!("{\"city\": \"Ulm\"}"))
    );
    assert_eq!(chat["choices"][0]["finish_reason"], "tool_calls");

    let body = json!({"model": "m", "input": "x",
        "tools": [{"type": "function", "name": "weather", "parameters": parameters()}]});
    let response = server.post("/v1/responses", &body).await.ok();
    assert_eq!(
        (&response["output"][0]["type"], &response["output"][0]["name"]),
        (&json!("function_call"), &json!("weather"))
    );

    let body = json!({
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "weather", "input_schema": parameters()}],
    });
    let message = server.post("/v1/messages", &body).await.ok();
    assert_eq!(message["content"][0]["input"], json!({"city": "Ulm"}));
    assert_eq!(message["stop_reason"], "tool_use");
}

#[tokio::test]
async fn demo_template_renders_tools_with_results() {
    let server = serve().await;
    let tokens = server.post("/tokenize", &conversation()).await.ok()["tokens"].take();
    let prompt = server.post("/detokenize", &json!({"model": "m", "tokens": tokens})).await.ok();
    let prompt = prompt["prompt"].as_str().expect("text");
    // Like vLLM, the template gets a tool with all fields of its type.
    let tool = r#"{"type": "function", "function": {"name": "weather", "description": null, "#
        .to_owned()
        + r#""parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}"#;
    let expected = format!(
        "<|im_start|>system\nThese are the tools:\n<tools>\n{tool}\n</tools>\n\
         To call one, write its name and its arguments:\n\
         <tool_call>\n{{\"name\": NAME, \"arguments\": OBJECT}}\n</tool_call><|im_end|>\n\
         <|im_start|>user\nHow is the weather?<|im_end|>\n\
         <|im_start|>assistant\n\n{CALL}<|im_end|>\n\
         <|im_start|>tool\nrain<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    assert_eq!(prompt, expected);
}
