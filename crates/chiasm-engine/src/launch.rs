//! Headless vLLM engines as child processes.
//!
//! A [`LaunchSpec`] describes an engine, an [`EngineProcess`] is a running one. The child and its
//! descendants form their own process group. The group ends with the `EngineProcess`, or with this
//! process, even if that is killed. With [`Keep`] it outlives this process for some time, so that a
//! later one can take it over.

mod advice;
mod arguments;
mod engine_flags;
mod failure_log;
mod lines;
mod ports;
mod process;
mod process_group;
mod server_flags;
mod spelling;
mod stage;
mod watchdog;

use std::path::PathBuf;
use std::time::Duration;

pub use self::arguments::{FlagPlace, check_flags, nearest_flag, place_of_flag};
pub(crate) use self::failure_log::LoggedFailure;
pub use self::lines::LastLines;
pub use self::ports::free_ports;
pub use self::process::{EngineProcess, ExitReport, terminate};
pub use self::server_flags::ServerFlag;

use crate::endpoints::SocketDir;
use crate::error::EngineError;

/// The description of a headless engine to start (`vllm serve --headless`).
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The engine's name in log lines, e.g. `engine_0`.
    pub name: String,
    /// The program `vllm`.
    pub vllm: PathBuf,
    /// The model's directory or name.
    pub model: PathBuf,
    /// The bound handshake address, `tcp://host:port`.
    pub handshake: String,
    /// The capacity of the engine's receiver cache in GiB; 0 for none.
    pub receiver_cache_gb: f64,
    /// The addresses for publishing KV events; `None` for an engine that publishes none.
    pub kv_events: Option<KvEventEndpoints>,
    /// The configuration for sending prompts' keys and values to other engines, or getting them
    /// (`--kv-transfer-config`); `None` for none, or for that of the user's flags.
    pub kv_transfer: Option<serde_json::Value>,
    /// The configuration for sending media items' embeddings to other engines, or getting them
    /// (`--ec-transfer-config`); `None` for none, or for that of the user's flags.
    pub ec_transfer: Option<serde_json::Value>,
    /// The user's flags. Flags that Chiasm sets are refused.
    pub extra_args: Vec<String>,
    /// Environment variables in addition to those of this process.
    pub env: Vec<(String, String)>,
    /// The visible GPUs, as `CUDA_VISIBLE_DEVICES`, or as `--device-ids` in a group; `None` for
    /// those of this process.
    pub gpus: Option<Vec<String>>,
    /// The engine's place in a group of engines; `None` for an engine on its own.
    pub place: Option<GroupPlace>,
    /// The settings of an engine that outlives this process; `None` for one that ends with it.
    pub keep: Option<Keep>,
}

/// The place of an engine in a group of engines that step together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPlace {
    /// The number of engines in the group (`--data-parallel-size`).
    pub size: u16,
    /// The engine's rank, from 0 (`--data-parallel-rank`).
    pub rank: u16,
}

/// The settings of an engine that outlives the process that launched it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The time that the engine waits to be taken over, in whole seconds.
    pub time: Duration,
    /// The file for the engine's output. It keeps about the last 16 MiB.
    pub output: PathBuf,
}

/// The addresses that an engine binds to publish and replay KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventEndpoints {
    /// The PUB socket, for new events.
    pub publish: String,
    /// The ROUTER socket, for events that a subscriber has missed.
    pub replay: String,
}

impl KvEventEndpoints {
    /// Creates addresses of Unix sockets that only this user can reach. Unlike ports, they are
    /// never in use already.
    pub fn ipc(dir: &SocketDir) -> Self {
        Self { publish: dir.ipc("kv"), replay: dir.ipc("kv-replay") }
    }

    /// Creates addresses like [`ipc`](Self::ipc) for an engine of a group. On ranks above 0 vLLM
    /// appends `_dp` and the rank to the path, which must contain `inproc`; the engine reports the
    /// final path (`ZmqEventPublisher.offset_endpoint_port` in `vllm/distributed/kv_events.py`).
    /// `re` is short for `replay`: with the rank, names have 16 bytes at most.
    pub fn ipc_in_group(dir: &SocketDir) -> Self {
        Self { publish: dir.ipc("inproc-kv"), replay: dir.ipc("inproc-re") }
    }

    /// Creates addresses of TCP ports on *all* interfaces: vLLM connects instead of binding if the
    /// address names a host. The events contain the prompts' tokens, so protect the ports.
    pub fn tcp(port: u16, replay_port: u16) -> Self {
        Self { publish: format!("tcp://*:{port}"), replay: format!("tcp://*:{replay_port}") }
    }
}

impl LaunchSpec {
    /// Creates a description without KV events, receiver cache and user flags. Set the fields to
    /// add them.
    pub fn new(
        name: &str,
        vllm: impl Into<PathBuf>,
        model: impl Into<PathBuf>,
        handshake: &str,
    ) -> Self {
        Self {
            name: name.to_owned(),
            vllm: vllm.into(),
            model: model.into(),
            handshake: handshake.to_owned(),
            receiver_cache_gb: 0.0,
            kv_events: None,
            kv_transfer: None,
            ec_transfer: None,
            extra_args: Vec::new(),
            env: Vec::new(),
            gpus: None,
            place: None,
            keep: None,
        }
    }

    /// Returns the arguments of `vllm`, the user's last.
    ///
    /// # Errors
    /// [`EngineError::OwnedFlag`] for a flag that Chiasm sets, [`EngineError::HandshakeAddress`]
    /// for a handshake address that vLLM does not accept.
    pub fn arguments(&self) -> Result<Vec<String>, EngineError> {
        arguments::build(self)
    }

    /// Starts the engine. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The errors of [`arguments`](Self::arguments), and [`EngineError::Spawn`] if the program
    /// can't be started.
    pub fn launch(&self) -> Result<EngineProcess, EngineError> {
        EngineProcess::start(self)
    }
}
