//! The record of one engine.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process_id::ProcessId;

/// The version of the file format. Files of other versions are ignored; this frontend then can't
/// take over their engines.
const VERSION: u32 = 1;

/// The information with which a frontend can take over an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(crate) version: u32,
    /// The model's name, as given to the frontend.
    pub model: String,
    /// The handshake address.
    pub handshake: String,
    /// The address from which the engine receives requests.
    pub input: String,
    /// The address to which the engine sends outputs.
    pub output: String,
    /// The folder of Unix sockets, which may include the engine's own.
    pub sockets: PathBuf,
    /// The engine's ready report (msgpack of `EngineCoreReadyResponse`); `None` before it is ready.
    pub report: Option<Vec<u8>>,
    /// The engine's version of vLLM, once it is ready.
    pub vllm_version: Option<String>,
    /// The size of the receiver cache, as given to the frontend.
    pub receiver_cache_bytes: Option<u64>,
    /// The time at which the engine became ready, in seconds since the epoch. Only valid with a
    /// `report`.
    pub since: u64,
    /// The process of the current or last frontend.
    pub frontend: ProcessId,
    /// The engine's processes, if its frontend launched them; `None` for an attached engine.
    pub launched: Option<Launched>,
}

/// The processes of an engine that outlives the frontend that launched it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launched {
    /// The engine's first process, which leads its process group.
    pub process: ProcessId,
    /// The process that ends the engine some time after its frontend; `None` if there is none.
    pub watchdog: Option<ProcessId>,
}

/// An error of decoding a record.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    /// The file is not the JSON of a record.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Another version of Chiasm wrote the file.
    #[error("it has version {0}, this Chiasm knows {VERSION}")]
    Version(u32),
}

impl Record {
    /// Creates the record of an engine that is not ready yet, with this process as its frontend.
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
            frontend: ProcessId::current(),
            launched: None,
        }
    }

    /// Returns `true` if the engine was launched and its process has ended.
    pub fn has_ended(&self) -> bool {
        self.launched.is_some_and(|launched| !launched.process.is_alive())
    }

    /// Encodes the record as JSON.
    pub(super) fn encode(&self) -> Vec<u8> {
        // The record has only strings and numbers, whose encoding can't fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes a record.
    pub(super) fn decode(text: &[u8]) -> Result<Self, RecordError> {
        let record: Self = serde_json::from_slice(text)?;
        match record.version {
            VERSION => Ok(record),
            other => Err(RecordError::Version(other)),
        }
    }
}
