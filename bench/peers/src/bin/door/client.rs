//! One connection of the load: a request, its answer, the next request.

use std::error::Error;
use std::net::SocketAddr;
use std::time::SystemTime;

use http_body_util::BodyExt;
use hyper::client::conn::http1::SendRequest;
use hyper::{HeaderMap, Request, StatusCode};
use peers::body::Pieces;
use peers::http::{chat, check, connect, last_event};
use serde::Deserialize;

use crate::workload::MODEL;

/// The header in which Chiasm names the worker that has computed a prompt, if it is not the one
/// that answers.
const PREFILL_WORKER: &str = "x-chiasm-prefill-worker";

pub(crate) struct Connection {
    sender: SendRequest<Pieces>,
    host: String,
}

/// What a side counted.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

#[derive(Deserialize)]
struct Completion {
    usage: Usage,
}

/// What was read of any answer.
struct Received {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
    /// When its pieces came.
    arrivals: Vec<u64>,
}

/// An answer that was read to its end.
pub(crate) struct Answer {
    pub(crate) usage: Usage,
    /// Events of a stream but for its `[DONE]`; 0 if it was none.
    pub(crate) events: u64,
    /// When its pieces came, of which one mostly is an event: [`nanoseconds`].
    pub(crate) arrivals: Vec<u64>,
    /// It says that another worker than the one that answers has computed the prompt.
    pub(crate) is_split: bool,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, Box<dyn Error>> {
        Ok(Self { sender: connect(address).await?, host: address.to_string() })
    }

    /// Sends a chat and reads the answer to its end.
    pub(crate) async fn chat(&mut self, body: Pieces) -> Result<Answer, Box<dyn Error>> {
        let Received { status, headers, text, arrivals } = self.send(chat(&self.host, body)?).await?;
        check(status, &text)?;
        let mut completion = &*text;
        let mut events = 0;
        if text.starts_with("data:") {
            completion = last_event(&text).ok_or("the stream does not end with its usage")?;
            events = text.lines().filter(|line| line.starts_with("data: {")).count() as u64;
        }
        let usage = serde_json::from_str::<Completion>(completion)?.usage;
        Ok(Answer { usage, events, arrivals, is_split: headers.contains_key(PREFILL_WORKER) })
    }

    /// How many engines the side says are ready, at the address where ours tells it.
    pub(crate) async fn ready_engines(&mut self) -> Result<u64, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Ready {
            workers: u64,
        }
        Ok(serde_json::from_str::<Ready>(&self.get("/ready").await?.1)?.workers)
    }

    /// Whether the side knows the model.
    pub(crate) async fn serves_the_model(&mut self) -> Result<bool, Box<dyn Error>> {
        let (status, text) = self.get("/v1/models").await?;
        Ok(status == StatusCode::OK && text.contains(&format!("{MODEL:?}")))
    }

    /// What the side says at a path: the status and the body.
    pub(crate) async fn get(&mut self, path: &str) -> Result<(StatusCode, String), Box<dyn Error>> {
        let request = Request::get(path).header("host", &self.host).body(Pieces::default())?;
        let Received { status, text, .. } = self.send(request).await?;
        Ok((status, text))
    }

    async fn send(&mut self, request: Request<Pieces>) -> Result<Received, Box<dyn Error>> {
        self.sender.ready().await?;
        let answer = self.sender.send_request(request).await?;
        let (head, mut pieces) = answer.into_parts();
        let (mut text, mut arrivals) = (Vec::new(), Vec::new());
        while let Some(piece) = pieces.frame().await {
            if let Some(data) = piece?.data_ref() {
                arrivals.push(nanoseconds());
                text.extend_from_slice(data);
            }
        }
        Ok(Received { status: head.status, headers: head.headers, text: String::from_utf8(text)?, arrivals })
    }
}

/// Nanoseconds since 1970, which all processes count alike.
pub(crate) fn nanoseconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
