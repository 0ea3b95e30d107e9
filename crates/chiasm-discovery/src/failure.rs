//! Why a server does not answer: logged, never returned, as it is asked again whatever it is.

use std::error::Error;
use std::time::Duration;

use crate::DiscoveryError;

/// Why a server was not asked successfully.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// No connection, or one that was lost.
    #[error("the connection failed: {0}")]
    Unreachable(String),
    /// Connected, and nothing comes.
    #[error("it says nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// Another status than success.
    #[error("it answers {status}: {message}")]
    Refused {
        /// The status.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// An answer that is none.
    #[error("its answer can't be understood: {0}")]
    Malformed(String),
    /// More bytes than an answer may have.
    #[error("its answer is longer than {} MiB", .0 >> 20)]
    TooLong(usize),
    /// A stream that should go on ended.
    #[error("it ended the watch")]
    Ended,
    /// The changes since the list are no longer kept by the server, or were not told: a new list is
    /// needed.
    #[error("the changes since the last list are not to be had: {0}")]
    Outdated(String),
    /// The token can't be read.
    #[error("the token can't be read: {0}")]
    Token(#[source] std::io::Error),
    /// The files of TLS can't be used any more.
    #[error(transparent)]
    Settings(#[from] DiscoveryError),
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        // The innermost error: the outer ones repeat the URL.
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
