//! What somebody on call looks at: metrics by cause, the request's line, times in the answer.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{SOON, serve};
use crate::support::{Server, demo_model, free_port, wait_for};

fn ask(tokens: u32, stream: bool) -> Value {
    json!({"model": "m", "prompt": "hello", "max_tokens": tokens, "ignore_eos": true, "stream": stream})
}

#[tokio::test]
async fn every_end_of_a_request_is_counted_on_its_own_label() {
    let server = serve(&["--sim-decode-rate", "50", "--request-timeout", "2"]).await;
    server.post("/v1/completions", &ask(2, true)).await.chunks();
    // One that takes too long, and one whose client leaves.
    assert!(
        server
            .post("/v1/completions", &ask(1000, true))
            .await
            .text
            .contains("\"code\":\"timeout\"")
    );
    let mut left = server.open("/v1/completions", &ask(1000, true)).await;
    left.chunk().await.expect("a first chunk");
    drop(left);
    for how in ["finished", "failed", "left"] {
        let name = format!("chiasm_stream_ends_total{{how=\"{how}\"}}");
        wait_for(how, SOON, async || server.metric(&name).await == 1.0).await;
    }
    let url = format!("{}/v1/completions", server.url);
    let whole = server
        .client
        .post(url)
        .header("content-type", "application/json")
        .body(ask(1000, false).to_string());
    let whole = tokio::spawn(whole.send());
    wait_for("the request", SOON, async || server.metric("chiasm_in_flight_requests").await == 1.0)
        .await;
    whole.abort();
    let name = "chiasm_requests_total{endpoint=\"completions\",status=\"499\"}";
    wait_for("499", SOON, async || server.metric(name).await == 1.0).await;

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
async fn every_cause_of_a_503_has_a_code_of_its_own() {
    let server = serve(&["--max-requests", "1", "--sim-decode-rate", "10"]).await;
    let mut slow = server.open("/v1/completions", &ask(1000, true)).await;
    slow.chunk().await.expect("a first chunk");
    let code =
        |text: &str| serde_json::from_str::<Value>(text).expect("JSON")["error"]["code"].clone();
    let full = server.post("/v1/completions", &ask(1, false)).await;
    assert_eq!((full.status, code(&full.text)), (503, json!("requests_full")));
    drop(slow);

    let (model, nobody) =
        (demo_model().display().to_string(), format!("tcp://127.0.0.1:{}", free_port()));
    let nobody = Server::start(&[&model, "--served-model-name", "m", "--attach", &nobody]);
    let nobody = nobody.post("/v1/completions", &ask(1, false)).await;
    assert_eq!((nobody.status, code(&nobody.text)), (503, json!("no_engine")));
}

#[tokio::test]
async fn an_answer_tells_what_it_took() {
    let server = serve(&[]).await;
    for stream in [false, true] {
        let answer = server.post("/v1/completions", &ask(2, stream)).await;
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
async fn the_body_tells_what_an_answer_took_to_those_who_ask() {
    let server = serve(&[]).await;
    for (path, stream) in [
        ("/v1/completions", false),
        ("/v1/completions", true),
        ("/v1/chat/completions", false),
        ("/v1/chat/completions", true),
    ] {
        let mut body = ask(5, stream);
        if path.contains("chat") {
            body["messages"] = json!([{"role": "user", "content": body["prompt"].take()}]);
        }
        body["nvext"] = json!({"extra_fields": ["timing", "worker_id"]});
        let asked =
            SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64;
        let answer = server.post(path, &body).await;
        // The worker's header is as ever.
        let worker: u64 = answer
            .header("x-chiasm-worker")
            .trim_start_matches("worker_")
            .parse()
            .expect("a number");
        let told: Vec<Value> = match stream {
            true => answer.chunks().into_iter().filter(|event| !event["nvext"].is_null()).collect(),
            false => vec![answer.ok()],
        };
        assert_eq!(told.len(), 1, "{told:?}");
        if stream {
            assert_eq!(told[0]["choices"][0]["finish_reason"], "length");
        }
        let nvext = &told[0]["nvext"];
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
        assert!((asked - 1..asked + 20_000).contains(&received), "{timing}, asked at {asked}");
    }
    let quiet = server.post("/v1/completions", &ask(2, false)).await.ok();
    assert!(quiet.get("nvext").is_none());
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
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
        let told = response.headers()["content-type"].to_str().expect("text").to_owned();
        assert!(told.starts_with(kind), "{accept}: {told}");
        let text = response.text().await.expect("text");
        assert_eq!(text.ends_with("# EOF\n"), kind != "text/plain", "{accept}");
        let described = if kind == "text/plain" { "chiasm_panics_total" } else { "chiasm_panics" };
        assert!(text.contains(&format!("# TYPE {described} counter\n")), "{accept}");
    }
}
