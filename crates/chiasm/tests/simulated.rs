//! The frontend with simulated engines: everything that needs neither Python nor vLLM.

use std::process::Stdio;
use std::time::Duration;

use crate::support::{Process, Server, chiasm, demo_model, free_port, scenario_run, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, NIGHT, Picture, SNOW, STORM};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a server with `engines` fast simulated engines.
async fn serve(engines: u64, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let count = engines.to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", &count, "--allow-private-media"];
    if !extra.contains(&"--sim-speedup") {
        args.extend(["--sim-speedup", "1000"]);
    }
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, TIMEOUT).await;
    server
}

fn chat_body(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 64})
}

/// Returns a request about the image at `url`.
fn image_body(url: &str) -> Value {
    json!({"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]}]})
}

fn data_uri(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}

/// Returns `body` with additional fields.
fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

#[tokio::test]
async fn scenarios_are_routed_as_expected() {
    // At a real engine's pace, stored blocks become known before the answer has ended.
    let server = serve(2, &["--sim-speedup", "1"]).await;
    scenario_run::play_all(&server, "m", 16, 8).await;
    assert!(server.metric("chiasm_overlap_blocks_total").await > 0.0);
}

#[tokio::test]
async fn demo_prints_a_json_line_per_request() {
    let output = chiasm(&["demo", "--json"]).output().expect("the demo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .expect("text")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    let expected: usize =
        chiasm::scenarios::all().iter().map(|scenario| scenario.turns.len()).sum();
    assert_eq!(lines.len(), expected);
    let fields = [
        "scenario",
        "request",
        "worker",
        "blocks_total",
        "blocks_overlap",
        "prompt_tokens",
        "cached_tokens",
        "transfer",
        "ttft_ms",
    ];
    for line in &lines {
        assert_eq!(line.as_object().expect("an object").keys().collect::<Vec<_>>(), fields);
        assert!(line["ttft_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{line}");
    }
    assert!(lines.iter().any(|line| line["cached_tokens"].as_u64() > Some(0)));
}

#[tokio::test]
async fn simulated_engine_describes_the_image() {
    let server = serve(1, &[]).await;
    let answer = server.chat(&image_body(&data_uri(DAWN.jpeg))).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(
        text.starts_with("1 image 280x224 (80 tokens, ") && text.contains("); 0 of "),
        "{text}"
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let details = &answer["usage"]["prompt_tokens_details"];
    assert_eq!(details["multimodal_tokens"], json!({"image": 80}));
    let blocks = answer["usage"]["prompt_tokens"].as_u64().expect("a count") / 16;
    assert_eq!(
        (&details["cached_tokens"], &details["created_cache_tokens"]),
        (&json!(0), &json!(blocks * 16))
    );
    let again = server.chat(&image_body(&data_uri(DAWN.jpeg))).await.ok();
    let cached =
        again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    let text = again["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(text.contains(&format!("; {cached} of ")), "{text} but {cached} cached");
    assert!(cached >= 80, "{cached}");
}

#[tokio::test]
async fn streamed_chat_equals_whole_answer() {
    let server = serve(1, &[]).await;
    let body = with(
        chat_body("Tell a short story."),
        json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true, "cache_salt": "a"}),
    );
    let whole = server.chat(&body).await.ok();
    // With another salt nothing is cached, so the simulated engine gives the same answer.
    let streamed = with(
        body,
        json!({"stream": true, "stream_options": {"include_usage": true}, "cache_salt": "b"}),
    );
    let chunks = server.chat(&streamed).await.chunks();

    let join = |field: fn(&Value) -> &Value| -> String {
        chunks.iter().filter_map(|chunk| field(chunk).as_str()).collect()
    };
    let text = join(|chunk| &chunk["choices"][0]["delta"]["content"]);
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().expect("text"));
    assert_eq!(join(|chunk| &chunk["choices"][0]["finish_reason"]), "stop");
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    let concat = |field: fn(&Value) -> &Value| -> Vec<Value> {
        chunks.iter().filter_map(|chunk| field(chunk).as_array()).flatten().cloned().collect()
    };
    assert_eq!(
        Value::from(concat(|chunk| &chunk["choices"][0]["token_ids"])),
        whole["choices"][0]["token_ids"]
    );
    assert_eq!(
        Value::from(concat(|chunk| &chunk["choices"][0]["logprobs"]["content"])),
        whole["choices"][0]["logprobs"]["content"]
    );
    let last = chunks.last().expect("a chunk");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], whole["usage"]);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
}

#[tokio::test]
async fn continuous_usage_is_in_every_chunk() {
    let stream_body =
        |fields: Value| with(with(chat_body("word"), json!({"stream": true, "n": 2})), fields);
    let check = |chunks: &[Value]| {
        let (last, others) = chunks.split_last().expect("chunks");
        let prompt = last["usage"]["prompt_tokens"].as_u64().expect("a count");
        let counts: Vec<u64> = others
            .iter()
            .map(|chunk| chunk["usage"]["completion_tokens"].as_u64().expect("a count"))
            .collect();
        assert_eq!(counts[..2], [0, 0], "the chunks with roles");
        assert!(
            counts.is_sorted()
                && others.iter().all(|chunk| chunk["usage"]["prompt_tokens"] == prompt)
        );
        assert_eq!(last["usage"]["completion_tokens"], *counts.last().expect("a count"));
        assert_eq!(last["choices"], json!([]));
    };
    let server = serve(1, &[]).await;
    let options =
        json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    check(&server.chat(&stream_body(options)).await.chunks());
    let chunks = server
        .chat(&stream_body(json!({"stream_options": {"continuous_usage_stats": true}})))
        .await
        .chunks();
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk["choices"][0].is_object()));

    let server = serve(1, &["--enable-force-include-usage"]).await;
    for extra in [json!({}), json!({"stream_options": {"include_usage": false}})] {
        check(&server.chat(&stream_body(extra)).await.chunks());
    }
    let completion = json!({"prompt": "word", "max_tokens": 3, "stream": true});
    let chunks = server.post("/v1/completions", &completion).await.chunks();
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_object()));
}

