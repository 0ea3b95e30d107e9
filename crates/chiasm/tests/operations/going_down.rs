//! Shutdown: `/ready` fails first, requests in flight finish, and those that take too long end with
//! an error.

use serde_json::{Value, json};

use super::{TIMEOUT, serve};
use crate::support::{send_signal, wait_for};

fn stream() -> Value {
    json!({"model": "m", "prompt": "a", "max_tokens": 8000, "ignore_eos": true, "stream": true})
}

#[tokio::test]
async fn drain_delay_accepts_requests_after_ready_fails() {
    let server = serve(&["--drain-delay", "3"]).await;
    send_signal(server.pid(), "TERM");
    let ready = async || {
        Some(
            server.client.get(format!("{}/ready", server.url)).send().await.ok()?.status().as_u16(),
        )
    };
    wait_for("503 at /ready", TIMEOUT, async || ready().await == Some(503)).await;
    // The request uses a new connection.
    let answer = crate::support::client()
        .post(format!("{}/v1/completions", server.url))
        .header("content-type", "application/json")
        .body(json!({"model": "m", "prompt": "a", "max_tokens": 1}).to_string())
        .send()
        .await
        .expect("connections are still accepted");
    assert_eq!(answer.status(), 200);
    assert!(server.terminate(TIMEOUT).await);
}

#[tokio::test]
async fn second_interrupt_ends_running_requests() {
    let server =
        serve(&["--drain-delay", "600", "--drain-timeout", "600", "--sim-decode-rate", "20"]).await;
    let mut streamed = server.open("/v1/completions", &stream()).await;
    streamed.chunk().await.expect("a first chunk");
    send_signal(server.pid(), "INT");
    server.wait_for_log("another Ctrl-C aborts them");
    // The handler of that Ctrl-C is installed right after that line.
    let ready = async || {
        Some(
            server.client.get(format!("{}/ready", server.url)).send().await.ok()?.status().as_u16(),
        )
    };
    wait_for("503 at /ready", TIMEOUT, async || ready().await == Some(503)).await;
    send_signal(server.pid(), "INT");
    let rest = tokio::time::timeout(TIMEOUT, streamed.text())
        .await
        .expect("an end in time")
        .expect("an orderly end");
    assert!(rest.contains("shutting down"), "{rest}");
    assert!(server.terminate(TIMEOUT).await);
}

#[tokio::test]
async fn drain_timeout_ends_streams_with_an_error() {
    let server = serve(&["--drain-timeout", "0.3", "--sim-decode-rate", "20"]).await;
    let mut streamed = server.open("/v1/completions", &stream()).await;
    streamed.chunk().await.expect("a first chunk");
    let mut body = stream();
    body["stream"] = false.into();
    let client = server.client.clone();
    let whole = client
        .post(format!("{}/v1/completions", server.url))
        .header("content-type", "application/json");
    let whole = tokio::spawn(whole.body(body.to_string()).send());
    wait_for("two requests", TIMEOUT, async || {
        server.metric("chiasm_in_flight_requests").await == 2.0
    })
    .await;
    let ended = tokio::spawn(server.terminate(TIMEOUT));
    let rest = streamed.text().await.expect("an orderly end");
    assert!(rest.contains("\"error\"") && rest.contains("shutting down"), "{rest}");
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(whole.await.expect("joined").expect("an answer").status(), 503);
    assert!(ended.await.expect("joined"), "exit code 0 in time");
}
