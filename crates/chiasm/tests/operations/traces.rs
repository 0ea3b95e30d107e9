//! Traces for a collector that never answers, and for one that is down.

use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::serve;

const BODY: &str = "hello";

#[tokio::test]
async fn unresponsive_collector_does_not_block_shutdown() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let server = serve(&[
        "--otlp-traces-endpoint",
        &endpoint,
        "--otlp-traces-headers",
        "api-key=unspeakable",
    ])
    .await;
    server.wait_for_log(&format!("endpoint={endpoint}/v1/traces"));
    server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
    let (mut collector, _) = listener.accept().await.expect("a connection");
    let mut buffer = vec![0; 64 << 10];
    let mut length = 0;
    while !String::from_utf8_lossy(&buffer[..length]).contains("text_completion m") {
        let more = collector.read(&mut buffer[length..]).await.expect("a message");
        assert!(more > 0, "{}", String::from_utf8_lossy(&buffer[..length]));
        length += more;
    }
    let sent = String::from_utf8_lossy(&buffer[..length]).into_owned();
    assert!(
        sent.starts_with("POST /v1/traces ") && sent.contains("api-key: unspeakable"),
        "{sent}"
    );
    assert!(!sent.contains(BODY), "traces must not contain prompts");
    assert_eq!(server.count_logged("unspeakable"), 0);
    // The collector never answers. Neither requests nor the shutdown wait for it.
    for _ in 0..20 {
        server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
    }
    assert!(server.terminate(Duration::from_secs(8)).await);
}

#[tokio::test]
async fn collector_that_is_down_is_logged_once() {
    let server = serve(&["--otlp-traces-endpoint", "http://127.0.0.1:9"]).await;
    for _ in 0..3 {
        server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
        server.wait_for_log("cannot send traces");
    }
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while server.metric("chiasm_otlp_spans_total{outcome=\"refused\"}").await < 15.0 {
        assert!(std::time::Instant::now() < deadline, "fewer than five spans per request");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(server.count_logged("cannot send traces"), 1);
}