#[tokio::test]
async fn stop_string_or_max_tokens_ends_the_text() {
    let server = serve(1, &[]).await;
    let stopped = server.chat(&with(chat_body("x"), json!({"stop": [" of "]}))).await.ok();
    let choice = &stopped["choices"][0];
    assert_eq!(choice["message"]["content"], "no images; 0");
    assert_eq!(
        (choice["finish_reason"].as_str(), choice["stop_reason"].as_str()),
        (Some("stop"), Some(" of "))
    );
    let kept = with(chat_body("x"), json!({"stop": " of ", "include_stop_str_in_output": true}));
    assert_eq!(
        server.chat(&kept).await.ok()["choices"][0]["message"]["content"],
        "no images; 0 of "
    );

    let short = server.chat(&with(chat_body("x"), json!({"max_tokens": 2}))).await.ok();
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert_eq!(short["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn choices_of_several_prompts_are_numbered() {
    let server = serve(2, &[]).await;
    let three = server.chat(&with(chat_body("x"), json!({"n": 3, "seed": 1}))).await.ok();
    let indices: Vec<_> =
        three["choices"].as_array().expect("a list").iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2]);

    let body = json!({
        "model": "m",
        "prompt": ["one", "two"],
        "n": 2,
        "max_tokens": 3,
        "logprobs": 1,
        "return_token_ids": true,
    });
    let whole = server.post("/v1/completions", &body).await.ok();
    assert_eq!(whole["choices"].as_array().map(Vec::len), Some(4));
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(3));

    let chunks =
        server.post("/v1/completions", &with(body, json!({"stream": true}))).await.chunks();
    for index in 0..4 {
        let text: String = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .filter_map(|choice| choice["text"].as_str())
            .collect();
        assert_eq!(text, whole["choices"][index]["text"].as_str().expect("text"));
    }
    let ids = json!({"model": "m", "prompt": [5, 6, 7], "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &ids).await.ok()["usage"]["prompt_tokens"], 3);
}

#[tokio::test]
async fn constraint_refused_by_the_engine_is_a_400() {
    let server = serve(1, &["--sim-vllm-version", "0.33.0"]).await;
    let refused = server
        .chat(&with(chat_body("x"), json!({"structured_outputs": {"grammar": "start ::= a"}})))
        .await;
    assert_eq!(refused.refused(400), "structured_outputs.grammar");
    assert!(refused.text.contains("the grammar has no root"), "{}", refused.text);
}

#[tokio::test]
async fn invalid_input_is_refused_by_the_name_of_its_field() {
    let server =
        serve(1, &["--max-body-bytes", "200000", "--limit-mm-per-prompt", "image=2"]).await;
    for (body, status, param) in [
        (with(chat_body("x"), json!({"tools": [{"type": "function"}]})), 400, "tools[0].function"),
        (
            with(chat_body("x"), json!({"response_format": {"type": "yaml"}})),
            400,
            "response_format.type",
        ),
        // The simulated engine refuses a grammar without a root. It simulates vLLM 0.32, which
        // sends no reason over the wire, so the fault may be the engine's.
        (
            with(chat_body("x"), json!({"structured_outputs": {"grammar": "start ::= a"}})),
            500,
            "structured_outputs.grammar",
        ),
        (with(chat_body("x"), json!({"temperature": 3})), 400, "temperature"),
        (with(chat_body("x"), json!({"no_such_field": 1})), 400, "no_such_field"),
        (with(chat_body("x"), json!({"model": "other"})), 404, "model"),
        (with(chat_body("x"), json!({"max_tokens": 0})), 400, "max_tokens"),
        (with(chat_body("x"), json!({"n": 2, "temperature": 0})), 400, "n"),
        (with(chat_body("x"), json!({"stop_token_ids": [1_000_000]})), 400, "stop_token_ids"),
        (
            with(chat_body("x"), json!({"mm_processor_kwargs": {"do_dance": true}})),
            400,
            "mm_processor_kwargs",
        ),
        (with(chat_body("x"), json!({"messages": []})), 400, "messages"),
        (with(chat_body("x"), json!({"min_tokens": 65})), 400, "min_tokens"),
        (chat_body("<|image_pad|>"), 400, "messages"),
        (image_body("file:///etc/passwd"), 403, "messages[0].content[1].image_url"),
        (image_body("ftp://example.org/a.png"), 400, "messages[0].content[1].image_url"),
        (image_body("data:image/png;base64,@@@"), 400, "messages[0].content[1].image_url"),
        (image_body(&data_uri(b"not an image")), 415, "messages[0].content[1].image_url"),
        (
            image_body(&data_uri(&DAWN.jpeg[..DAWN.jpeg.len() / 2])),
            422,
            "messages[0].content[1].image_url",
        ),
        (image_body("http://127.0.0.1:9/none.png"), 502, "messages[0].content[1].image_url"),
    ] {
        let answer = server.chat(&body).await;
        assert_eq!(answer.refused(status), param, "{}", answer.text);
    }
    // Far more tokens than the context of 8,192.
    let long = server.chat(&chat_body(&"y ".repeat(20_000))).await;
    assert_eq!(long.refused(400), "messages");
    // The server reads a refused body up to the limit, so that its client sees the answer. A larger
    // body may break the connection.
    let big = server.chat(&chat_body(&"y".repeat(200_000))).await;
    assert_eq!(big.refused(413), "body");
    let part = json!({"type": "image_url", "image_url": {"url": data_uri(DAWN.jpeg)}});
    let three = json!({"messages": [{"role": "user", "content": [part, part, part]}]});
    assert_eq!(server.chat(&three).await.refused(413), "messages[0].content[2].image_url");

    let invalid_json = server
        .client
        .post(format!("{}/v1/chat/completions", server.url))
        .header("content-type", "application/json");
    let invalid_json = invalid_json.body("{").send().await.expect("an answer");
    assert_eq!(invalid_json.status().as_u16(), 400);
    let unknown_path =
        server.client.get(format!("{}/v1/nothing", server.url)).send().await.expect("an answer");
    assert_eq!(unknown_path.status().as_u16(), 404);
    let outside = json!({"model": "m", "prompt": [1_000_000]});
    assert_eq!(server.post("/v1/completions", &outside).await.refused(400), "prompt");

    // The engine is unharmed.
    server.chat(&chat_body("x")).await.ok();
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
}

#[tokio::test]
async fn private_addresses_are_refused_unless_allowed() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--served-model-name", "m", "--sim", "1"]);
    server.wait_ready(1, TIMEOUT).await;
    let origin = crate::support::origin::Origin::start().await;
    let answer = server.chat(&image_body(&format!("{}/dawn.jpg", origin.url()))).await;
    assert_eq!(answer.refused(403), "messages[0].content[1].image_url");
    assert_eq!(origin.hits.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[tokio::test]
async fn files_are_read_only_below_the_allowed_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("dawn.jpg"), DAWN.jpeg).expect("written");
    let allowed = folder.path().display().to_string();
    let server = serve(1, &["--allowed-local-media-path", &allowed]).await;
    server.chat(&image_body(&format!("file://{allowed}/dawn.jpg"))).await.ok();
    let outside = server.chat(&image_body(&format!("file://{allowed}/../../etc/passwd"))).await;
    assert_eq!(outside.refused(403), "messages[0].content[1].image_url");
}

