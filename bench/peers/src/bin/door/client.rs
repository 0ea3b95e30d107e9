//! One connection of the load: a request, its answer, the next request.

use std::error::Error;
use std::net::SocketAddr;

use http_body_util::BodyExt;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::body::Pieces;
use crate::workload::MODEL;

/// Most of a refusal that goes into an error.
const SHOWN: usize = 500;

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

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // What fails in it fails the request too.
        tokio::spawn(async { drop(connection.await) });
        Ok(Self { sender, host: address.to_string() })
    }

    /// Sends a chat and reads the answer to its end.
    pub(crate) async fn chat(&mut self, body: Pieces) -> Result<Usage, Box<dyn Error>> {
        let request = Request::post("/v1/chat/completions")
            .header("host", &self.host)
            .header("content-type", "application/json")
            .body(body)?;
        let (status, text) = self.send(request).await?;
        if status != StatusCode::OK {
            return Err(format!("{status}: {}", text.chars().take(SHOWN).collect::<String>()).into());
        }
        let completion = match text.starts_with("data:") {
            true => last_event(&text).ok_or("the stream does not end with its usage")?,
            false => &text,
        };
        Ok(serde_json::from_str::<Completion>(completion)?.usage)
    }

    /// How many engines the side says are ready, at the address where ours tells it.
    pub(crate) async fn ready_engines(&mut self) -> Result<u64, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Ready {
            workers: u64,
        }
        let request = Request::get("/ready").header("host", &self.host).body(Pieces::default())?;
        Ok(serde_json::from_str::<Ready>(&self.send(request).await?.1)?.workers)
    }

    /// Whether the side knows the model.
    pub(crate) async fn serves_the_model(&mut self) -> Result<bool, Box<dyn Error>> {
        let request = Request::get("/v1/models").header("host", &self.host).body(Pieces::default())?;
        let (status, text) = self.send(request).await?;
        Ok(status == StatusCode::OK && text.contains(&format!("{MODEL:?}")))
    }

    async fn send(&mut self, request: Request<Pieces>) -> Result<(StatusCode, String), Box<dyn Error>> {
        self.sender.ready().await?;
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        Ok((status, String::from_utf8(body.into())?))
    }
}

/// The event of a stream before its `[DONE]`: the one with its usage, if that was asked for.
fn last_event(stream: &str) -> Option<&str> {
    let mut events = stream.lines().rev().filter_map(|line| line.strip_prefix("data: "));
    events.next().filter(|last| *last == "[DONE]")?;
    events.next()
}
