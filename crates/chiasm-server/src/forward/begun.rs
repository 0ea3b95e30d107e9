//! The wait for an answer's beginning. A server sends its head long before its first token: until there is content the client is sent
//! nothing, so that the request can move when the server is lost.

use bytes::Bytes;
use chiasm_backend::{Death, Forwarded, JobError};
use futures_util::stream::{self, StreamExt};

use super::relay::{Ending, EventRelay};
use crate::fleet::Worker;
use crate::stream_end::StreamApi;

/// Bytes that are kept until an answer begins: what precedes the first token is some hundred, an answer in one piece some thousand.
const MAX_AHEAD_BYTES: usize = 64 << 10;

/// Waits until an answer to a request that was sent to `path` has content, or has ended.
///
/// # Errors
/// [`JobError::Dead`] when the server is lost before that, or says that it has failed.
pub(super) async fn begun(path: &str, answer: Forwarded, server: &Worker) -> Result<Forwarded, JobError> {
    let Forwarded { status, content_type, mut body } = answer;
    let mut progress = Progress::of(path, content_type.as_deref());
    let mut ahead = Vec::new();
    let hung = server.hung();
    tokio::pin!(hung);
    while !progress.has_begun() {
        let next = tokio::select! {
            // What has come counts.
            biased;
            next = body.next() => next,
            () = &mut hung => return Err(JobError::Dead(Death::new("it hangs"))),
        };
        match next.transpose()? {
            Some(piece) => {
                ahead.push(piece.clone());
                progress.add(piece)?;
            }
            None => {
                progress.end()?;
                return Ok(Forwarded { status, content_type, body: stream::iter(ahead).map(Ok).boxed() });
            }
        }
    }
    let body = stream::iter(ahead).map(Ok).chain(body).boxed();
    Ok(Forwarded { status, content_type, body })
}

/// How far an answer is.
enum Progress {
    /// A stream, and bytes of it so far.
    Stream { relay: Box<EventRelay>, bytes: usize },
    /// JSON in one piece, which is kept whole if it is short.
    Json { bytes: usize },
    /// Something else, whose first byte is content.
    Other { bytes: usize },
}

impl Progress {
    fn of(path: &str, content_type: Option<&str>) -> Self {
        match content_type {
            Some(kind) if kind.starts_with("text/event-stream") => {
                Self::Stream { relay: Box::new(EventRelay::new(StreamApi::at(path))), bytes: 0 }
            }
            Some(kind) if kind.starts_with("application/json") => Self::Json { bytes: 0 },
            _ => Self::Other { bytes: 0 },
        }
    }

    fn add(&mut self, piece: Bytes) -> Result<(), JobError> {
        match self {
            Self::Json { bytes } | Self::Other { bytes } => *bytes += piece.len(),
            Self::Stream { relay, bytes } => {
                *bytes += piece.len();
                relay.push(piece);
                if let Some(words) = relay.failure() {
                    return Err(JobError::Dead(Death::new(format!("it says that it failed: {words}"))));
                }
            }
        }
        Ok(())
    }

    fn has_begun(&self) -> bool {
        match self {
            Self::Stream { relay, bytes } => relay.has_content() || *bytes > MAX_AHEAD_BYTES,
            Self::Json { bytes } => *bytes > MAX_AHEAD_BYTES,
            Self::Other { bytes } => *bytes > 0,
        }
    }

    /// The server has ended its answer.
    fn end(&mut self) -> Result<(), JobError> {
        if let Self::Stream { relay, .. } = self
            && relay.finish().is_none()
            && relay.ending(true) != Ending::Whole
        {
            return Err(JobError::Dead(Death::new("it ended its answer before it had begun")));
        }
        Ok(())
    }
}