#[tokio::test]
async fn media_uuid_names_only_its_owners_media() {
    let server = serve(1, &[]).await;
    let chat = async |part: Value, authorization: &str, salt: Option<&str>| {
        let messages = json!([{"role": "user", "content": [part]}]);
        let mut body = json!({"model": "m", "max_tokens": 64, "messages": messages});
        body["cache_salt"] = json!(salt);
        let url = format!("{}/v1/chat/completions", server.url);
        let request = server.client.post(url).header("authorization", authorization);
        let request = request.header("content-type", "application/json").body(body.to_string());
        let response = request.send().await.expect("the server answers");
        let status = response.status().as_u16();
        (status, crate::support::json(response).await)
    };
    let named = json!({"type": "image_url", "image_url": null, "uuid": "cat"});
    let with_picture = |picture: Picture| {
        let url = data_uri(picture.jpeg);
        json!({"type": "image_url", "image_url": {"url": url}, "uuid": "cat"})
    };
    let (status, refused) = chat(named.clone(), "Bearer a", None).await;
    assert_eq!(
        (status, &refused["error"]["param"]),
        (400, &json!("messages[0].content[0].image_url"))
    );
    assert_eq!(chat(with_picture(DAWN), "Bearer a", None).await.0, 200);
    let (status, first) = chat(named.clone(), "Bearer a", None).await;
    assert_eq!(status, 200, "{first}");
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 1.0);
    // Each owner has separate names.
    for (authorization, salt) in [("Bearer b", None), ("", None), ("Bearer a", Some("s"))] {
        assert_eq!(chat(named.clone(), authorization, salt).await.0, 400);
    }
    // Sending the name with another image replaces the image, also in the engine.
    assert_eq!(chat(with_picture(NIGHT), "Bearer a", None).await.0, 200);
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 2.0);
    let (_, second) = chat(named, "Bearer a", None).await;
    assert_ne!(
        first["choices"][0]["message"], second["choices"][0]["message"],
        "the simulated engine describes the image"
    );
}

