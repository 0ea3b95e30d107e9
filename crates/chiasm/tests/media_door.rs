//! The media door of a running server: what is asked once, and what is refused how.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::support::hostile_origin::{HOSTILE, HostileOrigin};
use crate::support::{Answer, Server, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, SNOW};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

async fn serve(engines: u64, extra: &[&str]) -> Server {
    let (model, count) = (demo_model().display().to_string(), engines.to_string());
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", &count, "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, SOON).await;
    server
}

/// A question about images, by their URLs.
fn about(question: &str, urls: &[&str]) -> Value {
    let mut parts = vec![json!({"type": "text", "text": question})];
    parts.extend(urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})));
    json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]})
}

fn data_url(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}

/// Asks about one image and expects a refusal that names the part and repeats nothing of what is
/// secret.
async fn refused(server: &Server, url: &str, status: u16) -> String {
    let answer = server.chat(&about("What is this?", &[url])).await;
    assert_eq!(answer.refused(status), "messages[0].content[1].image_url", "{url}");
    for secret in ["secret", "169.254", "127.0.0.1", "passwd", "user:", "::ffff"] {
        assert!(!answer.text.contains(secret), "{url}: {}", answer.text);
    }
    answer.text
}

const REQUESTS: usize = 200;

/// Sends the same image at once in requests with different texts: one download, one decode, one
/// transfer per engine. An origin answers when all requests are there.
async fn one_of_everything(server: &Arc<Server>, url: &str, origin: Option<&HostileOrigin>) {
    let decoded = server.metric("chiasm_media_decoded_total").await;
    let asked: Vec<_> = (0..REQUESTS)
        .map(|number| {
            let (server, body) = (server.clone(), about(&format!("Question {number}?"), &[url]));
            tokio::spawn(async move { server.chat(&body).await })
        })
        .collect();
    if let Some(origin) = origin {
        let all_there =
            async || server.metric("chiasm_in_flight_requests").await == REQUESTS as f64;
        crate::support::wait_for(
            "requests that wait for the image",
            Duration::from_secs(120),
            all_there,
        )
        .await;
        origin.release();
    }
    let mut transfers: BTreeMap<String, usize> = BTreeMap::new();
    let mut engines = BTreeSet::new();
    for answer in asked {
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
async fn many_requests_of_one_url_are_one_download_one_decode_and_one_transfer_per_engine() {
    let origin = HostileOrigin::start().await;
    // The origin answers when all have asked, however long that takes.
    let patient =
        ["--allow-private-media", "--media-timeout", "600", "--media-first-byte-timeout", "600"];
    let server = Arc::new(serve(2, &patient).await);
    one_of_everything(&server, &origin.url("/held"), Some(&origin)).await;
    assert_eq!(origin.asked(), 1);
    let opened = async |how: &str| {
        server.metric(&format!("chiasm_media_opened_total{{how=\"{how}\"}}")).await
    };
    assert_eq!(opened("fetched").await, 1.0);
    assert_eq!(opened("shared").await + opened("fresh").await, (REQUESTS - 1) as f64);
    assert!(opened("shared").await > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_of_one_data_url_are_one_decode_and_one_transfer_per_engine() {
    let server = Arc::new(serve(2, &[]).await);
    one_of_everything(&server, &data_url(SNOW.jpeg), None).await;
}

/// Little patience, so that every case ends soon; only the origin's host is allowed.
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
async fn a_hostile_origin_is_answered_for_in_time_and_with_the_right_status() {
    let origin = HostileOrigin::start().await;
    let server = Arc::new(serve(1, &STRICT).await);
    let asked: Vec<_> = HOSTILE
        .iter()
        .map(|&(path, status)| {
            let (server, url) = (server.clone(), origin.url(path));
            tokio::spawn(async move { refused(&server, &url, status).await })
        })
        .collect();
    for (task, (path, _)) in asked.into_iter().zip(HOSTILE) {
        assert!(task.await.is_ok(), "{path} failed");
    }
    // What drips would drip on for minutes: that it was answered for with 504 shows that the time
    // limits ended it. Nothing is left behind, and the server serves.
    crate::support::wait_for("closed connections", SOON, async || origin.connections() == 0).await;
    server.chat(&about("And now?", &[&origin.url("/good")])).await.ok();
}

#[tokio::test]
async fn an_origin_that_flaps_is_believed_each_time() {
    let origin = HostileOrigin::start().await;
    let server = serve(1, &STRICT).await;
    let url = origin.url("/flapping");
    for _ in 0..2 {
        refused(&server, &url, 404).await;
        refused(&server, &url, 502).await;
        server.chat(&about("And now?", &[&url])).await.ok();
    }
}

#[tokio::test]
async fn the_default_fetches_nothing_from_inside() {
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
        refused(&server, &format!("http://{host}:{port}/good"), 403).await;
    }
    for url in [
        "http://169.254.169.254/latest",
        "http://[fd00:ec2::254]/",
        "http://100.100.100.200/",
        "http://10.0.0.1/",
    ] {
        refused(&server, url, 403).await;
    }
    refused(&server, "http://example.com:8080/", 403).await;
    refused(&server, "file:///etc/passwd", 403).await;
    for url in [
        "http://user:secret@example.com/",
        "ftp://example.com/",
        "data:image/png,secret",
        "http://",
        "secret",
    ] {
        refused(&server, url, 400).await;
    }
    assert_eq!(origin.asked(), 0);
}

/// Small files whose headers promise more pixels than may be decoded.
fn bombs() -> [(&'static str, &'static [u8]); 5] {
    [
        ("png", include_bytes!("../../chiasm-media/tests/goldens/png-bomb.png")),
        ("jpeg", include_bytes!("../../chiasm-media/tests/goldens/jpeg-bomb.jpg")),
        ("gif", include_bytes!("../../chiasm-media/tests/goldens/gif-bomb.gif")),
        ("bmp", include_bytes!("../../chiasm-media/tests/goldens/bmp-bomb.bmp")),
        // Lossless, twice 14 bits of size.
        ("webp", b"RIFF\x12\0\0\0WEBPVP8L\x05\0\0\0\x2f\xff\xff\xff\x0f\0"),
    ]
}

#[tokio::test]
async fn bombs_are_refused_by_their_headers() {
    let server = serve(1, &[]).await;
    for (format, bytes) in bombs() {
        let text = refused(&server, &data_url(bytes), 413).await;
        assert!(text.contains("pixels"), "{format}: {text}");
    }
    assert_eq!(server.metric("chiasm_media_decoded_total").await, 0.0);
}

#[tokio::test]
async fn ten_thousand_parts_are_refused_before_any_is_opened() {
    let origin = HostileOrigin::start().await;
    let server = serve(1, &["--allow-private-media"]).await;
    let urls: Vec<String> =
        (0..10_000).map(|number| origin.url(&format!("/distinct?{number}"))).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let answer = server.chat(&about("What are these?", &urls)).await;
    assert_eq!(answer.refused(413), "messages[0].content[65].image_url");
    // As many parts of nothing, and of text.
    let body = |part: Value| json!({"model": "m", "messages": [{"role": "user", "content": vec![part; 10_000]}]});
    let answer =
        server.chat(&body(json!({"type": "image_url", "image_url": {"url": "data:,"}}))).await;
    assert_eq!(answer.refused(413), "messages[0].content[64].image_url");
    let answer = server.chat(&body(json!({"type": "nonsense"}))).await;
    assert!(answer.refused(400).starts_with("messages[0].content[0]"), "{}", answer.text);
    let answer = server.chat(&body(json!({"type": "text", "text": "x "}))).await;
    assert!([200, 400].contains(&answer.status), "{}", answer.text);
    assert_eq!(origin.asked(), 0);
    for how in ["data", "fetched"] {
        assert_eq!(
            server.metric(&format!("chiasm_media_opened_total{{how=\"{how}\"}}")).await,
            0.0,
            "{how}"
        );
    }
}

#[tokio::test]
async fn the_part_at_fault_is_named_wherever_it_is() {
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

/// Memory that is asked for where there is none: refused with a hint to come again, not believed of
/// the URL, and given back.
#[tokio::test]
async fn a_picture_that_has_no_room_is_worth_asking_for_again() {
    let origin = HostileOrigin::start().await;
    let flags =
        ["--allow-private-media", "--media-cache-bytes", "0", "--processed-cache-bytes", "0"];
    let room = (DAWN.jpeg.len() + 6000).to_string();
    let server = serve(1, &[&flags[..], &["--max-bytes-in-flight", &room]].concat()).await;
    // The picture would fit, were it not for the request.
    for _ in 0..3 {
        let answer = server.chat(&about("What is this?", &[&origin.url("/good")])).await;
        assert_eq!(answer.refused(503), "messages[0].content[1].image_url");
        assert_eq!(answer.header("retry-after"), "1");
    }
    assert_eq!(origin.asked(), 3);
    server.chat(&about("What is this?", &[])).await.ok();
    crate::support::wait_for("memory given back", SOON, async || {
        server.metric("chiasm_held_bytes").await == 0.0
    })
    .await;
}
