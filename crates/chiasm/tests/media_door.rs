//! The media loader of a running server: shared work, and the status of each refusal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::support::hostile_origin::{HOSTILE, HostileOrigin};
use crate::support::{Answer, Server, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, SNOW};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(20);

async fn serve(engines: u64, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let count = engines.to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", &count, "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, TIMEOUT).await;
    server
}

/// Returns a request about images with these URLs.
fn image_request(question: &str, urls: &[&str]) -> Value {
    let mut parts = vec![json!({"type": "text", "text": question})];
    parts.extend(urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})));
    json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]})
}

fn data_url(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}

/// Sends a request about one image and asserts that it is refused. The refusal must name the part
/// and contain no secrets. Returns its text.
async fn assert_refused(server: &Server, url: &str, status: u16) -> String {
    let answer = server.chat(&image_request("What is this?", &[url])).await;
    assert_eq!(answer.refused(status), "messages[0].content[1].image_url", "{url}");
    for secret in ["secret", "169.254", "127.0.0.1", "passwd", "user:", "::ffff"] {
        assert!(!answer.text.contains(secret), "{url}: {}", answer.text);
    }
    answer.text
}

const REQUESTS: usize = 200;

/// Sends the same image at once in requests with different texts. Checks that it is decoded once,
/// and sent once per engine. `origin` answers when all requests have arrived.
async fn check_shared_work(server: &Arc<Server>, url: &str, origin: Option<&HostileOrigin>) {
    let decoded = server.metric("chiasm_media_decoded_total").await;
    let requests: Vec<_> = (0..REQUESTS)
        .map(|number| {
            let server = server.clone();
            let body = image_request(&format!("Question {number}?"), &[url]);
            tokio::spawn(async move { server.chat(&body).await })
        })
        .collect();
    if let Some(origin) = origin {
        let all_arrived =
            async || server.metric("chiasm_in_flight_requests").await == REQUESTS as f64;
        crate::support::wait_for(
            "requests that wait for the image",
            Duration::from_secs(120),
            all_arrived,
        )
        .await;
        origin.release();
    }
    let mut transfers: BTreeMap<String, usize> = BTreeMap::new();
    let mut engines = BTreeSet::new();
    for answer in requests {
        let answer: Answer = answer.await.expect("no panic");
        answer.ok();
        let engine = answer.header("x-chiasm-worker");
        if answer.header("x-chiasm-transfer") != "cached" {
            *transfers.entry(engine.clone()).or_default() += 1;
        }
        engines.insert(engine);
    }
    assert_eq!(server.metric("chiasm_media_decoded_total").await - decoded, 1.0, "{transfers:?}");
    assert_eq!(
        transfers,
        engines.into_iter().map(|engine| (engine, 1)).collect(),
        "one transfer per engine"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_for_one_url_share_the_work() {
    let origin = HostileOrigin::start().await;
    // The origin answers when all requests have arrived, which may take long.
    let long_timeouts =
        ["--allow-private-media", "--media-timeout", "600", "--media-first-byte-timeout", "600"];
    let server = Arc::new(serve(2, &long_timeouts).await);
    check_shared_work(&server, &origin.url("/held"), Some(&origin)).await;
    assert_eq!(origin.requests(), 1);
    let opened = async |how: &str| {
        server.metric(&format!("chiasm_media_opened_total{{how=\"{how}\"}}")).await
    };
    assert_eq!(opened("fetched").await, 1.0);
    assert_eq!(opened("shared").await + opened("fresh").await, (REQUESTS - 1) as f64);
    assert!(opened("shared").await > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_for_one_data_url_share_the_work() {
    let server = Arc::new(serve(2, &[]).await);
    check_shared_work(&server, &data_url(SNOW.jpeg), None).await;
}

/// Flags with short timeouts, so that every case ends soon, and with the origin's host as the only
/// allowed one.
const STRICT: [&str; 15] = [
    "--allow-private-media",
    "--allowed-media-domains",
    "127.0.0.1",
    "--media-timeout",
    "5",
    "--media-first-byte-timeout",
    "2",
    "--media-min-rate",
    "1000",
    "--media-max-redirects",
    "3",
    "--media-error-ttl",
    "0",
    "--max-image-bytes",
    "1000000",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_origin_gives_documented_statuses_in_time() {
    let origin = HostileOrigin::start().await;
    let server = Arc::new(serve(1, &STRICT).await);
    let requests: Vec<_> = HOSTILE
        .iter()
        .map(|&(path, status)| {
            let server = server.clone();
            let url = origin.url(path);
            tokio::spawn(async move { assert_refused(&server, &url, status).await })
        })
        .collect();
    for (task, (path, _)) in requests.into_iter().zip(HOSTILE) {
        assert!(task.await.is_ok(), "{path} failed");
    }
    // Slow responses would go on for minutes: their 504 shows that the time limits ended them. No
    // connection is left, and the server still serves.
    crate::support::wait_for("closed connections", TIMEOUT, async || origin.connections() == 0)
        .await;
    server.chat(&image_request("And now?", &[&origin.url("/good")])).await.ok();
}

#[tokio::test]
async fn flapping_origin_is_fetched_each_time() {
    let origin = HostileOrigin::start().await;
    let server = serve(1, &STRICT).await;
    let url = origin.url("/flapping");
    for _ in 0..2 {
        assert_refused(&server, &url, 404).await;
        assert_refused(&server, &url, 502).await;
        server.chat(&image_request("And now?", &[&url])).await.ok();
    }
}

#[tokio::test]
async fn private_addresses_are_refused_by_default() {
    let origin = HostileOrigin::start().await;
    let port = origin.port();
    let server = serve(1, &["--allowed-media-ports", &format!("80,{port}")]).await;
    for host in [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    ] {
        assert_refused(&server, &format!("http://{host}:{port}/good"), 403).await;
    }
    for url in [
        "http://169.254.169.254/latest",
        "http://[fd00:ec2::254]/",
        "http://100.100.100.200/",
        "http://10.0.0.1/",
    ] {
        assert_refused(&server, url, 403).await;
    }
    assert_refused(&server, "http://example.com:8080/", 403).await;
    assert_refused(&server, "file:///etc/passwd", 403).await;
    for url in [
        "http://user:secret@example.com/",
        "ftp://example.com/",
        "data:image/png,secret",
        "http://",
        "secret",
    ] {
        assert_refused(&server, url, 400).await;
    }
    assert_eq!(origin.requests(), 0);
}

/// Small files whose headers announce more pixels than the limit for decoding.
fn bombs() -> [(&'static str, &'static [u8]); 5] {
    [
        ("png", include_bytes!("../../chiasm-media/tests/goldens/png-bomb.png")),
        ("jpeg", include_bytes!("../../chiasm-media/tests/goldens/jpeg-bomb.jpg")),
        ("gif", include_bytes!("../../chiasm-media/tests/goldens/gif-bomb.gif")),
        ("bmp", include_bytes!("../../chiasm-media/tests/goldens/bmp-bomb.bmp")),
        // Lossless, with width and height of 14 bits each at their maximum.
        ("webp", b"RIFF\x12\0\0\0WEBPVP8L\x05\0\0\0\x2f\xff\xff\xff\x0f\0"),
    ]
}

#[tokio::test]
async fn decompression_bombs_are_refused_by_their_headers() {
    let server = serve(1, &[]).await;
    for (format, bytes) in bombs() {
        let text = assert_refused(&server, &data_url(bytes), 413).await;
        assert!(text.contains("pixels"), "{format}: {text}");
    }
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 0.0);
}

#[tokio::test]
async fn too_many_parts_are_refused_before_opening_any() {
    let origin = HostileOrigin::start().await;
    let server = serve(1, &["--allow-private-media"]).await;
    let urls: Vec<String> =
        (0..10_000).map(|number| origin.url(&format!("/distinct?{number}"))).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let answer = server.chat(&image_request("What are these?", &urls)).await;
    assert_eq!(answer.refused(413), "messages[0].content[65].image_url");
    // The same number of empty, invalid and text parts.
    let body = |part: Value| {
        let content = vec![part; 10_000];
        json!({"model": "m", "messages": [{"role": "user", "content": content}]})
    };
    let answer =
        server.chat(&body(json!({"type": "image_url", "image_url": {"url": "data:,"}}))).await;
    assert_eq!(answer.refused(413), "messages[0].content[64].image_url");
    let answer = server.chat(&body(json!({"type": "nonsense"}))).await;
    assert!(answer.refused(400).starts_with("messages[0].content[0]"), "{}", answer.text);
    let answer = server.chat(&body(json!({"type": "text", "text": "x "}))).await;
    assert!([200, 400].contains(&answer.status), "{}", answer.text);
    assert_eq!(origin.requests(), 0);
    for how in ["data", "fetched"] {
        assert_eq!(
            server.metric(&format!("chiasm_media_opened_total{{how=\"{how}\"}}")).await,
            0.0,
            "{how}"
        );
    }
}

#[tokio::test]
async fn error_names_the_message_part_at_fault() {
    let server = serve(1, &[]).await;
    let good = json!({"type": "image_url", "image_url": {"url": data_url(DAWN.jpeg)}});
    let bad = json!({"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}});
    let text = json!({"type": "text", "text": "What is in this picture?"});
    let body = json!({"model": "m", "max_tokens": 4, "messages": [
        {"role": "user", "content": [text, good]},
        {"role": "assistant", "content": "A dawn."},
        {"role": "user", "content": [good, good, text, bad]},
    ]});
    assert_eq!(server.chat(&body).await.refused(415), "messages[2].content[3].image_url");
}

/// A refusal for lack of memory has `retry-after`, is not cached for the URL, and leaks no memory.
#[tokio::test]
async fn picture_without_room_in_memory_is_retryable() {
    let origin = HostileOrigin::start().await;
    let flags =
        ["--allow-private-media", "--media-cache-bytes", "0", "--processed-cache-bytes", "0"];
    let room = (DAWN.jpeg.len() + 6000).to_string();
    let server = serve(1, &[&flags[..], &["--max-bytes-in-flight", &room]].concat()).await;
    // The picture alone would fit, but not together with the request.
    for _ in 0..3 {
        let answer = server.chat(&image_request("What is this?", &[&origin.url("/good")])).await;
        assert_eq!(answer.refused(503), "messages[0].content[1].image_url");
        assert_eq!(answer.header("retry-after"), "1");
    }
    assert_eq!(origin.requests(), 3);
    server.chat(&image_request("What is this?", &[])).await.ok();
    crate::support::wait_for("memory to be released", TIMEOUT, async || {
        server.metric("chiasm_held_bytes").await == 0.0
    })
    .await;
}
