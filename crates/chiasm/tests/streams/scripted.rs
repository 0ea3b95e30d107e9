//! A server that answers each request with a script.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The end of a scripted answer, after its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The body ends with HTTP's last chunk.
    Complete,
    /// The connection is reset.
    Reset,
    /// The server stays silent.
    Hang,
}

/// An answer: the pieces of its body, and their end.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) content_type: &'static str,
    pub(crate) pieces: Vec<String>,
    pub(crate) ending: Ending,
}

impl Script {
    /// Creates the script of a stream.
    pub(crate) fn stream(pieces: Vec<String>, ending: Ending) -> Self {
        Self { content_type: "text/event-stream", pieces, ending }
    }

    /// Creates the script of a JSON answer, which may be incomplete.
    pub(crate) fn json(text: &str, ending: Ending) -> Self {
        Self { content_type: "application/json", pieces: vec![text.to_owned()], ending }
    }
}

/// A server on a port of its own, which lists the model `m`.
pub(crate) struct ScriptedServer {
    /// `http://127.0.0.1:port`.
    pub(crate) url: String,
    /// The paths of scripted requests, without those about the server itself.
    requests: Arc<Mutex<Vec<String>>>,
}

impl ScriptedServer {
    /// Starts a server that answers requests with the script for their path.
    pub(crate) async fn start(script: impl Fn(&str) -> Script + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let paths = requests.clone();
        let script = Arc::new(script);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, script.clone(), paths.clone()));
            }
        });
        Self { url, requests }
    }

    /// Returns the number of scripted requests so far.
    pub(crate) fn request_count(&self) -> usize {
        self.requests.lock().expect("not poisoned").len()
    }
}

async fn serve(
    mut stream: TcpStream,
    script: Arc<impl Fn(&str) -> Script>,
    requests: Arc<Mutex<Vec<String>>>,
) {
    let mut buffer = Vec::new();
    while let Some((path, body)) = next_request(&mut stream, &mut buffer).await {
        let Some(answer) = self_description(&path, &body) else {
            requests.lock().expect("not poisoned").push(path.clone());
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

/// Reads a request and returns its path and body, or `None` at the end of the connection.
async fn next_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(String, String)> {
    loop {
        let text = String::from_utf8_lossy(buffer).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            let length: usize = length.parse().expect("a number");
            if body.len() >= length {
                buffer.drain(..head.len() + 4 + length);
                return Some((head.split(' ').nth(1)?.to_owned(), body[..length].to_owned()));
            }
        }
        if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
            return None;
        }
    }
}

/// Returns the status and body of vLLM 0.33 for requests about the server itself. The server
/// supports token mode.
fn self_description(path: &str, body: &str) -> Option<(&'static str, String)> {
    let metrics = "vllm:num_requests_running{engine=\"0\"} 0\n\
        vllm:num_requests_waiting{engine=\"0\"} 0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.0\n\
        vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1.0\n";
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

async fn play(mut stream: TcpStream, Script { content_type, pieces, ending }: Script) {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let chunk = |piece: String| format!("{:x}\r\n{piece}\r\n", piece.len());
    let answer: String = std::iter::once(head).chain(pieces.into_iter().map(chunk)).collect();
    stream.write_all(answer.as_bytes()).await.expect("an open connection");
    match ending {
        Ending::Complete => stream.write_all(b"0\r\n\r\n").await.expect("an open connection"),
        // Everything written has arrived. The client reads it before it sees the reset.
        Ending::Reset => stream.set_zero_linger().expect("an option"),
        Ending::Hang => {
            // Waits until the client closes the connection.
            let _ = stream.read(&mut [0]).await;
        }
    }
}
