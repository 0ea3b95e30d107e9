//! Starts and stops headless vLLM engines as child processes.
//!
//! A [`LaunchSpec`] says what to start, an [`EngineProcess`] is what runs. The child and everything
//! that it starts form a process group of their own, which ends with the `EngineProcess`, and with
//! this process however that ends. With [`Keep`] it lives on for some time instead, for a later
//! process to take it over.

mod advice;
mod arguments;
mod complaints;
mod engine_flags;
mod group;
mod lines;
mod ports;
mod process;
mod server_flags;
mod spelling;
mod stage;
mod watchdog;

use std::path::PathBuf;
use std::time::Duration;

pub use self::arguments::{FlagPlace, place_of_flag};
pub(crate) use self::complaints::Complaint;
pub use self::lines::LastLines;
pub use self::ports::free_ports;
pub use self::process::{EngineProcess, ExitReport, end};
pub use self::server_flags::ServerFlag;

use crate::endpoints::SocketDir;
use crate::error::EngineError;

/// One start of one headless engine (`vllm serve --headless`).
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// Precedes its log lines, e.g. `engine_0`.
    pub name: String,
    /// The program `vllm`.
    pub vllm: PathBuf,
    /// The model's directory or name.
    pub model: PathBuf,
    /// The handshake address as bound, `tcp://host:port`.
    pub handshake: String,
    /// Capacity of the engine's receiver cache in GiB; 0 for none.
    pub receiver_cache_gb: f64,
    /// The addresses at which it publishes KV events; `None` for an engine that publishes none.
    pub kv_events: Option<KvEventEndpoints>,
    /// How it hands keys and values of prompts to other engines, or gets them
    /// (`--kv-transfer-config`); `None` for one that does neither, or as the user's flags say.
    pub kv_transfer: Option<serde_json::Value>,
    /// How it hands embeddings of media items to other engines, or gets them
    /// (`--ec-transfer-config`); `None` for one that does neither, or as the user's flags say.
    pub ec_transfer: Option<serde_json::Value>,
    /// The user's flags. Flags that are set here are refused.
    pub extra_args: Vec<String>,
    /// Environment variables besides those of this process.
    pub env: Vec<(String, String)>,
    /// The GPUs that it may see, as `CUDA_VISIBLE_DEVICES`.
    pub gpus: Option<Vec<u32>>,
    /// How it outlives this process; `None` for an engine that ends with it.
    pub keep: Option<Keep>,
}

/// An engine that outlives the process that has launched it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// How long it waits for another process to take it over, in whole seconds.
    pub time: Duration,
    /// The file that it prints to. It has the last 16 MiB or so.
    pub output: PathBuf,
}

/// The addresses at which an engine publishes and replays KV events, as it binds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventEndpoints {
    /// The PUB socket, for events as they happen.
    pub publish: String,
    /// The ROUTER socket, for events that a subscriber has missed.
    pub replay: String,
}

impl KvEventEndpoints {
    /// Unix sockets that only this user can reach. Never in use already, unlike ports.
    pub fn ipc(dir: &SocketDir) -> Self {
        Self { publish: dir.ipc("kv"), replay: dir.ipc("kv-replay") }
    }

    /// TCP ports on *all* interfaces: vLLM connects instead of binding when a host is named. The
    /// events contain the prompts' tokens, so keep the ports from strangers.
    pub fn tcp(port: u16, replay_port: u16) -> Self {
        Self { publish: format!("tcp://*:{port}"), replay: format!("tcp://*:{replay_port}") }
    }
}

impl LaunchSpec {
    /// A start without KV events, a receiver cache or flags of the user; set the fields to have
    /// them.
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
            keep: None,
        }
    }

    /// The arguments of `vllm`, the user's last.
    pub fn arguments(&self) -> Result<Vec<String>, EngineError> {
        arguments::build(self)
    }

    /// Starts it. Must be called within a tokio runtime.
    pub fn launch(&self) -> Result<EngineProcess, EngineError> {
        EngineProcess::start(self)
    }
}