#[tokio::test]
async fn image_is_processed_once_for_all_engines() {
    for mode in ["auto", "inline"] {
        let server = serve(3, &["--policy", "round-robin", "--mm-transfer", mode]).await;
        let body = image_body(&data_uri(NIGHT.jpeg));
        for _ in 0..6 {
            server.chat(&body).await.ok();
        }
        assert_eq!(server.metric("chiasm_media_decoded_total").await, 1.0, "{mode}");
        assert_eq!(server.metric("chiasm_media_reused_total").await, 2.0, "{mode}");
        assert_eq!(server.metric("chiasm_mm_transfer_total{mode=\"cached\"}").await, 3.0, "{mode}");
    }
}

#[tokio::test]
async fn request_without_room_in_memory_is_retryable() {
    let small = [
        "--max-bytes-in-flight",
        "2900000",
        "--media-cache-bytes",
        "0",
        "--processed-cache-bytes",
        "0",
    ];
    let server = serve(1, &small).await;
    // Few bytes, but many values, which would exceed the memory limit.
    let many = json!({"model": "m", "prompt": "x", "metadata": vec![0; 50_000]});
    assert_eq!(server.post("/v1/completions", &many).await.refused(413), "metadata");
    let body = json!({"model": "m", "prompt": "x".repeat(100_000), "max_tokens": 1}).to_string();
    // Another client's body that never completes.
    let mut slow =
        TcpStream::connect(server.url.trim_start_matches("http://")).await.expect("a connection");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                content-length: 2500000\r\n\r\n";
    slow.write_all(&[head.as_bytes(), &[b' '; 2_000_000]].concat()).await.expect("sent");
    wait_for("the bytes of the incomplete body", TIMEOUT, async || {
        server.metric("chiasm_held_bytes").await >= 2_000_000.0
    })
    .await;
    let post = || {
        server
            .client
            .post(format!("{}/v1/completions", server.url))
            .header("content-type", "application/json")
    };
    let send = async || post().body(body.clone()).send().await;
    let refused = send().await.expect("an answer");
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().expect("a value"))
    );
    drop(slow);
    wait_for("memory to be released", TIMEOUT, async || {
        server.metric("chiasm_held_bytes").await == 0.0
    })
    .await;
    // The prompt is too long for the context, but the body is read.
    assert_eq!(send().await.expect("an answer").status().as_u16(), 400);
    server.chat(&chat_body("hello")).await.ok();
    assert_eq!(server.metric("chiasm_held_bytes").await, 0.0);
}

