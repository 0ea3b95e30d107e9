//! What is written down of one engine.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process_id::ProcessId;

/// The version of the file. Another one is not read: its engines are then lost to this frontend,
/// and no more.
const VERSION: u32 = 1;

/// One engine and how to be its frontend again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(crate) version: u32,
    /// The model's name as its frontend was told it.
    pub model: String,
    /// The address where it says hello.
    pub handshake: String,
    /// The address that it takes requests from.
    pub input: String,
    /// The address that it sends outputs to.
    pub output: String,
    /// The folder of Unix sockets, which the engine's own may be in too.
    pub sockets: PathBuf,
    /// What it said when it became ready (msgpack of `EngineCoreReadyResponse`); `None` before.
    pub report: Option<Vec<u8>>,
    /// Its version of vLLM, once it is ready.
    pub vllm_version: Option<String>,
    /// The size of its receiver cache as its frontend was told it.
    pub receiver_cache_bytes: Option<u64>,
    /// When it became ready, or was started if it is not, in seconds since the epoch.
    pub since: u64,
    /// The process that is or was its frontend last.
    pub frontend: ProcessId,
    /// Its processes, if its frontend has launched them; `None` if somebody else has.
    pub launched: Option<Launched>,
}

/// An engine that outlives the frontend that has launched it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launched {
    /// Its first process, which leads the group of all.
    pub process: ProcessId,
    /// The process that ends it some time after its frontend; `None` where there is none.
    pub watchdog: Option<ProcessId>,
}

/// The fault of a file that is to be a record.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    /// It is not the JSON of a record.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Another Chiasm has written it.
    #[error("it has version {0}, this Chiasm knows {VERSION}")]
    Version(u32),
}

impl Record {
    /// An engine that is not ready yet, of a frontend that is this process.
    pub fn new(model: &str, handshake: &str, input: &str, output: &str, sockets: &Path) -> Self {
        Self {
            version: VERSION,
            model: model.to_owned(),
            handshake: handshake.to_owned(),
            input: input.to_owned(),
            output: output.to_owned(),
            sockets: sockets.to_owned(),
            report: None,
            vllm_version: None,
            receiver_cache_bytes: None,
            since: 0,
            frontend: ProcessId::this(),
            launched: None,
        }
    }

    /// Whether nobody can come back: it has told which processes it has, and they have ended.
    pub fn is_over(&self) -> bool {
        self.launched.is_some_and(|launched| !launched.process.is_alive())
    }

    /// JSON.
    pub(super) fn encode(&self) -> Vec<u8> {
        // Texts and numbers: nothing in it could fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Parses a file.
    pub(super) fn decode(text: &[u8]) -> Result<Self, RecordError> {
        let record: Self = serde_json::from_slice(text)?;
        match record.version {
            VERSION => Ok(record),
            other => Err(RecordError::Version(other)),
        }
    }
}
