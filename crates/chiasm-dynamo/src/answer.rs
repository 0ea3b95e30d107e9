//! The answer to one request, as the worker sends it home.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use chiasm_backend::{Begun, BegunPart};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::call_home::{Called, Expected, KILL};
use crate::frame::{Bounds, TwoPart};

/// How long a worker may take to call home once it has acknowledged a request. It does so before
/// its engine has the request, and never where it can't read it.
const CALLED_WITHIN: Duration = Duration::from_secs(30);
/// How long the word that an answer is not wanted may take.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// What a worker may send at once: Dynamo's own limit of a message is 32 MiB.
const BOUNDS: Bounds = Bounds { header: 128 << 10, body: 64 << 20 };

/// What ends an answer without its end, in words.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    /// The worker has not called.
    #[error("it acknowledged a request and said no more for {} s", CALLED_WITHIN.as_secs())]
    NotCalled,
    /// The connection is gone.
    #[error("it ended its answer too early: {0}")]
    Lost(#[from] io::Error),
    /// It is not what a worker sends.
    #[error("it tells nonsense: {0}")]
    Nonsense(String),
    /// The worker could not do the request, by its own account.
    #[error("{0}")]
    Failed(String),
}

/// One answer. Dropping it before its end tells the worker that nobody wants it.
#[derive(Debug)]
pub(crate) struct Answer {
    state: State,
    has_prologue: bool,
    begun: BegunPart,
}

#[derive(Debug)]
enum State {
    Waiting(Expected),
    Reading(Reading),
    Over,
}

#[derive(Debug)]
struct Reading {
    /// Taken when all has come.
    stream: Option<TcpStream>,
    came: BytesMut,
}

impl Drop for Reading {
    fn drop(&mut self) {
        let (Some(mut stream), Ok(runtime)) = (self.stream.take(), Handle::try_current()) else {
            return;
        };
        // The end of the connection says the same, later.
        runtime.spawn(async move {
            let _ = timeout(TOLD_WITHIN, stream.write_all(&TwoPart::encode(KILL, b""))).await;
        });
    }
}

/// What opens an answer.
#[derive(Deserialize)]
struct Prologue {
    error: Option<String>,
}

/// One body (`NetworkStreamWrapper` of Dynamo).
#[derive(Deserialize)]
struct Item<T> {
    data: Option<T>,
    complete_final: bool,
}

/// What is in a body of an engine's; an event named `error` stands in place of data.
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
        let words = comment.filter(|words| !words.is_empty()).map(|words| words.join(": "));
        Err(AnswerError::Failed(words.unwrap_or_else(|| "it does not say why".to_owned())))
    }
}

impl Answer {
    /// An answer that is waited for. What has come of a long message is counted in `begun`.
    pub(crate) fn new(expected: Expected, begun: &Begun) -> Self {
        Self { state: State::Waiting(expected), has_prologue: false, begun: begun.part() }
    }

    /// What comes next of an engine's answer; `None` behind all of it. After an error there is
    /// nothing more. Cancel safe.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, AnswerError> {
        while let Some(annotated) = self.next_bare::<Annotated<T>>().await? {
            match annotated.data() {
                Ok(Some(data)) => return Ok(Some(data)),
                // An annotation that nobody asked for.
                Ok(None) => {}
                Err(error) => {
                    self.state = State::Over;
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// The same of an answer that is not an engine's.
    pub(crate) async fn next_bare<T: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<T>, AnswerError> {
        let next = self.read().await;
        // What is not over then is not wanted any more.
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
                // The sentinel alone, as what says that all has come is before it.
                return Err(AnswerError::Nonsense(format!("it ends by {}", shown(&header))));
            }
            return match read_body::<Item<T>>(&body)? {
                Item { data: Some(data), .. } => Ok(Some(data)),
                Item { data: None, complete_final: true } => {
                    self.finish();
                    Ok(None)
                }
                Item { data: None, complete_final: false } => {
                    Err(AnswerError::Nonsense("a message without data".to_owned()))
                }
            };
        }
    }

    /// The next message; `None` if the answer is over.
    async fn message(&mut self) -> Result<Option<TwoPart>, AnswerError> {
        loop {
            match &mut self.state {
                State::Over => return Ok(None),
                State::Waiting(expected) => {
                    let called = timeout(CALLED_WITHIN, expected.called()).await.ok().flatten();
                    let Called { stream, came } = called.ok_or(AnswerError::NotCalled)?;
                    self.state = State::Reading(Reading { stream: Some(stream), came });
                }
                State::Reading(Reading { stream, came }) => {
                    let nonsense =
                        |error: crate::frame::FrameError| AnswerError::Nonsense(error.to_string());
                    let message = TwoPart::decode(came, BOUNDS).map_err(nonsense)?;
                    if !self.begun.has_room_for(came.len()) {
                        return Err(AnswerError::Nonsense(
                            "too many long messages at once".to_owned(),
                        ));
                    }
                    if message.is_some() {
                        return Ok(message);
                    }
                    let Some(stream) = stream else { return Ok(None) };
                    if stream.read_buf(came).await? == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                }
            }
        }
    }

    /// All has come: the worker is not told to stop.
    fn finish(&mut self) {
        if let State::Reading(reading) = &mut self.state {
            reading.stream = None;
        }
    }
}

fn read_json<T: DeserializeOwned>(header: &Bytes) -> Result<T, AnswerError> {
    serde_json::from_slice(header).map_err(|error| AnswerError::Nonsense(error.to_string()))
}

fn read_body<T: DeserializeOwned>(body: &Bytes) -> Result<T, AnswerError> {
    rmp_serde::from_slice(body).map_err(|error| AnswerError::Nonsense(error.to_string()))
}

fn shown(header: &Bytes) -> String {
    String::from_utf8_lossy(&header[..header.len().min(100)]).into_owned()
}
