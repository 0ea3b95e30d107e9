//! Malicious and broken clients. The soak test fails unless the frontend handles each as expected.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The deadline for the frontend's reaction; its own limits are much shorter.
const DEADLINE: Duration = Duration::from_secs(30);

chiasm_types::every_variant! {
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum BadClient {
        /// Random bytes, then silence.
        Garbage,
        /// Half a request head, then silence.
        HalfHead,
        /// A request without the body that its head announces.
        NoBody,
        /// Many silent connections.
        SilentConnections,
        /// A long answer that the client does not read.
        Unread,
        /// A disconnect during the answer.
        Disconnect,
        /// JSON of nothing but brackets.
        Nested,
        /// A chat of 200,000 messages.
        ManyMessages,
        /// Fields of wrong types, and values out of range.
        WrongFields,
        /// A truncated image.
        BrokenImage,
        /// A body over the size limit.
        Huge,
    }
}

impl BadClient {
    /// Connects to the frontend, misbehaves once and checks the reaction.
    pub(crate) async fn run(self, address: String, seed: u64) {
        let mut random = SmallRng::seed_from_u64(seed);
        match self {
            Self::Garbage => {
                let bytes: Vec<u8> =
                    (0..random.random_range(1..5000)).map(|_| random.random()).collect();
                send_until_closed(&address, &bytes).await;
            }
            Self::HalfHead => {
                let half_head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
                send_until_closed(&address, half_head).await
            }
            Self::NoBody => {
                let length = random.random_range(1..1_000_000);
                send_until_closed(&address, &[head(length).as_bytes(), b"{"].concat()).await;
            }
            Self::SilentConnections => {
                let mut connections = Vec::new();
                for _ in 0..random.random_range(10..100) {
                    connections.extend(TcpStream::connect(&address).await);
                }
                tokio::time::sleep(Duration::from_millis(random.random_range(0..2000))).await;
            }
            Self::Unread => {
                let Some(_stream) = send(&address, &long_answer().to_string()).await else {
                    return;
                };
                tokio::time::sleep(Duration::from_millis(random.random_range(1000..6000))).await;
            }
            Self::Disconnect => {
                let Some(stream) = send(&address, &long_answer().to_string()).await else { return };
                tokio::time::sleep(Duration::from_millis(random.random_range(0..500))).await;
                drop(stream);
            }
            Self::Nested => {
                let depth = random.random_range(1000..200_000);
                let nested = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
                let body = format!(r#"{{"model": "m", "messages": {nested}}}"#);
                assert_refused(&address, &body).await;
            }
            Self::ManyMessages => {
                let messages = vec![r#"{"role": "user", "content": "x"}"#; 200_000].join(",");
                let body = format!(r#"{{"model": "m", "messages": [{messages}]}}"#);
                assert_refused(&address, &body).await;
            }
            Self::WrongFields => {
                let messages = json!([{"role": "user", "content": "x"}]);
                let bodies = [
                    json!({"model": 3, "messages": []}),
                    json!({"model": "m", "messages": "x"}),
                    json!({"model": "m", "messages": messages, "temperature": -1}),
                    json!({"model": "m", "messages": messages, "n": 1_000_000}),
                    json!({"model": "m", "messages": messages, "no_such_field": true}),
                ];
                let body = bodies[random.random_range(0..bodies.len())].to_string();
                assert_refused(&address, &body).await;
            }
            Self::BrokenImage => {
                let picture = chiasm::scenarios::DAWN.jpeg;
                let length = random.random_range(0..picture.len() - 100);
                use base64::Engine as _;
                let url = base64::engine::general_purpose::STANDARD.encode(&picture[..length]);
                let url = format!("data:image/jpeg;base64,{url}");
                let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
                let body =
                    json!({"model": "m", "messages": [{"role": "user", "content": content}]});
                assert_refused(&address, &body.to_string()).await;
            }
            Self::Huge => {
                let status = send_head(&address, &head(99_000_000_000)).await;
                let is_expected = status.is_none_or(|status| status == 413 || is_busy(status));
                assert!(is_expected, "{status:?}");
            }
        }
    }
}

fn head(length: u64) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         expect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
    )
}

fn long_answer() -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4000,
        "ignore_eos": true,
        "logprobs": true,
        "top_logprobs": 5,
        "stream": true,
    })
}

/// Returns `true` for statuses that other clients or faults may cause.
fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 429 | 500 | 502 | 503 | 504)
}

/// Sends `bytes` and waits until the frontend closes the connection.
async fn send_until_closed(address: &str, bytes: &[u8]) {
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let closed = timeout(DEADLINE, stream.read_to_end(&mut answer)).await;
    assert!(closed.is_ok(), "a silent connection stays open");
}

/// Sends a request. Returns `None` if the connection was closed first.
async fn send(address: &str, body: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let head = head(body.len() as u64).replace("expect: 100-continue\r\n", "");
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body.as_bytes()).await.ok()?;
    Some(stream)
}

async fn send_head(address: &str, head: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(head.as_bytes()).await.ok()?;
    status(&mut stream).await
}

/// Reads the status of an answer. Returns `None` if the connection was closed instead, as happens
/// at the connection limit.
async fn status(stream: &mut TcpStream) -> Option<u16> {
    let mut line = [0; 12];
    timeout(DEADLINE, stream.read_exact(&mut line)).await.expect("an answer in time").ok()?;
    std::str::from_utf8(&line).ok()?.split(' ').nth(1)?.parse().ok()
}

/// Sends `body` and asserts that it is refused: as invalid, or because the service is busy.
async fn assert_refused(address: &str, body: &str) {
    let Some(mut stream) = send(address, body).await else { return };
    let status = status(&mut stream).await;
    let is_refusal = |status: u16| (400..500).contains(&status) || is_busy(status);
    assert!(status.is_none_or(is_refusal), "{status:?}: {}", &body[..body.len().min(200)]);
}
