//! The answer to one request, over the connection that the worker opens.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use chiasm_backend::{PartialMessage, PartialMessages};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::frame::{Bounds, TwoPart};
use crate::response_listener::{ExpectedResponse, KILL, ResponseConnection};

/// The deadline for a worker's connection after it has acknowledged a request. The worker
/// acknowledges before its engine has the request, and never connects if it can't read the request.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The deadline for sending [`KILL`].
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum sizes of one message. Dynamo's own limit of a message is 32 MiB.
const BOUNDS: Bounds = Bounds { header: 128 << 10, body: 64 << 20 };

/// An error that ends an answer early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    /// The worker did not open its connection in time.
    #[error(
        "the worker acknowledged the request but did not answer within {} s",
        CALL_TIMEOUT.as_secs()
    )]
    NotCalled,
    /// The connection was lost.
    #[error("the answer ended too early: {0}")]
    Lost(#[from] io::Error),
    /// The message violates the protocol.
    #[error("the worker violates the protocol: {0}")]
    Protocol(String),
    /// The worker reports that it could not execute the request.
    #[error("{0}")]
    Failed(String),
}

/// One answer. If it is dropped before its end, the worker is told to stop.
#[derive(Debug)]
pub(crate) struct Answer {
    state: State,
    has_prologue: bool,
    partial: PartialMessage,
}

#[derive(Debug)]
enum State {
    Waiting(ExpectedResponse),
    Open(OpenConnection),
    Over,
}

/// The connection of an answer. Dropping it before its end sends [`KILL`].
#[derive(Debug)]
struct OpenConnection {
    /// `None` once the answer is complete.
    stream: Option<TcpStream>,
    buffer: BytesMut,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let (Some(mut stream), Ok(runtime)) = (self.stream.take(), Handle::try_current()) else {
            return;
        };
        // The worker also stops at the end of the connection, but later.
        runtime.spawn(async move {
            let _ = timeout(KILL_TIMEOUT, stream.write_all(&TwoPart::encode(KILL, b""))).await;
        });
    }
}

/// The first header of an answer.
#[derive(Deserialize)]
struct Prologue {
    error: Option<String>,
}

/// The body of a message (`NetworkStreamWrapper` of Dynamo).
#[derive(Deserialize)]
struct Item<T> {
    data: Option<T>,
    complete_final: bool,
}

/// The data in a body from an engine. An event named `error` replaces the data.
#[derive(Deserialize)]
struct Annotated<T> {
    data: Option<T>,
    event: Option<String>,
    comment: Option<Vec<String>>,
    error: Option<IgnoredAny>,
}

impl<T> Annotated<T> {
    fn data(self) -> Result<Option<T>, AnswerError> {
        let Self { data, event, comment, error } = self;
        if event.as_deref() != Some("error") && (error.is_none() || data.is_some()) {
            return Ok(data);
        }
        let message = comment.filter(|lines| !lines.is_empty()).map(|lines| lines.join(": "));
        Err(AnswerError::Failed(message.unwrap_or_else(|| "no reason given".to_owned())))
    }
}

impl Answer {
    /// Creates an answer whose connection is expected. Its long partial messages count against
    /// `partial`.
    pub(crate) fn new(expected: ExpectedResponse, partial: &PartialMessages) -> Self {
        Self {
            state: State::Waiting(expected),
            has_prologue: false,
            partial: partial.start_message(),
        }
    }

    /// Returns the next data of an engine's answer; `None` at its end. After an error the answer is
    /// over. Cancel-safe.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, AnswerError> {
        while let Some(annotated) = self.next_bare::<Annotated<T>>().await? {
            match annotated.data() {
                Ok(Some(data)) => return Ok(Some(data)),
                // An annotation that was not requested.
                Ok(None) => {}
                Err(error) => {
                    self.state = State::Over;
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Returns the next data of an answer that is not an engine's; `None` at its end.
    pub(crate) async fn next_bare<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<T>, AnswerError> {
        let next = self.read().await;
        // Without further data the answer is over; an open connection is dropped.
        if !matches!(next, Ok(Some(_))) {
            self.state = State::Over;
        }
        next
    }

    async fn read<T: DeserializeOwned>(&mut self) -> Result<Option<T>, AnswerError> {
        loop {
            let Some(TwoPart { header, body }) = self.message().await? else { return Ok(None) };
            if !self.has_prologue {
                self.has_prologue = true;
                let prologue: Prologue = read_json(&header)?;
                match prologue.error {
                    Some(error) => return Err(AnswerError::Failed(error)),
                    None => continue,
                }
            }
            if body.is_empty() {
                // A complete answer ends with `complete_final`, which comes before the sentinel.
                return Err(AnswerError::Protocol(format!(
                    "its answer ended with {}, not with complete_final",
                    prefix(&header)
                )));
            }
            return match read_body::<Item<T>>(&body)? {
                Item { data: Some(data), .. } => Ok(Some(data)),
                Item { data: None, complete_final: true } => {
                    self.finish();
                    Ok(None)
                }
                Item { data: None, complete_final: false } => {
                    Err(AnswerError::Protocol("it sent a message without data".to_owned()))
                }
            };
        }
    }

    /// Returns the next message; `None` if the answer is over.
    async fn message(&mut self) -> Result<Option<TwoPart>, AnswerError> {
        loop {
            match &mut self.state {
                State::Over => return Ok(None),
                State::Waiting(expected) => {
                    let connection =
                        timeout(CALL_TIMEOUT, expected.connection()).await.ok().flatten();
                    let ResponseConnection { stream, buffer } =
                        connection.ok_or(AnswerError::NotCalled)?;
                    self.state = State::Open(OpenConnection { stream: Some(stream), buffer });
                }
                State::Open(OpenConnection { stream, buffer }) => {
                    let protocol_error =
                        |error: crate::frame::FrameError| AnswerError::Protocol(error.to_string());
                    let message = TwoPart::decode(buffer, BOUNDS).map_err(protocol_error)?;
                    if !self.partial.set_buffered_bytes(buffer.len()) {
                        return Err(AnswerError::Protocol("too many partial messages".to_owned()));
                    }
                    if message.is_some() {
                        return Ok(message);
                    }
                    let Some(stream) = stream else { return Ok(None) };
                    if stream.read_buf(buffer).await? == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                }
            }
        }
    }

    /// Marks the answer as complete, so that the worker is not told to stop.
    fn finish(&mut self) {
        if let State::Open(connection) = &mut self.state {
            connection.stream = None;
        }
    }
}

fn read_json<T: DeserializeOwned>(header: &Bytes) -> Result<T, AnswerError> {
    serde_json::from_slice(header).map_err(|error| AnswerError::Protocol(error.to_string()))
}

fn read_body<T: DeserializeOwned>(body: &Bytes) -> Result<T, AnswerError> {
    rmp_serde::from_slice(body).map_err(|error| AnswerError::Protocol(error.to_string()))
}

/// Returns the beginning of a header as text.
fn prefix(header: &Bytes) -> String {
    String::from_utf8_lossy(&header[..header.len().min(100)]).into_owned()
}
