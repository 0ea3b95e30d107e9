//! The wait for an answer's first content.
//!
//! A server sends the head of its answer long before the first token. Nothing is sent to the client
//! until there is content, so the request can still move to another server if this one is lost.

use bytes::Bytes;
use chiasm_api::forward::{Ending, EventRelay};
use chiasm_backend::{DeathReason, ForwardResponse, JobError};
use chiasm_fleet::Worker;
use futures_util::stream::{self, StreamExt};

use crate::paths::ModelEndpoint;

/// The maximum number of bytes that are buffered until an answer has content. Events before the
/// first token take some hundred bytes, an answer that is not streamed some thousand.
const MAX_BUFFERED_BYTES: usize = 64 << 10;

/// Waits until the answer to a request to `endpoint` has content or has ended.
///
/// # Errors
/// [`JobError::Dead`] if the server is lost before that, or reports its own failure.
pub(super) async fn wait_for_content(
    endpoint: ModelEndpoint,
    answer: ForwardResponse,
    server: &Worker,
) -> Result<ForwardResponse, JobError> {
    let ForwardResponse { status, content_type, mut body } = answer;
    let mut progress = Progress::new(endpoint, content_type.as_deref());
    let mut buffered = Vec::new();
    let hung = server.wait_hung();
    tokio::pin!(hung);
    while !progress.has_content() {
        let next = tokio::select! {
            // Received content counts, even if the server hangs now.
            biased;
            next = body.next() => next,
            () = &mut hung => return Err(JobError::Dead(DeathReason::new("the worker hangs"))),
        };
        match next.transpose()? {
            Some(piece) => {
                buffered.push(piece.clone());
                progress.add(piece);
                if let Some(server_message) = progress.failure() {
                    // The server's message may contain its address, so it is only logged.
                    tracing::warn!(
                        worker = %server.id,
                        what = server.description,
                        server_message,
                        "a server failed before its answer began"
                    );
                    return Err(JobError::Dead(DeathReason::new("the server reported a failure")));
                }
            }
            None => {
                progress.end()?;
                return Ok(ForwardResponse {
                    status,
                    content_type,
                    body: stream::iter(buffered).map(Ok).boxed(),
                });
            }
        }
    }
    let body = stream::iter(buffered).map(Ok).chain(body).boxed();
    Ok(ForwardResponse { status, content_type, body })
}

/// The progress of an answer towards its first content.
enum Progress {
    /// A stream of events, and the bytes received so far.
    Stream { relay: Box<EventRelay>, bytes: usize },
    /// A JSON document. A short document is buffered completely.
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

    /// Returns the server's error message if it reported a failure before any content.
    fn failure(&self) -> Option<&str> {
        match self {
            Self::Stream { relay, .. } => relay.failure(),
            Self::Json { .. } | Self::Other { .. } => None,
        }
    }

    fn has_content(&self) -> bool {
        match self {
            Self::Stream { relay, bytes } => relay.has_content() || *bytes > MAX_BUFFERED_BYTES,
            Self::Json { bytes } => *bytes > MAX_BUFFERED_BYTES,
            Self::Other { bytes } => *bytes > 0,
        }
    }

    /// Returns an error if an answer that ended without content is incomplete.
    fn end(&mut self) -> Result<(), JobError> {
        if let Self::Stream { relay, .. } = self
            && relay.finish().is_none()
            && relay.ending(true) != Ending::Complete
        {
            return Err(JobError::Dead(DeathReason::new(
                "the server ended its answer before any content",
            )));
        }
        Ok(())
    }
}
