//! Errors of starting, reaching and using an engine.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::wire::WireError;

/// An error of starting, reaching or using an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request would break the engine, so it was not sent. The caller's fault.
    #[error("{field}: {message}")]
    InvalidRequest {
        /// The field of the request, e.g. `sampling_params.max_tokens` or
        /// `mm_features[1].mm_position`.
        field: String,
        /// The fault of the field.
        message: String,
    },
    /// The request has media items without data that the engine does not hold. Nothing was sent:
    /// submit it again with their data.
    #[error("{} media items need their data", keys.len())]
    NeedsData {
        /// The `mm_hash`es of the items.
        keys: Vec<String>,
    },
    /// The engine died before the request was sent to it.
    #[error("the engine was gone: {cause}")]
    NotSent {
        /// The cause of the death.
        cause: DeathCause,
    },
    /// The engine is dead. Requests without an answer so far can be sent to another engine.
    #[error("the engine is gone: {cause}")]
    Dead {
        /// The cause of the death.
        cause: DeathCause,
    },
    /// Too many outputs of the request were waiting to be read, so it was aborted.
    #[error("the answer was aborted: too much of it was unread")]
    Unread,
    /// The engine ended the request without a finish reason.
    #[error("the engine ended the request without a result")]
    Ended,
    /// A method of the engine failed.
    #[error("the engine's method {method} failed: {message}")]
    Utility {
        /// The method.
        method: String,
        /// The engine's error message.
        message: String,
    },
    /// A method of the engine did not return in time.
    #[error("the engine's method {method} did not answer within {after:?}")]
    UtilityTimeout {
        /// The method.
        method: String,
        /// The timeout.
        after: Duration,
    },
    /// The engine did not become ready in time.
    #[error("no engine became ready on {handshake} within {after:?}")]
    ReadyTimeout {
        /// The handshake address.
        handshake: String,
        /// The timeout.
        after: Duration,
    },
    /// The engine runs a version of vLLM that is not supported.
    #[error("the engine runs vLLM {found}, which is not supported; use {tested}")]
    Version {
        /// The engine's version.
        found: String,
        /// The versions that Chiasm was tested with, as `0.32 to 0.33`.
        tested: String,
    },
    /// The engine can't be in its group.
    #[error("the engine can't be in its group: {0}")]
    Group(String),
    /// A message of the handshake can't be decoded.
    #[error("the engine's handshake is not understood: {0}")]
    Handshake(#[from] WireError),
    /// The client can't listen on an address.
    #[error("can't listen on {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// A directory for the engine's sockets can't be created.
    #[error("can't make a private directory in {parent} for the engine's sockets: {source}")]
    PrivateDir {
        /// The parent directory.
        parent: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A socket's path exceeds the system's limit.
    #[error("the socket path {path} is too long, set TMPDIR to a shorter path")]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The state folder can't be used.
    #[error("can't use {path} of the state folder: {source}; give another folder with --state-dir")]
    State {
        /// The folder, or the file in it.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A flag for vLLM that Chiasm sets itself.
    #[error("{flag} can't be passed to vLLM: {instead}")]
    OwnedFlag {
        /// The flag as given, without a value.
        flag: String,
        /// The alternative.
        instead: &'static str,
    },
    /// A flag for vLLM with a name that is close to that of a known one.
    #[error("vLLM has no flag {flag}; did you mean {nearest}?")]
    MistypedFlag {
        /// The flag as given, without a value.
        flag: String,
        /// The known flag.
        nearest: &'static str,
    },
    /// A handshake address that vLLM does not accept.
    #[error("{address} is no handshake address for vLLM, use tcp://host:port")]
    HandshakeAddress {
        /// The address.
        address: String,
    },
    /// A program can't be started.
    #[error("can't start {program}: {source}")]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No free port was found.
    #[error("can't find a free port: {0}")]
    Port(io::Error),
}

/// The cause of an engine's death, as far as its client is concerned.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeathCause {
    /// The engine sent ENGINE_CORE_DEAD.
    #[error("it reported a fatal error")]
    Reported,
    /// The engine's connection was lost.
    #[error("its connection was lost")]
    Disconnected,
    /// A message could not be sent to the engine.
    #[error("sending to it failed: {0}")]
    SendFailed(String),
    /// A message of the engine could not be decoded, so its outputs are no longer reliable.
    #[error("its message is not understood: {0}")]
    Protocol(WireError),
    /// The engine's process ended. The text is the report of the process's owner.
    #[error("its process ended: {0}")]
    Exited(String),
    /// The engine's group ended because of another engine. The text is the reason.
    #[error("its group ended: {0}")]
    Group(Arc<str>),
    /// A task of the engine's connection panicked.
    #[error("a task of its connection failed; the log says how")]
    TaskFailed,
    /// The frontend dropped the last client.
    #[error("its client was closed")]
    Closed,
}

impl DeathCause {
    /// Returns the first line of the cause, without the last lines of the engine's log.
    pub(crate) fn first_line(&self) -> String {
        let text = match self {
            Self::Exited(report) => report.clone(),
            cause => cause.to_string(),
        };
        first_line(&text).to_owned()
    }
}

/// Returns the first line of a report about an engine's end.
pub(crate) fn first_line(report: &str) -> &str {
    report.lines().next().unwrap_or_default()
}

impl EngineError {
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { field: field.into(), message: message.into() }
    }

    /// Returns `true` if the engine is dead, so that another one can be tried.
    pub fn is_dead(&self) -> bool {
        matches!(self, Self::Dead { .. } | Self::NotSent { .. })
    }
}