#[tokio::test]
async fn burst_of_one_new_image_goes_to_one_worker() {
    let server = serve(2, &["--sim-speedup", "4"]).await;
    let body = image_body(&data_uri(NIGHT.jpeg));
    // Few enough that waiting costs less than processing the image twice.
    let burst = futures_util::future::join_all((0..3).map(|_| server.chat(&body))).await;
    let mut workers: Vec<String> = burst
        .iter()
        .map(|answer| {
            answer.ok();
            answer.header("x-chiasm-worker")
        })
        .collect();
    workers.dedup();
    assert_eq!(workers.len(), 1, "{workers:?}");
}

#[tokio::test]
async fn client_disconnect_aborts_the_request() {
    // At 5 tokens per second, the answer takes many seconds.
    let server = serve(1, &["--sim-speedup", "1", "--sim-decode-rate", "5"]).await;
    let mut response = server
        .open(
            "/v1/chat/completions",
            &with(chat_body("x"), json!({"stream": true, "ignore_eos": true, "max_tokens": 500})),
        )
        .await;
    response.chunk().await.expect("a first chunk");
    let running = async || server.metric("chiasm_worker_running_requests").await;
    wait_for("running request", TIMEOUT, async || running().await == 1.0).await;
    drop(response);
    wait_for("abort", TIMEOUT, async || running().await == 0.0).await;
    assert_eq!(server.metric("chiasm_in_flight_requests").await, 0.0);

    // The same for an answer that is not streamed.
    let client = crate::support::client();
    let url = format!("{}/v1/chat/completions", server.url);
    let body = with(chat_body("y"), json!({"ignore_eos": true, "max_tokens": 500})).to_string();
    let waiting =
        tokio::spawn(client.post(url).header("content-type", "application/json").body(body).send());
    wait_for("running request", TIMEOUT, async || running().await == 1.0).await;
    waiting.abort();
    wait_for("abort", TIMEOUT, async || running().await == 0.0).await;
}

#[tokio::test]
async fn too_many_concurrent_requests_are_retryable() {
    let server =
        serve(1, &["--max-requests", "1", "--sim-speedup", "1", "--sim-decode-rate", "5"]).await;
    let mut first =
        server.open("/v1/chat/completions", &with(chat_body("x"), json!({"stream": true}))).await;
    first.chunk().await.expect("a first chunk");
    let second = server.chat(&chat_body("y")).await;
    second.refused(503);
    assert_eq!(second.header("retry-after"), "1");
}

