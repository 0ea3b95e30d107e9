//! Clients who mean harm, or are broken. Each is treated as it should be, or the soak fails.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The frontend's own limits end everything well before this.
const DEADLINE: Duration = Duration::from_secs(30);

chiasm_types::every_variant! {
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum BadClient {
        /// Random bytes, then nothing.
        Garbage,
        /// Half a head, then nothing.
        HalfHead,
        /// A body that is announced and does not come.
        NoBody,
        /// Many connections that say nothing.
        Crowd,
        /// A long answer that is not read.
        Unread,
        /// An answer that is asked for and not awaited.
        Leaves,
        /// JSON of nothing but brackets.
        Nested,
        /// Very many messages.
        ManyMessages,
        /// Fields of wrong types, and values that are out of range.
        WrongFields,
        /// An image that breaks off.
        BrokenImage,
        /// A body that is larger than any may be.
        Huge,
    }
}

impl BadClient {
    /// Goes to the frontend once.
    pub(crate) async fn visit(self, address: String, seed: u64) {
        let mut random = SmallRng::seed_from_u64(seed);
        match self {
            Self::Garbage => {
                let bytes: Vec<u8> =
                    (0..random.random_range(1..5000)).map(|_| random.random()).collect();
                until_closed(&address, &bytes).await;
            }
            Self::HalfHead => {
                until_closed(&address, b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n").await
            }
            Self::NoBody => {
                let length = random.random_range(1..1_000_000);
                until_closed(&address, &[head(length).as_bytes(), b"{"].concat()).await;
            }
            Self::Crowd => {
                let mut crowd = Vec::new();
                for _ in 0..random.random_range(10..100) {
                    crowd.extend(TcpStream::connect(&address).await);
                }
                tokio::time::sleep(Duration::from_millis(random.random_range(0..2000))).await;
            }
            Self::Unread => {
                let Some(_stream) = send(&address, &long_answer().to_string()).await else {
                    return;
                };
                tokio::time::sleep(Duration::from_millis(random.random_range(1000..6000))).await;
            }
            Self::Leaves => {
                let Some(stream) = send(&address, &long_answer().to_string()).await else { return };
                tokio::time::sleep(Duration::from_millis(random.random_range(0..500))).await;
                drop(stream);
            }
            Self::Nested => {
                let depth = random.random_range(1000..200_000);
                let nested = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
                let body = format!(r#"{{"model": "m", "messages": {nested}}}"#);
                refused(&address, &body).await;
            }
            Self::ManyMessages => {
                let messages = vec![r#"{"role": "user", "content": "x"}"#; 200_000].join(",");
                refused(&address, &format!(r#"{{"model": "m", "messages": [{messages}]}}"#)).await;
            }
            Self::WrongFields => {
                let wrong = [
                    json!({"model": 3, "messages": []}),
                    json!({"model": "m", "messages": "x"}),
                    json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": -1}),
                    json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 1_000_000}),
                    json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "no_such_field": true}),
                ];
                refused(&address, &wrong[random.random_range(0..wrong.len())].to_string()).await;
            }
            Self::BrokenImage => {
                let picture = chiasm::scenarios::DAWN.jpeg;
                let length = random.random_range(0..picture.len() - 100);
                use base64::Engine as _;
                let url = base64::engine::general_purpose::STANDARD.encode(&picture[..length]);
                let url = format!("data:image/jpeg;base64,{url}");
                let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
                refused(
                    &address,
                    &json!({"model": "m", "messages": [{"role": "user", "content": content}]})
                        .to_string(),
                )
                .await;
            }
            Self::Huge => {
                let told = send_head(&address, &head(99_000_000_000)).await;
                assert!(told.is_none_or(|status| status == 413 || is_busy(status)), "{told:?}");
            }
        }
    }
}

fn head(length: u64) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n\
         content-length: {length}\r\n\r\n"
    )
}

fn long_answer() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 5, "stream": true})
}

/// What others may be the cause of, or the weather.
fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 429 | 500 | 502 | 503 | 504)
}

/// Sends bytes and waits until the frontend has had enough.
async fn until_closed(address: &str, bytes: &[u8]) {
    let Ok(mut stream) = TcpStream::connect(address).await else { return };
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let closed = timeout(DEADLINE, stream.read_to_end(&mut answer)).await;
    assert!(closed.is_ok(), "a connection that says nothing is kept");
}

/// Sends a request; `None` if the connection was closed before that.
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

/// The status of an answer; `None` if the connection was closed instead, as it may be in a crowd.
async fn status(stream: &mut TcpStream) -> Option<u16> {
    let mut line = [0; 12];
    timeout(DEADLINE, stream.read_exact(&mut line)).await.expect("nobody hangs").ok()?;
    std::str::from_utf8(&line).ok()?.split(' ').nth(1)?.parse().ok()
}

/// What is wrong with a request is told, or that nobody has time for it.
async fn refused(address: &str, body: &str) {
    let Some(mut stream) = send(address, body).await else { return };
    let told = status(&mut stream).await;
    let is_refused = |status: u16| (400..500).contains(&status) || is_busy(status);
    assert!(told.is_none_or(is_refused), "{told:?}: {}", &body[..body.len().min(200)]);
}
