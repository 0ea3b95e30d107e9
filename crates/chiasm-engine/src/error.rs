//! Everything that can go wrong between a frontend and an engine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::wire::WireError;

/// Why an engine could not be started, reached or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request would break the engine, so it was not sent. The caller's fault.
    #[error("{field}: {message}")]
    InvalidRequest {
        /// The field of the request, e.g. `sampling_params.max_tokens` or
        /// `mm_features[1].mm_position`.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// Media items came without data that the engine does not hold. Nothing was sent: try again
    /// with their data.
    #[error("{} media items need their data", keys.len())]
    NeedsData {
        /// Their `mm_hash`es.
        keys: Vec<String>,
    },
    /// The engine was gone before the request was sent to it.
    #[error("the engine was gone: {cause}")]
    NotSent {
        /// How it went.
        cause: DeathCause,
    },
    /// The engine is gone. What has not answered yet can be sent to another one.
    #[error("the engine is gone: {cause}")]
    Dead {
        /// How it went.
        cause: DeathCause,
    },
    /// Too many outputs of the request were waiting to be read, so it was aborted.
    #[error("too much of the answer was waiting to be read")]
    Unread,
    /// The engine has ended a request without saying how.
    #[error("the engine ended the request without a result")]
    Ended,
    /// A method of the engine failed.
    #[error("the engine's method {method} failed: {message}")]
    Utility {
        /// The method.
        method: String,
        /// The engine's words.
        message: String,
    },
    /// A method of the engine did not answer in time.
    #[error("the engine's method {method} did not answer within {after:?}")]
    UtilityTimeout {
        /// The method.
        method: String,
        /// The time that it had.
        after: Duration,
    },
    /// The engine did not become ready in time.
    #[error("no engine became ready on {handshake} within {after:?}")]
    ReadyTimeout {
        /// The handshake address.
        handshake: String,
        /// The time that it had.
        after: Duration,
    },
    /// The engine runs a version of vLLM that is not served.
    #[error("the engine runs vLLM {found}, which is not supported; use {tested}")]
    Version {
        /// Its version.
        found: String,
        /// The versions that Chiasm was tested with, as `0.32 to 0.33`.
        tested: String,
    },
    /// The engine says something that this crate does not understand.
    #[error("the engine's handshake is not understood: {0}")]
    Handshake(#[from] WireError),
    /// An address can't be listened on.
    #[error("can't listen on {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// A directory for the engine's sockets can't be made.
    #[error("can't make a private directory in {parent} for the engine's sockets: {source}")]
    PrivateDir {
        /// Where it was to be.
        parent: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A socket's path does not fit the system's limit.
    #[error("the socket path {path} is too long, set TMPDIR to a shorter path")]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// What is known of engines can't be kept.
    #[error("can't use {path} of the state folder: {source}; give another folder with --state-dir")]
    State {
        /// The folder, or the file in it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A flag for vLLM that is set by Chiasm itself.
    #[error("{flag} can't be passed to vLLM: {instead}")]
    OwnedFlag {
        /// The flag as given, without a value.
        flag: String,
        /// What to do instead.
        instead: &'static str,
    },
    /// An engine is started with a handshake address that it can't take.
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
        /// Why.
        source: io::Error,
    },
    /// No free port was found.
    #[error("can't find a free port: {0}")]
    Port(io::Error),
}

/// How an engine went.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeathCause {
    /// It said ENGINE_CORE_DEAD.
    #[error("it reported a fatal error")]
    Reported,
    /// It closed its connection.
    #[error("its connection was lost")]
    Disconnected,
    /// It could not be sent to.
    #[error("sending to it failed: {0}")]
    SendFailed(String),
    /// It said something that this crate does not understand, so what it says can't be told apart
    /// any more.
    #[error("its message is not understood: {0}")]
    Protocol(WireError),
    /// Its process ended, in the words of whoever watched it.
    #[error("its process ended: {0}")]
    Exited(String),
    /// A task that served its connection has panicked.
    #[error("a task of its connection failed; the log says how")]
    TaskFailed,
    /// The frontend has let go of it.
    #[error("its client was closed")]
    Closed,
}

impl EngineError {
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { field: field.into(), message: message.into() }
    }

    /// Whether the engine is gone, so that another one can be tried.
    pub fn is_dead(&self) -> bool {
        matches!(self, Self::Dead { .. } | Self::NotSent { .. })
    }
}
