//! Request ids and trace ids, from the client's headers to the log.

use std::time::Duration;

use crate::support::{Answer, Server, wait_for};
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/model");
const TIMEOUT: Duration = Duration::from_secs(20);

async fn serve() -> Server {
    let server =
        Server::start(&[MODEL, "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"]);
    server.wait_ready(1, TIMEOUT).await;
    server
}

fn chat_body(stream: bool) -> Value {
    let messages = json!([{"role": "user", "content": "hello"}]);
    json!({"model": "m", "messages": messages, "max_tokens": 5, "stream": stream})
}

async fn post(server: &Server, headers: &[(&str, &str)], body: &Value) -> Answer {
    let request =
        server.client.post(format!("{}/v1/chat/completions", server.url)).body(body.to_string());
    let request = request.header("content-type", "application/json");
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    Answer::read(request.send().await.expect("an answer")).await
}

/// Waits for the log line about a finished request and returns its part after the id.
async fn finished_line(server: &Server, id: &str) -> String {
    let start = format!("request{{id={id}");
    wait_for("the request's line", TIMEOUT, async || server.count_logged(&start) > 0).await;
    server.wait_for_log(&start)
}

#[tokio::test]
async fn client_request_id_is_returned() {
    let server = serve().await;
    for stream in [false, true] {
        let id = format!("order-66.{stream}:a_b");
        let answer = post(&server, &[("x-request-id", &id)], &chat_body(stream)).await;
        assert_eq!((answer.status, answer.header("x-request-id")), (200, id.clone()));
        let body = if stream { answer.chunks()[0].clone() } else { answer.json() };
        assert_eq!(body["id"], format!("chatcmpl-{id}"));
        let line = finished_line(&server, &id).await;
        assert!(line.contains("[ROUTING] best: worker_0 with 0/"), "{line}");
        for field in
            ["endpoint=\"chat\"", "status=200", "completion_tokens=5", "ttft_ms=", "total_ms="]
        {
            assert!(line.contains(field), "{field} in {line}");
        }
        assert!(line.contains(&format!("streamed={stream}")), "{line}");
    }
}

#[tokio::test]
async fn unsafe_request_id_is_replaced() {
    let server = serve().await;
    let long = "x".repeat(129);
    for unsafe_id in ["", "a b", "a/b", &long] {
        let answer = post(&server, &[("x-request-id", unsafe_id)], &chat_body(false)).await;
        let id = answer.header("x-request-id");
        assert_eq!((answer.status, id.len()), (200, 32), "{unsafe_id}");
        assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
    }
    // Refusals and answers of other endpoints have an id, too.
    let refused = post(&server, &[("x-request-id", "wrong-1")], &json!({"model": "m"})).await;
    assert_eq!((refused.status, refused.header("x-request-id")), (400, "wrong-1".to_owned()));
    let line = finished_line(&server, "wrong-1").await;
    assert!(
        line.contains("not routed")
            && line.contains("status=400")
            && line.contains("error=\"'messages'"),
        "{line}"
    );
    for path in ["/health", "/nowhere"] {
        let answer =
            server.client.get(format!("{}{path}", server.url)).send().await.expect("an answer");
        assert!(answer.headers().contains_key("x-request-id"), "{path}");
    }
}

#[tokio::test]
async fn trace_id_is_logged_with_media_counts() {
    use base64::Engine as _;
    let server = serve().await;
    let url = format!(
        "data:image/jpeg;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(DAWN.jpeg)
    );
    let content = json!([
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is it?"},
    ]);
    let mut body = chat_body(false);
    body["messages"][0]["content"] = content;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    post(&server, &[("x-request-id", "traced"), ("traceparent", &parent)], &body).await.ok();
    let line = finished_line(&server, "traced").await;
    assert!(line.contains(&format!("trace_id=\"{trace}\"")), "{line}");
    assert!(line.contains("media_shm=1") || line.contains("media_inline=1"), "{line}");
    // An invalid trace parent is ignored.
    post(&server, &[("x-request-id", "untraced"), ("traceparent", "00-0-0-0")], &chat_body(false))
        .await
        .ok();
    assert!(!finished_line(&server, "untraced").await.contains("trace_id"));
}

#[tokio::test]
async fn cancelled_request_is_logged_with_status_499() {
    let slow = ["--sim-decode-rate", "1", "--sim-speedup", "1"];
    let server =
        Server::start(&[&[MODEL, "--served-model-name", "m", "--sim", "1"], &slow[..]].concat());
    server.wait_ready(1, TIMEOUT).await;
    let request = server
        .client
        .post(format!("{}/v1/chat/completions", server.url))
        .body(chat_body(false).to_string());
    let request = request.header("content-type", "application/json").header("x-request-id", "gone");
    let pending = tokio::spawn(request.send());
    wait_for("the request", TIMEOUT, async || {
        server.metric("chiasm_in_flight_requests").await == 1.0
    })
    .await;
    pending.abort();
    assert!(finished_line(&server, "gone").await.contains("status=499"));
}
