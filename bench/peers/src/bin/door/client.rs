//! HTTP connections to frontends that speak OpenAI's protocol.

use std::error::Error;
use std::net::SocketAddr;
use std::time::SystemTime;

use http_body_util::BodyExt;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::pieces::Pieces;

/// The maximum length of a refusal in an error, in characters.
const MAX_ERROR_CHARS: usize = 500;

pub(crate) struct Connection {
    sender: SendRequest<Pieces>,
    address: SocketAddr,
}

/// The tokens that a frontend counted.
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
    /// Returns the number of prompt tokens that were in the engine's cache.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or_default()
    }
}

/// A complete response.
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
    /// The time at which the request was sent, see [`nanoseconds`].
    sent: u64,
    /// The arrival of each piece, and the length of the text up to its end. Mostly a piece is one
    /// event.
    pieces: Vec<(u64, usize)>,
}

impl Response {
    /// Parses the usage of an answer. In a stream it is in the event before `[DONE]`.
    fn usage(&self) -> Result<Usage, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Completion {
            usage: Usage,
        }
        let mut completion = &*self.text;
        if completion.starts_with("data:") {
            let lines = completion.lines().rev();
            let mut events = lines.filter_map(|line| line.strip_prefix("data: "));
            let is_complete = events.next() == Some("[DONE]");
            let last = events.next().filter(|_| is_complete);
            completion = last.ok_or("the stream does not end with its usage")?;
        }
        Ok(serde_json::from_str::<Completion>(completion)?.usage)
    }

    /// Returns the number of events of a stream, without its `[DONE]`; 0 for a response that is no
    /// stream.
    pub(crate) fn events(&self) -> u64 {
        self.text.lines().filter(|line| line.starts_with("data: {")).count() as u64
    }

    /// Returns the arrivals of pieces.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = u64> {
        self.pieces.iter().map(|(arrival, _)| *arrival)
    }

    /// Returns the milliseconds from sending the request to the first event with text.
    pub(crate) fn ttft_ms(&self) -> Option<f64> {
        self.text_times_ms().next()
    }

    /// Returns the milliseconds from sending the request to each event with text, in order.
    pub(crate) fn text_times_ms(&self) -> impl Iterator<Item = f64> {
        let mut end = 0;
        self.text.split_inclusive('\n').filter_map(move |line| {
            end += line.len();
            let piece = self.pieces.partition_point(|(_, piece_end)| *piece_end < end);
            let (arrival, _) = self.pieces.get(piece).filter(|_| has_text(line))?;
            Some(arrival.saturating_sub(self.sent) as f64 / 1e6)
        })
    }
}

/// Returns `true` if a line of a stream is an event with text. The first event of some frontends
/// only has the role.
fn has_text(line: &str) -> bool {
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
    let event = line.strip_prefix("data: ").and_then(|it| serde_json::from_str::<Event>(it).ok());
    let choice = event.and_then(|event| event.choices.into_iter().next());
    choice.and_then(|choice| choice.delta.content).is_some_and(|content| !content.is_empty())
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // An error of the connection fails the request too.
        tokio::spawn(async { drop(connection.await) });
        Ok(Self { sender, address })
    }

    /// Sends a chat request and reads the whole answer.
    pub(crate) async fn chat(&mut self, body: Pieces) -> Result<(Usage, Response), Box<dyn Error>> {
        let request = Request::post("/v1/chat/completions").header("host", self.address.to_string());
        let request = request.header("content-type", "application/json").body(body)?;
        let response = self.send(request).await?;
        if response.status != StatusCode::OK {
            let shown: String = response.text.chars().take(MAX_ERROR_CHARS).collect();
            return Err(format!("{}: {shown}", response.status).into());
        }
        Ok((response.usage()?, response))
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<Response, Box<dyn Error>> {
        let request = Request::get(path).header("host", self.address.to_string());
        let request = request.body(Pieces::default())?;
        self.send(request).await
    }

    async fn send(&mut self, request: Request<Pieces>) -> Result<Response, Box<dyn Error>> {
        // Frontends close connections that are idle for seconds, as while requests of many clients
        // are written.
        if self.sender.ready().await.is_err() {
            *self = Self::open(self.address).await?;
            self.sender.ready().await?;
        }
        let sent = nanoseconds();
        let (head, mut body) = self.sender.send_request(request).await?.into_parts();
        let mut text = Vec::new();
        let mut pieces = Vec::new();
        while let Some(piece) = body.frame().await {
            if let Some(data) = piece?.data_ref() {
                text.extend_from_slice(data);
                pieces.push((nanoseconds(), text.len()));
            }
        }
        let text = String::from_utf8(text)?;
        Ok(Response { status: head.status, headers: head.headers, text, sent, pieces })
    }
}

/// Sends a GET request over a new connection.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Result<Response, Box<dyn Error>> {
    Connection::open(address).await?.get(path).await
}

/// Returns the number of ready engines that `chiasm serve` reports.
pub(crate) async fn ready_engines(address: SocketAddr) -> Result<usize, Box<dyn Error>> {
    #[derive(Deserialize)]
    struct Ready {
        workers: usize,
    }
    Ok(serde_json::from_str::<Ready>(&get(address, "/ready").await?.text)?.workers)
}

/// Returns nanoseconds since 1970, a clock that all processes share.
pub(crate) fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn role_event_has_no_text() {
        assert!(!has_text(r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}"#));
        assert!(has_text(r#"data: {"choices":[{"delta":{"content":" a"}}]}"#));
        assert!(!has_text(r#"data: {"choices":[],"usage":{}}"#) && !has_text("data: [DONE]"));
    }

    #[test]
    fn stream_has_time_of_first_text_with_usage() {
        let events = [
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\" a\"}}]}\n\n",
            "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n",
            "data: [DONE]\n\n",
        ];
        let mut text = String::new();
        let pieces = events.iter().zip([2_000_000, 3_000_000, 4_000_000, 5_000_000]);
        let pieces = pieces.map(|(event, arrival)| {
            text.push_str(event);
            (arrival, text.len())
        });
        let pieces = pieces.collect();
        let headers = HeaderMap::new();
        let mut response =
            Response { status: StatusCode::OK, headers, text, sent: 1_000_000, pieces };
        assert_eq!((response.ttft_ms(), response.events()), (Some(2.0), 3));
        assert_eq!(response.text_times_ms().collect::<Vec<_>>(), [2.0]);
        let usage = response.usage().unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()),
            (3, 2, 0)
        );
        response.text.truncate(response.text.len() - events[3].len());
        assert!(response.usage().is_err());
    }
}
