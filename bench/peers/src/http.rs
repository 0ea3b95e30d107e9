//! A connection to a frontend that speaks OpenAI's protocol.

use std::error::Error;
use std::net::SocketAddr;

use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::body::Pieces;

/// Most of a refusal that goes into an error.
const SHOWN: usize = 500;

/// Opens a connection to a frontend.
///
/// # Errors
/// Nobody listens there.
pub async fn connect(address: SocketAddr) -> Result<SendRequest<Pieces>, Box<dyn Error>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // An error of the connection fails the request too.
    tokio::spawn(async { drop(connection.await) });
    Ok(sender)
}

/// Creates a request for a chat.
///
/// # Errors
/// The host is no header's value.
pub fn chat(host: &str, body: Pieces) -> Result<Request<Pieces>, Box<dyn Error>> {
    let request = Request::post("/v1/chat/completions").header("host", host);
    Ok(request.header("content-type", "application/json").body(body)?)
}

/// Checks the status of an answer.
///
/// # Errors
/// The beginning of an answer that is no 200.
pub fn check(status: StatusCode, text: &str) -> Result<(), Box<dyn Error>> {
    if status == StatusCode::OK {
        return Ok(());
    }
    Err(format!("{status}: {}", text.chars().take(SHOWN).collect::<String>()).into())
}

/// Returns the event of a stream before its `[DONE]`: the one with its usage, if that was asked
/// for.
pub fn last_event(stream: &str) -> Option<&str> {
    let mut events = stream.lines().rev().filter_map(|line| line.strip_prefix("data: "));
    events.next().filter(|last| *last == "[DONE]")?;
    events.next()
}
