//! Resident memory of a running server: JSON that expands in memory, and many large images.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Process, Server, chiasm, demo_model, free_port};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::STORM;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use serde_json::json;

const TIMEOUT: Duration = Duration::from_secs(20);

/// The allowance for memory of the process that is not counted.
const UNCOUNTED_BYTES: u64 = 64 << 20;

/// Formats a JSON list that repeats `element` `count` times.
fn list_of(element: &str, count: usize) -> String {
    format!("[{}{element}]", format!("{element},").repeat(count - 1))
}

#[tokio::test]
async fn expanding_json_is_refused_before_it_is_built() {
    const BODY_BYTES: u64 = 12 << 20;
    const VALUES: u64 = 20_000;
    const MESSAGES: u64 = 2_000;
    const PARTS: u64 = 4_000;
    let model = demo_model().display().to_string();
    let numbers = [BODY_BYTES, VALUES, MESSAGES, PARTS].map(|n| n.to_string());
    let [body, values, messages, parts] = numbers.each_ref().map(String::as_str);
    let mut flags =
        vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000000"];
    flags.extend(["--max-body-bytes", body, "--max-json-values", values]);
    flags.extend(["--max-messages", messages, "--max-content-parts", parts]);
    flags.extend(["--sim-max-model-len", "2000000", "--sim-blocks", "200000"]);
    let server = Server::start(&flags);
    server.wait_ready(1, TIMEOUT).await;

    let post = async |path: &str, body: String| {
        let request = server
            .client
            .post(format!("{}{path}", server.url))
            .header("content-type", "application/json");
        let request = request.body(body);
        crate::support::Answer::read(request.send().await.expect("an answer")).await
    };
    let chat = async |fields: String| {
        post("/v1/chat/completions", format!("{{\"model\":\"m\",{fields}}}")).await
    };
    // Token ids are small: a million of them is a legitimate long prompt.
    let tokens =
        format!(r#"{{"model":"m","max_tokens":1,"prompt":{}}}"#, list_of("100", 1_000_000));
    let answer = post("/v1/completions", tokens).await.ok();
    assert_eq!(answer["usage"]["prompt_tokens"], 1_000_000);
    let before = server.status_bytes("VmHWM");

    let greeting = r#""messages":[{"role":"user","content":"x"}]"#;
    let half = |element: &str| list_of(element, BODY_BYTES as usize / 2 / (element.len() + 1));
    let nested = half(&format!("{}{}", "[".repeat(50), "]".repeat(50)));
    let objects = half(r#"{"a":{}}"#);
    for value in [&nested, &objects] {
        assert_eq!(chat(format!(r#"{greeting},"unknown":{value}"#)).await.refused(413), "unknown");
        assert_eq!(
            chat(format!(r#"{greeting},"chat_template_kwargs":{{"a":{value}}}"#))
                .await
                .refused(413),
            "chat_template_kwargs"
        );
        let calls = format!(r#""messages":[{{"role":"assistant","tool_calls":{value}}}]"#);
        assert_eq!(chat(calls).await.refused(413), "messages[0].tool_calls");
    }
    let deep = format!(r#"{greeting},"unknown":{}"#, "[".repeat(BODY_BYTES as usize / 2));
    assert_eq!(chat(deep).await.refused(400), "unknown");
    let message = half(r#"{"role":"user","content":""}"#);
    assert_eq!(
        chat(format!(r#""messages":{message}"#)).await.refused(413),
        format!("messages[{MESSAGES}]")
    );
    for part in [r#"{"type":"text","text":""}"#, r#""""#] {
        let content = format!(r#""messages":[{{"role":"user","content":{}}}]"#, half(part));
        assert_eq!(chat(content).await.refused(413), format!("messages[0].content[{PARTS}]"));
    }
    // Requests exactly at the limits succeed.
    let message = list_of(r#"{"role":"user","content":["x"]}"#, MESSAGES as usize);
    assert_eq!(chat(format!(r#""max_tokens":1,"messages":{message}"#)).await.status, 200);
    let kwargs = list_of("[]", VALUES as usize - 10);
    assert_eq!(
        chat(format!(r#"{greeting},"max_tokens":1,"chat_template_kwargs":{{"a":{kwargs}}}"#))
            .await
            .status,
        200
    );

    // The body, one kilobyte per value, and four per message or part.
    let bound = BODY_BYTES + (VALUES << 10) + ((MESSAGES + PARTS) << 12) + UNCOUNTED_BYTES;
    let growth = server.status_bytes("VmHWM") - before;
    println!("memory grew by {} MiB, {} are allowed", growth >> 20, bound >> 20);
    assert!(growth < bound, "memory grew by {} MiB, {} are allowed", growth >> 20, bound >> 20);
    server.chat(&json!({"model": "m", "messages": [{"role": "user", "content": "x"}]})).await.ok();
    assert_eq!(server.metric("chiasm_held_bytes").await, 0.0);
}

/// The number of images.
const IMAGES: usize = 1000;
/// The number of concurrent clients, each with its own connection.
const CLIENTS: usize = 200;
/// The size of the media cache, which fits about half of the images.
const CACHE_BYTES: u64 = 512 << 20;

/// Returns a different file as large as a photograph for each number. Decoders ignore the bytes
/// after the end of a JPEG.
fn image(number: usize) -> Vec<u8> {
    let mut rng = SmallRng::seed_from_u64(number as u64);
    let mut file = STORM.jpeg.to_vec();
    let end = file.len();
    file.resize(end + rng.random_range(400_000..1_600_000), 0);
    rng.fill_bytes(&mut file[end..]);
    file
}

/// Starts a server of [`image`]s by their numbers. Returns its URL.
async fn origin() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let serve = |number: axum::extract::Path<usize>| async move { image(number.0) };
    let app = axum::Router::new().route("/{number}", axum::routing::get(serve));
    tokio::spawn(async move { axum::serve(listener, app).await });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_images_take_only_the_memory_of_the_cache() {
    let model = demo_model().display().to_string();
    let cache = CACHE_BYTES.to_string();
    let handshake = format!("tcp://127.0.0.1:{}", free_port());
    // The engine is a separate process, so that its memory does not count.
    let engine =
        ["sim-engine", "--handshake", &handshake, "--model", &model, "--sim-speedup", "1000000"];
    let engine = chiasm(&[&engine[..], &["--receiver-cache-gb", "0.1"]].concat())
        .spawn()
        .expect("an engine");
    let _engine = Process(engine);
    let flags = [
        &model,
        "--served-model-name",
        "m",
        "--attach",
        &handshake,
        "--receiver-cache-gb",
        "0.1",
        "--mm-arena-gb",
        "0.2",
        "--allow-private-media",
        "--media-cache-bytes",
        &cache,
        // Long timeouts: clients and origin share the machine, and this is no test of time.
        "--body-timeout",
        "600",
        "--media-timeout",
        "120",
        "--media-first-byte-timeout",
        "120",
    ];
    let server = Arc::new(Server::start(&flags));
    server.wait_ready(1, TIMEOUT).await;

    let origin = origin().await;
    let next = Arc::<AtomicUsize>::default();
    let clients = (0..CLIENTS).map(|_| {
        let server = server.clone();
        let origin = origin.clone();
        let next = next.clone();
        tokio::spawn(async move {
            let mut bytes = 0;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= IMAGES {
                    return bytes;
                }
                let file = image(number);
                let url = if number % 2 == 0 {
                    format!("data:image/jpeg;base64,{}", STANDARD.encode(&file))
                } else {
                    format!("{origin}/{number}")
                };
                let part = json!({"type": "image_url", "image_url": {"url": url}});
                let messages = json!([{"role": "user", "content": [part]}]);
                let body = json!({"model": "m", "max_tokens": 1, "messages": messages});
                server.chat(&body).await.ok();
                bytes += file.len() as u64;
            }
        })
    });
    let sent: u64 = futures_util::future::join_all(clients)
        .await
        .into_iter()
        .map(|bytes| bytes.expect("no panic"))
        .sum();
    assert!(sent > CACHE_BYTES * 3 / 2, "{sent} bytes do not fill the cache");
    // The cache is full except for at most one image.
    let held = CACHE_BYTES.min(sent) - (2 << 20);
    let bound = held * 13 / 10 + UNCOUNTED_BYTES;
    let resident = server.resident();
    println!(
        "{} MiB were sent, {} are held, {} are resident, {} are allowed",
        sent >> 20,
        held >> 20,
        resident >> 20,
        bound >> 20
    );
    assert!(resident <= bound, "{} MiB resident, {} are allowed", resident >> 20, bound >> 20);
}
