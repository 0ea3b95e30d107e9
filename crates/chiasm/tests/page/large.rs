//! A fleet of a thousand workers in a browser. A mock server serves the page's own files and events
//! about the fleet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::TIMEOUT;
use super::browser::Browser;

const WORKERS: u64 = 1000;
/// The most CPU time that the page's main thread may take per change of all workers, on average.
/// 22–27 ms were measured. As one task, 50 ms would be long for a browser.
const MAX_UPDATE: Duration = Duration::from_millis(50);
/// Changes whose CPU time is measured.
const CHANGES: u32 = 5;

/// The paths, content types and contents of the page's files.
const FILES: [(&str, &str, &str); 9] = [
    ("/ui/", "text/html", include_str!("../../../chiasm-server/src/page/web/index.html")),
    ("/ui/page.css", "text/css", include_str!("../../../chiasm-server/src/page/web/page.css")),
    ("/ui/page.js", "text/javascript", include_str!("../../../chiasm-server/src/page/web/page.js")),
    (
        "/ui/fleet.js",
        "text/javascript",
        include_str!("../../../chiasm-server/src/page/web/fleet.js"),
    ),
    (
        "/ui/requests.js",
        "text/javascript",
        include_str!("../../../chiasm-server/src/page/web/requests.js"),
    ),
    (
        "/ui/media.js",
        "text/javascript",
        include_str!("../../../chiasm-server/src/page/web/media.js"),
    ),
    ("/ui/time.js", "text/javascript", include_str!("../../../chiasm-server/src/page/web/time.js")),
    (
        "/ui/elements.js",
        "text/javascript",
        include_str!("../../../chiasm-server/src/page/web/elements.js"),
    ),
    ("/ui/icon.svg", "image/svg+xml", include_str!("../../../chiasm-server/src/page/web/icon.svg")),
];

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Chromium"]
async fn thousand_changing_workers_do_not_slow_the_page() {
    let ticks = Arc::new(AtomicU64::new(0));
    let url = start_mock_server(ticks.clone()).await;
    let mut browser = Browser::start();
    browser.open(&url);
    browser.wait_for(&format!("document.querySelectorAll('.tile').length === {WORKERS}"), TIMEOUT);
    let cpu_before = browser.main_thread_cpu();
    let first = ticks.load(Ordering::Relaxed);
    while ticks.load(Ordering::Relaxed) < first + u64::from(CHANGES) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Enough time for the last change; the next one comes after a second.
    browser.evaluate("new Promise((done) => setTimeout(done, 500))");
    let cpu = Duration::from_secs_f64(browser.main_thread_cpu() - cpu_before);
    let update = cpu / CHANGES;
    println!("CPU time of a change: {update:.0?}");
    assert!(update <= MAX_UPDATE, "{update:?}");
    browser.save_screenshot("thousand");
    let last = "document.querySelector('.tile:last-child .load').textContent";
    let old = browser.evaluate(last);
    browser.evaluate("scrollTo(0, document.body.scrollHeight)");
    browser.wait_for(&format!("{last} !== {old}"), TIMEOUT);
    browser.evaluate("scrollTo(0, 0)");
    browser.evaluate(
        "{ const filter = document.querySelector('#filter'); filter.value = 'catching'; \
                      filter.dispatchEvent(new Event('input')); }",
    );
    browser.wait_for("document.querySelector('#shown').textContent.endsWith('of 1,000')", TIMEOUT);
    browser.evaluate("location.hash = 'requests'");
    browser.wait_for("document.querySelector('#list tbody button')", TIMEOUT);
    browser.evaluate("document.querySelector('#list tbody button').click()");
    browser.wait_for(
        "document.querySelector('#why').innerText.includes('Show all 1,000 candidates')",
        TIMEOUT,
    );
    assert_eq!(browser.take_errors(), [] as [Value; 0]);
}

/// Starts a server of the page and its events, and returns the page's URL. `ticks` counts the
/// events about changes.
async fn start_mock_server(ticks: Arc<AtomicU64>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, ticks.clone()));
        }
    });
    format!("http://{address}/ui/")
}