#[tokio::test]
async fn killed_engine_is_left_until_it_returns() {
    let model = demo_model().display().to_string();
    let ports = [free_port(), free_port()];
    let addresses = ports.map(|port| format!("tcp://127.0.0.1:{port}"));
    let engine = |address: &str| {
        let args =
            ["sim-engine", "--handshake", address, "--model", &model, "--sim-decode-rate", "10"];
        Process(chiasm(&args).stderr(Stdio::null()).spawn().expect("an engine"))
    };
    let mut engines: Vec<Process> = addresses.iter().map(|address| engine(address)).collect();
    let server =
        Server::start(&[&model, "--served-model-name", "m", "--attach", &addresses.join(",")]);
    server.wait_ready(2, TIMEOUT).await;

    // The same prompt goes to the same engine again.
    let prompt = chat_body(
        "Tell a short story about a careful assistant who looks at pictures and describes them.",
    );
    let worker = server.chat(&prompt).await.header("x-chiasm-worker");
    let index: usize = worker.trim_start_matches("worker_").parse().expect("a number");

    let long = with(prompt.clone(), json!({"max_tokens": 400, "ignore_eos": true}));
    let mut streaming =
        server.open("/v1/chat/completions", &with(long.clone(), json!({"stream": true}))).await;
    assert_eq!(streaming.headers()["x-chiasm-worker"], worker.as_str());
    streaming.chunk().await.expect("a first chunk");
    let short = with(prompt.clone(), json!({"max_tokens": 20, "ignore_eos": true}));
    let running = format!("chiasm_worker_running_requests{{worker=\"{worker}\"}}");
    let (whole, after) = tokio::join!(server.chat(&short), async {
        wait_for("two running requests", TIMEOUT, async || server.metric(&running).await == 2.0)
            .await;
        engines[index].0.kill().expect("kill -9");
        wait_for("worker to leave", TIMEOUT, async || server.ready_workers().await == 1).await
    });
    // Milliseconds on an idle machine. An engine that is merely silent is detected after 60 s
    // (--engine-hang-timeout).
    assert!(after < Duration::from_secs(10), "detected after {after:?}");

    // Nothing of the whole answer had been sent, so another worker gave it. The stream had started,
    // so it ends with an error.
    whole.ok();
    assert_ne!(whole.header("x-chiasm-worker"), worker);
    let rest = streaming.text().await.expect("the rest");
    assert!(rest.contains("\"error\"") && rest.ends_with("data: [DONE]\n\n"), "{rest}");

    engines[index] = engine(&addresses[index]);
    server.wait_ready(2, TIMEOUT).await;
    server.chat(&prompt).await.ok();
}

#[tokio::test]
async fn incomplete_body_times_out() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = serve(1, &["--body-timeout", "0.2"]).await;
    let address = server.url.trim_start_matches("http://");
    let mut connection = tokio::net::TcpStream::connect(address).await.expect("a connection");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\
                content-type: application/json\r\ncontent-length: 100";
    connection.write_all(format!("{head}\r\n\r\n{{").as_bytes()).await.expect("sent");
    let mut answer = [0; 12];
    connection.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 408");
}

#[tokio::test]
async fn sigterm_finishes_running_streams() {
    let server = serve(1, &["--sim-speedup", "1", "--sim-decode-rate", "20"]).await;
    let url = format!("{}/v1/chat/completions", server.url);
    let mut response = server
        .open(
            "/v1/chat/completions",
            &with(chat_body("x"), json!({"stream": true, "ignore_eos": true, "max_tokens": 20})),
        )
        .await;
    response.chunk().await.expect("a first chunk");
    let ended = tokio::spawn(server.terminate(TIMEOUT));
    let rest = response.text().await.expect("the rest");
    assert!(
        rest.contains("\"finish_reason\":\"length\"") && rest.ends_with("data: [DONE]\n\n"),
        "{rest}"
    );
    assert!(ended.await.expect("joined"), "exit code 0 in time");
    assert!(crate::support::client().post(url).send().await.is_err(), "the port is closed");
}

#[tokio::test]
async fn used_port_is_refused_with_a_hint() {
    let used = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = used.local_addr().expect("an address").port().to_string();
    let model = demo_model().display().to_string();
    let output =
        chiasm(&["serve", &model, "--sim", "1", "--port", &port]).output().expect("it runs");
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("--port 0"), "{stderr}");
}

