//! The wait for an answer's first content.
//!
//! A server sends the head of its answer long before the first token. The client is sent nothing
//! until there is content, so the request can still move to another server if this one is lost.

use bytes::Bytes;
use chiasm_api::forward::{Ending, EventRelay};
use chiasm_backend::{Death, Forwarded, JobError};
use chiasm_fleet::Worker;
use futures_util::stream::{self, StreamExt};

use crate::paths::ModelEndpoint;

/// The maximum number of bytes that are kept until an answer begins. Events before the first token
/// take some hundred bytes, an answer in one piece some thousand.
const MAX_AHEAD_BYTES: usize = 64 << 10;

/// Waits until the answer to a request to `endpoint` has content or has ended.
///
/// # Errors
/// [`JobError::Dead`] if the server is lost before that, or reports its own failure.
pub(super) async fn begun(
    endpoint: ModelEndpoint,
    answer: Forwarded,
    server: &Worker,
) -> Result<Forwarded, JobError> {
    let Forwarded { status, content_type, mut body } = answer;
    let mut progress = Progress::new(endpoint, content_type.as_deref());
    let mut ahead = Vec::new();
    let hung = server.hung();
    tokio::pin!(hung);
    while !progress.has_begun() {
        let next = tokio::select! {
            // Content that has come counts, even from a server that hangs now.
            biased;
            next = body.next() => next,
            () = &mut hung => return Err(JobError::Dead(Death::new("it hangs"))),
        };
        match next.transpose()? {
            Some(piece) => {
                ahead.push(piece.clone());
                progress.add(piece);
                if let Some(words) = progress.failure() {
                    // The server's words may contain its address, so they are for the log alone.
                    tracing::warn!(worker = %server.id, what = server.what, words, "a server failed before its answer began");
                    return Err(JobError::Dead(Death::new("it says that it failed")));
                }
            }
            None => {
                progress.end()?;
                return Ok(Forwarded {
                    status,
                    content_type,
                    body: stream::iter(ahead).map(Ok).boxed(),
                });
            }
        }
    }
    let body = stream::iter(ahead).map(Ok).chain(body).boxed();
    Ok(Forwarded { status, content_type, body })
}

/// The progress of an answer towards its first content.
enum Progress {
    /// A stream of events, of which so many bytes have come.
    Stream { relay: Box<EventRelay>, bytes: usize },
    /// JSON in one piece; a short one is kept whole.
    Json { bytes: usize },
    /// Any other body; its first byte is content.
    Other { bytes: usize },
}

impl Progress {
    fn new(endpoint: ModelEndpoint, content_type: Option<&str>) -> Self {
        match content_type {
            Some(kind) if kind.starts_with("text/event-stream") => {
                Self::Stream { relay: Box::new(EventRelay::new(endpoint.stream_api())), bytes: 0 }
            }
            Some(kind) if kind.starts_with("application/json") => Self::Json { bytes: 0 },
            _ => Self::Other { bytes: 0 },
        }
    }

    fn add(&mut self, piece: Bytes) {
        match self {
            Self::Json { bytes } | Self::Other { bytes } => *bytes += piece.len(),
            Self::Stream { relay, bytes } => {
                *bytes += piece.len();
                relay.push(piece);
            }
        }
    }

    /// Returns the server's words if it reported its own failure before any content.
    fn failure(&self) -> Option<&str> {
        match self {
            Self::Stream { relay, .. } => relay.failure(),
            Self::Json { .. } | Self::Other { .. } => None,
        }
    }

    fn has_begun(&self) -> bool {
        match self {
            Self::Stream { relay, bytes } => relay.has_content() || *bytes > MAX_AHEAD_BYTES,
            Self::Json { bytes } => *bytes > MAX_AHEAD_BYTES,
            Self::Other { bytes } => *bytes > 0,
        }
    }

    /// Checks that an answer which ends before its first content is whole.
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
