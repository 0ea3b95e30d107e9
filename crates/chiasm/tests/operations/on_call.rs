//! Diagnostics for operators on call: metrics by cause, error codes, and timings in answers.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{TIMEOUT, serve};
use crate::support::{Server, demo_model, free_port, wait_for};

fn body(tokens: u32, stream: bool) -> Value {
    json!({
        "model": "m",
        "prompt": "hello",
        "max_tokens": tokens,
        "ignore_eos": true,
        "stream": stream,
    })
}

#[tokio::test]
async fn ends_of_requests_are_counted_by_cause() {
    let server = serve(&["--sim-decode-rate", "50", "--request-timeout", "2"]).await;
    server.post("/v1/completions", &body(2, true)).await.chunks();
    // A request that exceeds its deadline, and one whose client disconnects.
    assert!(
        server
            .post("/v1/completions", &body(1000, true))
            .await
            .text
            .contains("\"code\":\"timeout\"")
    );
    let mut stream = server.open("/v1/completions", &body(1000, true)).await;
    stream.chunk().await.expect("a first chunk");
    drop(stream);
    for how in ["finished", "failed", "left"] {
        let name = format!("chiasm_stream_ends_total{{how=\"{how}\"}}");
        wait_for(how, TIMEOUT, async || server.metric(&name).await == 1.0).await;
    }
    let url = format!("{}/v1/completions", server.url);
    let whole = server
        .client
        .post(url)
        .header("content-type", "application/json")
        .body(body(1000, false).to_string());
    let whole = tokio::spawn(whole.send());
    wait_for("the request", TIMEOUT, async || {
        server.metric("chiasm_in_flight_requests").await == 1.0
    })
    .await;
    whole.abort();
    let name = "chiasm_requests_total{endpoint=\"completions\",status=\"499\"}";
    wait_for("499", TIMEOUT, async || server.metric(name).await == 1.0).await;

    server.post("/v1/completions", &json!({"model": "other", "prompt": "x"})).await.refused(404);
    server.post("/v1/completions", &json!({"model": "m"})).await.refused(400);
    for (status, code) in [(404, "model_not_found"), (400, "")] {
        let name = format!("chiasm_refusals_total{{status=\"{status}\",code=\"{code}");
        assert_eq!(server.metric(&name).await, 1.0, "{name}");
    }
    assert_eq!(server.metric("chiasm_request_duration_seconds_count").await, 6.0);
    assert!(server.metric("chiasm_inter_token_latency_seconds_count").await > 50.0);
    for stage in ["plan", "hand_off", "prefill", "queue"] {
        let name = format!("chiasm_request_stage_seconds_count{{stage=\"{stage}\"}}");
        assert!(server.metric(&name).await >= 3.0, "{name}");
    }
}

#[tokio::test]
async fn causes_of_503_have_distinct_codes() {
    let server = serve(&["--max-requests", "1", "--sim-decode-rate", "10"]).await;
    let mut slow = server.open("/v1/completions", &body(1000, true)).await;
    slow.chunk().await.expect("a first chunk");
    let code =
        |text: &str| serde_json::from_str::<Value>(text).expect("JSON")["error"]["code"].clone();
    let full = server.post("/v1/completions", &body(1, false)).await;
    assert_eq!((full.status, code(&full.text)), (503, json!("requests_full")));
    drop(slow);

    let model = demo_model().display().to_string();
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let server = Server::start(&[&model, "--served-model-name", "m", "--attach", &address]);
    let answer = server.post("/v1/completions", &body(1, false)).await;
    assert_eq!((answer.status, code(&answer.text)), (503, json!("no_engine")));
}

#[tokio::test]
async fn server_timing_header_has_stages_of_the_answer() {
    let server = serve(&[]).await;
    for stream in [false, true] {
        let answer = server.post("/v1/completions", &body(2, stream)).await;
        let timing = answer.header("server-timing");
        for name in ["prepare", "queue", "ttft"] {
            let value =
                timing.split(", ").find_map(|entry| entry.strip_prefix(&format!("{name};dur=")));
            let milliseconds: f64 = value.expect(name).parse().expect("a number");
            assert!((0.0..20_000.0).contains(&milliseconds), "{timing}");
        }
    }
}

#[tokio::test]
async fn nvext_reports_timing_when_requested() {
    let server = serve(&[]).await;
    for (path, stream) in [
        ("/v1/completions", false),
        ("/v1/completions", true),
        ("/v1/chat/completions", false),
        ("/v1/chat/completions", true),
    ] {
        let mut request = body(5, stream);
        if path.contains("chat") {
            request["messages"] = json!([{"role": "user", "content": request["prompt"].take()}]);
        }
        request["nvext"] = json!({"extra_fields": ["timing", "worker_id"]});
        let sent_at =
            SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64;
        let answer = server.post(path, &request).await;
        // The header names the same worker.
        let worker: u64 = answer
            .header("x-chiasm-worker")
            .trim_start_matches("worker_")
            .parse()
            .expect("a number");
        let with_nvext: Vec<Value> = if stream {
            answer.chunks().into_iter().filter(|event| !event["nvext"].is_null()).collect()
        } else {
            vec![answer.ok()]
        };
        assert_eq!(with_nvext.len(), 1, "{with_nvext:?}");
        if stream {
            assert_eq!(with_nvext[0]["choices"][0]["finish_reason"], "length");
        }
        let nvext = &with_nvext[0]["nvext"];
        assert_eq!(
            nvext["worker_id"],
            json!({"prefill_worker_id": worker, "decode_worker_id": worker})
        );
        let timing = &nvext["timing"];
        let [wait, prefill, ttft, total, rate] =
            ["prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "total_time_ms", "kv_hit_rate"]
                .map(|name| timing[name].as_f64().unwrap_or_else(|| panic!("{name} in {timing}")));
        assert!(
            (wait + prefill - ttft).abs() < 2e-3 && ttft <= total && total < 20_000.0,
            "{timing}"
        );
        assert!((0.0..=1.0).contains(&rate), "{timing}");
        let received = timing["request_received_ms"].as_u64().expect("a time");
        let expected = sent_at - 1..sent_at + 20_000;
        assert!(expected.contains(&received), "{timing}, sent at {sent_at}");
    }
    let plain = server.post("/v1/completions", &body(2, false)).await.ok();
    assert!(plain.get("nvext").is_none());
}

#[tokio::test]
async fn metrics_format_follows_the_accept_header() {
    let server = serve(&[]).await;
    for (accept, kind) in [
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text",
        ),
        ("text/plain", "text/plain"),
        ("*/*", "text/plain"),
    ] {
        let request = server.client.get(format!("{}/metrics", server.url)).header("accept", accept);
        let response = request.send().await.expect("metrics");
        let content_type = response.headers()["content-type"].to_str().expect("text").to_owned();
        assert!(content_type.starts_with(kind), "{accept}: {content_type}");
        let text = response.text().await.expect("text");
        assert_eq!(text.ends_with("# EOF\n"), kind != "text/plain", "{accept}");
        let family = if kind == "text/plain" { "chiasm_panics_total" } else { "chiasm_panics" };
        assert!(text.contains(&format!("# TYPE {family} counter\n")), "{accept}");
    }
}