#[tokio::test]
async fn inspect_dumps_tensors() {
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("dawn.jpg");
    std::fs::write(&picture, DAWN.jpeg).expect("written");
    let model = demo_model().display().to_string();
    let picture = picture.display().to_string();
    let dump = folder.path().display().to_string();
    let output = chiasm(&["inspect", "--model", &model, &picture, "--json", "--dump", &dump])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let facts: Value =
        serde_json::from_slice(output.stdout.split(|&b| b == b'\n').next().expect("a line"))
            .expect("JSON");
    assert_eq!(facts["grid_thw"], json!([1, 16, 20]));
    assert_eq!(facts["placeholder_tokens"], 80);
    assert_eq!(
        facts["tensors"][0],
        json!({"name": "pixel_values", "dtype": "uint8", "shape": [320, 1176]})
    );
    assert_eq!(facts["blocks"], 5);
    let npy = std::fs::read(folder.path().join("0.pixel_values.npy")).expect("dumped");
    assert_eq!(npy.len() % 64, 0);
    assert!(npy.len() > 320 * 1176);
    // The same bytes in a data URI have the same mm_hash.
    let output = chiasm(&["inspect", "--model", &model, &data_uri(DAWN.jpeg), "--json"])
        .output()
        .expect("it runs");
    let again: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(again["mm_hash"], facts["mm_hash"]);
}

#[test]
fn inspect_shows_plan_and_cut_of_a_video() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(demo_model()).expect("a folder").flatten() {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("copied");
    }
    let settings = json!({
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
    });
    let path = folder.path().join("video_preprocessor_config.json");
    std::fs::write(path, settings.to_string()).expect("written");
    let model = folder.path().display().to_string();
    let clips = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-video/tests/clips");
    let inspect = |clip: &str, flags: &[&str]| {
        let clip = format!("{clips}/{clip}");
        let args = [&["inspect", "--model", &model, &clip, "--json"], flags].concat();
        chiasm(&args).output().expect("it runs")
    };
    let few = r#"{"video_backend": "opencv", "num_frames": 4}"#;
    let output = inspect("h264.mp4", &["--media-io-kwargs", few]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let facts: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&facts["codec"], &facts["frames"]), (&json!("h264"), &json!(60)));
    assert_eq!(facts["sampled_frames"], json!([0, 19, 39, 59]));
    let cut = &facts["cut"];
    assert!(cut["samples"].as_u64() < Some(60), "{facts}");
    assert!((0.0..1.0).contains(&cut["decode_cost"].as_f64().expect("a number")), "{facts}");

    for (clip, reason) in [
        ("h264_interlaced.mp4", "the pictures are interlaced"),
        ("h264.ts", "is not a PNG, JPEG, WebP, GIF or BMP image"),
    ] {
        let output = inspect(clip, &[]);
        assert!(!output.status.success());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(reason), "{stderr}");
    }
}

#[tokio::test]
async fn engine_without_normalisation_gets_floats() {
    // A simulated engine exits when it gets another form of pixels than its flags say.
    for pixels in ["raw", "float"] {
        let server = serve(1, &["--pixels", pixels]).await;
        server.chat(&image_body(&data_uri(DAWN.jpeg))).await.ok();
    }
}

#[tokio::test]
async fn text_model_refuses_images() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(demo_model().join(file), folder.path().join(file)).expect("copied");
    }
    std::fs::write(
        folder.path().join("config.json"),
        r#"{"model_type": "qwen2", "vocab_size": 1000}"#,
    )
    .expect("written");
    let model = folder.path().display().to_string();
    let server =
        Server::start(&[&model, "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"]);
    server.wait_ready(1, TIMEOUT).await;
    server.chat(&chat_body("x")).await.ok();
    let refused = server.chat(&image_body(&data_uri(DAWN.jpeg))).await;
    assert_eq!(refused.refused(400), "messages[0].content[1].image_url");
}

#[tokio::test]
async fn folder_without_a_model_is_refused_at_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let output = chiasm(&["serve", &path, "--sim", "1", "--port", "0"]).output().expect("it runs");
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("tokenizer.json"), "{stderr}");
}

