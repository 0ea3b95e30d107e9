//! Errors that end a simulated engine.

use std::io;
use std::path::PathBuf;

use chiasm_engine::wire::WireError;

/// An error of starting or running a simulated engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The configuration describes an engine that can't exist.
    #[error("bad configuration: {0}")]
    Config(String),
    /// A socket for KV events could not be bound.
    #[error("could not bind {endpoint} for KV events, choose another address: {source}")]
    Bind {
        /// The configured address.
        endpoint: String,
        /// The socket's error.
        source: zeromq::ZmqError,
    },
    /// The side channel for prompts could not be bound.
    #[error("could not bind a side channel for prompts: {0}")]
    SideChannel(io::Error),
    /// A file for times could not be created.
    #[error("could not create the log {path}: {source}; give a file in an existing folder")]
    MomentLog {
        /// The configured file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The frontend did not answer HELLO in time.
    #[error("no INIT from the frontend at {handshake} within {seconds} s")]
    NoInit {
        /// The configured address.
        handshake: String,
        /// The configured limit.
        seconds: u64,
    },
    /// The frontend went away before the handshake was complete.
    #[error("lost the frontend at {0} during the handshake")]
    HandshakeLost(String),
    /// The frontend's INIT is malformed.
    #[error("bad INIT from the frontend: {0}")]
    Init(#[from] WireError),
    /// INIT lacks a part of the engine's group, or the part is malformed.
    #[error("bad group in INIT from the frontend: {0}")]
    Group(&'static str),
    /// The coordinator of the engine's group went away.
    #[error("lost the coordinator of the group at {0}")]
    CoordinatorLost(String),
    /// The engines of a group can't reach each other.
    #[error("could not reach the other engines of the group: {0}")]
    Collective(io::Error),
    /// The frontend sent something that kills an engine, or wrote to a slot that it had lent. The
    /// engine has sent ENGINE_CORE_DEAD.
    #[error("died: {0}")]
    Died(String),
    /// [`Faults`](crate::Faults) ended the engine.
    #[error("a configured fault ended the engine")]
    Fault,
}
