//! Traces for a collector that takes them, and for one that does not.

use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::serve;

const BODY: &str = "hello";

#[tokio::test]
async fn traces_are_sent_before_the_process_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let server = serve(&[
        "--otlp-traces-endpoint",
        &endpoint,
        "--otlp-traces-headers",
        "api-key=unspeakable",
    ])
    .await;
    server.logged(&format!("endpoint={endpoint}/v1/traces"));
    server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
    let (mut collector, _) = listener.accept().await.expect("it is sent at once");
    let mut told = vec![0; 64 << 10];
    let mut length = 0;
    while !String::from_utf8_lossy(&told[..length]).contains("text_completion m") {
        let more = collector.read(&mut told[length..]).await.expect("a message");
        assert!(more > 0, "{}", String::from_utf8_lossy(&told[..length]));
        length += more;
    }
    let told = String::from_utf8_lossy(&told[..length]).into_owned();
    assert!(
        told.starts_with("POST /v1/traces ") && told.contains("api-key: unspeakable"),
        "{told}"
    );
    assert!(!told.contains(BODY), "a prompt is nobody's");
    assert_eq!(server.lines_logged("unspeakable"), 0);
    // It never answers: neither requests nor the end wait for that.
    for _ in 0..20 {
        server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
    }
    assert!(server.terminate(Duration::from_secs(8)).await);
}

#[tokio::test]
async fn a_collector_that_is_not_there_is_told_of_once_and_counted() {
    let server = serve(&["--otlp-traces-endpoint", "http://127.0.0.1:9"]).await;
    for _ in 0..3 {
        server.post("/v1/completions", &json!({"prompt": BODY, "max_tokens": 1})).await.ok();
        server.logged("traces are lost");
    }
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while server.metric("chiasm_otlp_spans_total{outcome=\"refused\"}").await < 15.0 {
        assert!(std::time::Instant::now() < deadline, "five spans of each request");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(server.lines_logged("traces are lost"), 1);
}
