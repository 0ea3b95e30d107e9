//! Failures of a server. They are logged and not returned, because each of them is retried.

use std::error::Error;
use std::time::Duration;

use crate::DiscoveryError;

/// A failure of a server, or of a request to it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The connection could not be opened, or was lost.
    #[error("the connection failed: {0}")]
    Unreachable(String),
    /// The server sent nothing within this time.
    #[error("no data for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The server answered with an error status.
    #[error("the server returned {status}: {message}")]
    Refused {
        /// The status.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// The answer is invalid.
    #[error("malformed answer: {0}")]
    Malformed(String),
    /// The answer is longer than this number of bytes.
    #[error("the answer is longer than {} MiB", .0 >> 20)]
    TooLong(usize),
    /// The server ended a stream.
    #[error("the server ended the watch")]
    Ended,
    /// Changes since the last list are missing: the server no longer has them, or did not send
    /// them. A new list is needed.
    #[error("changes since the last list are missing: {0}")]
    Outdated(String),
    /// The token can't be read.
    #[error("the token can't be read: {0}")]
    Token(#[source] std::io::Error),
    /// The files for TLS became unusable.
    #[error(transparent)]
    Settings(#[from] DiscoveryError),
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        // The outer errors only add the URL.
        let mut cause: &(dyn Error + 'static) = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Self::Unreachable(cause.to_string())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed(error.to_string())
    }
}