#[tokio::test]
async fn cached_image_is_neither_decoded_nor_sent() {
    let server = serve(1, &[]).await;
    let counts = async || {
        let transfer = |mode: &str| format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}");
        (
            server.metric("chiasm_media_decoded_total").await,
            server.metric(&transfer("shm")).await,
            server.metric(&transfer("cached")).await,
        )
    };
    let first = server.chat(&image_body(&data_uri(DAWN.jpeg))).await;
    assert_eq!(
        (first.header("x-chiasm-transfer").as_str(), counts().await),
        ("shm", (1.0, 1.0, 0.0))
    );
    let again = server.chat(&image_body(&data_uri(DAWN.jpeg))).await;
    assert_eq!(
        (again.header("x-chiasm-transfer").as_str(), counts().await),
        ("cached", (1.0, 1.0, 1.0))
    );
    // A new image with three choices is sent once.
    server.chat(&with(image_body(&data_uri(NIGHT.jpeg)), json!({"n": 3}))).await.ok();
    assert_eq!(counts().await, (2.0, 2.0, 3.0));
    // Other processor settings give other tensors.
    let smaller = with(
        image_body(&data_uri(DAWN.jpeg)),
        json!({"mm_processor_kwargs": {"max_pixels": 20_000}}),
    );
    assert_eq!(server.chat(&smaller).await.header("x-chiasm-transfer"), "shm");
}

#[tokio::test]
async fn small_receiver_cache_evicts_without_misses() {
    // 0.001 GiB fits two of these images (376,344 bytes each), so most requests evict.
    let server = serve(1, &["--receiver-cache-gb", "0.001"]).await;
    let pictures = [DAWN, NIGHT, STORM, SNOW];
    for round in 0..6 {
        let requests = (0..pictures.len()).map(|i| {
            let urls =
                [pictures[i], pictures[(i * 3 + round) % pictures.len()]].map(|p| data_uri(p.jpeg));
            let parts = urls.map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
            json!({"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]})
        });
        let bodies: Vec<Value> = requests.collect();
        let answers =
            futures_util::future::join_all(bodies.iter().map(|body| server.chat(body))).await;
        answers.iter().for_each(|answer| drop(answer.ok()));
    }
    assert!(server.metric("chiasm_mm_transfer_total{mode=\"cached\"}").await > 0.0);
    assert!(
        server.metric("chiasm_mm_transfer_total{mode=\"shm\"}").await > 8.0,
        "evicted images are sent again"
    );
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
}

#[tokio::test]
async fn attached_engine_without_cache_gets_every_image() {
    let model = demo_model().display().to_string();
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let args =
        ["sim-engine", "--handshake", &address, "--model", &model, "--receiver-cache-gb", "0"];
    let _engine = Process(chiasm(&args).stderr(Stdio::null()).spawn().expect("an engine"));
    let server = Server::start(&[&model, "--served-model-name", "m", "--attach", &address]);
    server.wait_ready(1, TIMEOUT).await;
    for _ in 0..2 {
        let answer = server.chat(&image_body(&data_uri(DAWN.jpeg))).await;
        answer.ok();
        assert_eq!(answer.header("x-chiasm-transfer"), "shm");
    }
}

#[tokio::test]
async fn missing_images_are_sent_again_to_a_smaller_cache() {
    let model = demo_model().display().to_string();
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let args =
        ["sim-engine", "--handshake", &address, "--model", &model, "--receiver-cache-gb", "0.0004"];
    let _engine = Process(chiasm(&args).stderr(Stdio::null()).spawn().expect("an engine"));
    let server = Server::start(&[
        &model,
        "--served-model-name",
        "m",
        "--attach",
        &address,
        "--receiver-cache-gb",
        "1",
    ]);
    server.wait_ready(1, TIMEOUT).await;
    for picture in [DAWN, NIGHT, DAWN, NIGHT] {
        server.chat(&image_body(&data_uri(picture.jpeg))).await.ok();
    }
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 2.0);
    assert_eq!(server.metric("chiasm_retries_total").await, 0.0);
}