async fn answer(mut stream: TcpStream, ticks: Arc<AtomicU64>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let path = head.split(' ').nth(1).unwrap();
    let response_head = |kind: &str| {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {kind}; charset=utf-8\r\nconnection: close\r\n\r\n"
        )
    };
    if path != "/ui/events" {
        let explanation = explanation().to_string();
        let file =
            FILES.iter().find(|(name, ..)| *name == path).map(|(_, kind, text)| (*kind, *text));
        let (kind, text) = file.unwrap_or(("application/json", &explanation));
        let _ = stream.write_all(format!("{}{text}", response_head(kind)).as_bytes()).await;
        return;
    }
    let start = json!({
        "model": "m", "version": "0", "step_seconds": 5, "has_keys": false, "rows": rows(0),
        "requests": [request()], "steps": [], "media": media(), "totals": totals(),
    });
    let head = response_head("text/event-stream");
    let mut event = format!("{head}event: start\ndata: {start}\n\n");
    for second in 1.. {
        if stream.write_all(event.as_bytes()).await.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        ticks.fetch_add(1, Ordering::Relaxed);
        let tick = json!({
            "rows": rows(second), "gone": [], "requests": [], "step": null,
            "media": media(), "totals": totals(),
        });
        event = format!("event: tick\ndata: {tick}\n\n");
    }
}

/// Returns the rows of all workers, with numbers that change every second.
fn rows(second: u64) -> Vec<Value> {
    let row = |id: u64| {
        let number = id * 7 + second * 13;
        json!({
            "id": format!("worker_{id}"),
            "runs": "vLLM 0.33.0",
            "machine": format!("10.0.0.{}", id / 8),
            "condition": "answers",
            "knowledge": if id.is_multiple_of(10) { "catching-up" } else { "exact" },
            "draining": false,
            "unnamed": false,
            "running": number % 90,
            "waiting": number % 7,
            "requests": number % 97,
            "kv_usage": (number % 100) as f64 / 100.0,
            "known_blocks": number * 11 % 60_000,
            "total_blocks": 60_000,
            "promised_blocks": number % 50,
            "pending_tokens": number * 31 % 9000,
            "hit_rate": (number % 83) as f64 / 100.0,
            "receiver_cache_bytes": 4_u64 << 30,
            "arena": {"reserved": 5_u64 << 30, "used": number << 20, "slots": number % 60},
        })
    };
    (0..WORKERS).map(row).collect()
}

fn totals() -> Value {
    json!({"ready": WORKERS, "in_flight": 4000, "slots": 200_000})
}

fn media() -> Value {
    json!({
        "ways": {"cached": 1},
        "opened": {"data": 1},
        "decoded": 1,
        "reused": 0,
        "cached_bytes": 1,
        "processed_bytes": 1,
        "repeated": [],
    })
}

fn request() -> Value {
    json!({
        "number": 0,
        "id": "r",
        "at": 1_800_000_000_000_u64,
        "worker": "worker_5",
        "candidates": WORKERS,
        "overlap": 3,
        "blocks": 9,
        "items": 0,
        "prompt_tokens": 140,
        "outcome": null,
    })
}

/// Returns the explanation of the request's routing.
fn explanation() -> Value {
    let candidate = |id: u64| {
        json!({
            "worker": format!("worker_{id}"),
            "class": 0,
            "block_size": 16,
            "blocks": 9,
            "overlap": id % 9,
            "expected": id % 9,
            "loadable": id % 9,
            "terms": [9 - id % 9, 0, 0, 0, 0, id, 0],
            "cost": id + 100,
        })
    };
    let candidates: Vec<Value> = (0..WORKERS).map(candidate).collect();
    json!({
        "request": request(),
        "decision": "cost",
        "policy": "kv+media",
        "weights": [16, 1, 6.5, 1.75, 0.75, 0.3, 0.2],
        "busy": 0,
        "plans": [{"class": 0, "prompt_tokens": 140, "items": []}],
        "candidates": candidates,
    })
}
