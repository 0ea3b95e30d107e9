//! A number of clients that each ask again when they are answered, until there is nothing left to
//! ask.

use std::cell::Cell;
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};
use peers::body::Pieces;
use peers::http;
use serde::Deserialize;
use tokio::time::timeout;

/// How long all answers may take.
const PATIENCE: Duration = Duration::from_secs(180);
/// Who has answered a request, as `chiasm` tells it.
const WORKER: &str = "x-chiasm-worker";

/// What a side counted.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Usage {
    /// Those that the engine had in its cache.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or_default()
    }
}

/// A streamed answer that was read to its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Time from sending the request to the first text; none if there was no text.
    pub(crate) ttft: Option<Duration>,
    pub(crate) usage: Usage,
    /// The number of the worker, where it is told.
    pub(crate) worker: Option<usize>,
}

/// The answers, in the order of the requests.
#[derive(Debug)]
pub(crate) struct Answers {
    pub(crate) answers: Vec<Answer>,
    /// Time between the first request and the end of the last answer.
    pub(crate) wall: Duration,
}

/// Sends all requests in their order, one from each of the clients at a time.
pub(crate) async fn ask(address: SocketAddr, requests: &[Pieces], clients: usize) -> Result<Answers, Box<dyn Error>> {
    let mut connections = Vec::new();
    for _ in 0..clients {
        connections.push(Connection::open(address).await?);
    }
    let next = Cell::new(0);
    let start = Instant::now();
    let clients = connections.into_iter().map(async |mut connection| {
        let mut answers = Vec::new();
        loop {
            let number = next.replace(next.get() + 1);
            let Some(request) = requests.get(number) else { return Ok::<_, Box<dyn Error>>(answers) };
            answers.push((number, connection.chat(request.clone()).await?));
        }
    });
    let answers = timeout(PATIENCE, try_join_all(clients)).await.map_err(|_| "some requests get no answer")??;
    let wall = start.elapsed();
    let mut answers = answers.concat();
    answers.sort_by_key(|&(number, _)| number);
    Ok(Answers { answers: answers.into_iter().map(|(_, answer)| answer).collect(), wall })
}

/// The status and the body of what is at a path.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Result<(StatusCode, String), Box<dyn Error>> {
    let mut connection = Connection::open(address).await?;
    let request = Request::get(path).header("host", &connection.host).body(Pieces::default())?;
    let answer = connection.sender.send_request(request).await?;
    let status = answer.status();
    Ok((status, String::from_utf8(answer.into_body().collect().await?.to_bytes().into())?))
}

struct Connection {
    sender: hyper::client::conn::http1::SendRequest<Pieces>,
    host: String,
}

impl Connection {
    async fn open(address: SocketAddr) -> Result<Self, Box<dyn Error>> {
        Ok(Self { sender: http::connect(address).await?, host: address.to_string() })
    }

    async fn chat(&mut self, body: Pieces) -> Result<Answer, Box<dyn Error>> {
        let request = http::chat(&self.host, body)?;
        self.sender.ready().await?;
        let start = Instant::now();
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let worker =
            answer.headers().get(WORKER).and_then(|worker| worker.to_str().ok()?.strip_prefix("worker_")?.parse().ok());
        let (mut pieces, mut text, mut read, mut ttft) = (answer.into_body(), Vec::new(), 0, None);
        while let Some(piece) = pieces.frame().await {
            let Ok(data) = piece?.into_data() else { continue };
            text.extend_from_slice(&data);
            while ttft.is_none()
                && let Some(end) = text[read..].iter().position(|&byte| byte == b'\n')
            {
                ttft = has_text(&text[read..read + end]).then(|| start.elapsed());
                read += end + 1;
            }
        }
        let text = String::from_utf8(text)?;
        http::check(status, &text)?;
        let usage = usage(&text).ok_or_else(|| format!("the stream does not end with its usage: {text}"))?;
        Ok(Answer { ttft, usage, worker })
    }
}

/// Whether a line of a stream is an event with text. The first one of some sides has none: it only
/// tells the role.
fn has_text(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Event {
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        delta: Delta,
    }
    #[derive(Deserialize)]
    struct Delta {
        content: Option<String>,
    }
    let event = line.strip_prefix(b"data: ").and_then(|event| serde_json::from_slice::<Event>(event).ok());
    let choice = event.and_then(|event| event.choices.into_iter().next());
    choice.and_then(|choice| choice.delta.content).is_some_and(|content| !content.is_empty())
}

/// What the event before a stream's `[DONE]` says.
fn usage(stream: &str) -> Option<Usage> {
    #[derive(Deserialize)]
    struct Event {
        usage: Usage,
    }
    serde_json::from_str::<Event>(http::last_event(stream)?).ok().map(|event| event.usage)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn the_first_text_is_not_the_first_event() {
        assert!(!has_text(br#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#));
        assert!(has_text(br#"data: {"choices":[{"delta":{"content":" a"}}]}"#));
        assert!(!has_text(br#"data: {"choices":[],"usage":{}}"#) && !has_text(b"data: [DONE]") && !has_text(b""));
    }

    #[test]
    fn usage_is_in_the_last_event() {
        let stream = "data: {}\n\ndata: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
        let found = usage(stream).unwrap();
        assert_eq!((found.prompt_tokens, found.completion_tokens, found.cached_tokens()), (3, 2, 0));
        assert!(usage("data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n").is_none());
    }
}
