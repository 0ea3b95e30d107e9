//! A server that answers each request with what a test has written.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The end of a scripted answer, behind its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// The body ends with the last chunk of HTTP.
    Ends,
    /// The connection is reset.
    Breaks,
    /// Nothing comes any more.
    HangsOn,
}

/// An answer: its body's pieces, and what follows them.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) content_type: &'static str,
    pub(crate) pieces: Vec<String>,
    pub(crate) then: Then,
}

impl Script {
    /// A stream.
    pub(crate) fn stream(pieces: Vec<String>, then: Then) -> Self {
        Self { content_type: "text/event-stream", pieces, then }
    }

    /// An answer in one piece, perhaps not all of it.
    pub(crate) fn json(text: &str, then: Then) -> Self {
        Self { content_type: "application/json", pieces: vec![text.to_owned()], then }
    }
}

/// A server on a port of its own, which says that it has the model `m`.
pub(crate) struct Scripted {
    /// `http://127.0.0.1:port`
    pub(crate) url: String,
    /// The paths of the requests that it was given, without those that ask about the server.
    pub(crate) given: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    /// Starts a server that answers requests at a path with a script.
    pub(crate) async fn start(script: impl Fn(&str) -> Script + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let given = Arc::<Mutex<Vec<String>>>::default();
        let paths = given.clone();
        let script = Arc::new(script);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, script.clone(), paths.clone()));
            }
        });
        Self { url, given }
    }

    pub(crate) fn given(&self) -> usize {
        self.given.lock().expect("not poisoned").len()
    }
}

async fn serve(
    mut stream: TcpStream,
    script: Arc<impl Fn(&str) -> Script>,
    given: Arc<Mutex<Vec<String>>>,
) {
    let mut heard = Vec::new();
    while let Some((path, body)) = next_request(&mut stream, &mut heard).await {
        let Some(answer) = about_itself(&path, &body) else {
            given.lock().expect("not poisoned").push(path.clone());
            return play(stream, script(&path)).await;
        };
        let (status, body) = answer;
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        if stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.is_err() {
            return;
        }
    }
}

/// Reads a request. Returns its path and body; `None` at the end of the connection.
async fn next_request(stream: &mut TcpStream, heard: &mut Vec<u8>) -> Option<(String, String)> {
    loop {
        let text = String::from_utf8_lossy(heard).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            let length: usize = length.parse().expect("a number");
            if body.len() >= length {
                heard.drain(..head.len() + 4 + length);
                return Some((head.split(' ').nth(1)?.to_owned(), body[..length].to_owned()));
            }
        }
        if stream.read_buf(heard).await.unwrap_or(0) == 0 {
            return None;
        }
    }
}

/// Answers as vLLM 0.33 does where a request asks about the server. It takes tokens, too.
fn about_itself(path: &str, body: &str) -> Option<(&'static str, String)> {
    let metrics = "vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_waiting{engine=\"0\"} 0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1.0\n";
    let models: Value = json!({"data": [{"id": "m", "root": "m", "max_model_len": 4096}]});
    match path {
        "/v1/models" => Some(("200 OK", models.to_string())),
        "/version" => Some(("200 OK", json!({"version": "0.33.0"}).to_string())),
        "/inference/v1/generate" if body == "{}" => {
            Some(("422 Unprocessable Entity", json!({}).to_string()))
        }
        "/kv_event_sources" => Some(("404 Not Found", json!({}).to_string())),
        "/metrics" => Some(("200 OK", metrics.to_owned())),
        _ => None,
    }
}

async fn play(mut stream: TcpStream, Script { content_type, pieces, then }: Script) {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let chunk = |piece: String| format!("{:x}\r\n{piece}\r\n", piece.len());
    let answer: String = std::iter::once(head).chain(pieces.into_iter().map(chunk)).collect();
    stream.write_all(answer.as_bytes()).await.expect("it is read");
    match then {
        Then::Ends => stream.write_all(b"0\r\n\r\n").await.expect("it is read"),
        // Everything written has arrived, and the other end reads it before it notices the reset.
        Then::Breaks => stream.set_zero_linger().expect("an option"),
        Then::HangsOn => {
            // Until the other end closes the connection.
            let _ = stream.read(&mut [0]).await;
        }
    }
}
