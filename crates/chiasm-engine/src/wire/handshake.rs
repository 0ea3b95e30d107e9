//! How an engine and a frontend find each other.
//!
//! 1. engine → handshake socket: [`Hello`] with status HELLO
//! 2. frontend → handshake socket: [`InitMessage`], where to connect to
//! 3. engine → input socket: [`EngineReady`], what it became
//! 4. engine → handshake socket: [`Hello`] with status READY
//!
//! 3 and 4 come in either order. Each message is one msgpack map, after the engine's identity on
//! ROUTER sockets.

use bytes::Bytes;
use rmpv::Value;

use super::codec::{Wire, wire_map};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// Identity of the engine with this data-parallel rank: the rank as u16, little-endian
/// (`EngineCoreProc.__init__`).
pub fn identity(rank: u16) -> [u8; 2] {
    rank.to_le_bytes()
}

/// The rank that an identity names; `None` for an identity that is not one of an engine.
pub fn rank(identity: &[u8]) -> Option<u16> {
    identity.try_into().ok().map(u16::from_le_bytes)
}

/// HELLO and READY (`startup_handshake` and `_perform_handshake` in `vllm/v1/engine/core.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// `HELLO` or `READY`.
    pub status: String,
    /// Started by the frontend's own process.
    pub local: bool,
    /// Started by `vllm serve --headless`.
    pub headless: bool,
}

wire_map!(Hello { status = "status", local = "local", headless = "headless" });

impl Hello {
    /// The first message of a headless engine.
    #[expect(
        clippy::self_named_constructors,
        reason = "the message and its status have one name in vLLM"
    )]
    pub fn hello() -> Self {
        Self { status: "HELLO".to_owned(), local: false, headless: true }
    }

    /// The last message of the handshake.
    pub fn ready() -> Self {
        Self { status: "READY".to_owned(), ..Self::hello() }
    }

    /// Whether this is HELLO.
    pub fn is_hello(&self) -> bool {
        self.status == "HELLO"
    }

    /// Whether this is READY.
    pub fn is_ready(&self) -> bool {
        self.status == "READY"
    }

    /// Encodes the message as msgpack. On ROUTER sockets the engine's identity goes before this
    /// frame.
    pub fn encode(&self) -> Bytes {
        one_frame(self)
    }

    /// Decodes the message's one frame, without the identity that precedes it on ROUTER sockets.
    pub fn decode(frame: &Bytes) -> Result<Self, WireError> {
        from_frame(frame, "handshake status")
    }
}

/// INIT, which tells an engine the sockets to connect to (`EngineHandshakeMetadata` in
/// `vllm/v1/engine/utils.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InitMessage {
    /// The frontend's sockets.
    pub addresses: Addresses,
    /// Overrides of the engine's parallel configuration; empty for an engine on its own.
    pub parallel_config: Vec<(String, Value)>,
}

wire_map!(InitMessage { addresses = "addresses", parallel_config = "parallel_config" });

/// The frontend's sockets, as `ipc://` or `tcp://` addresses (`EngineZmqAddresses` in
/// `vllm/v1/engine/utils.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// ROUTER sockets; the engine connects to all.
    pub inputs: Vec<String>,
    /// PULL sockets, by `client_index`.
    pub outputs: Vec<String>,
    /// Data parallelism with a coordinator only.
    pub coordinator_input: Option<String>,
    /// Data parallelism with a coordinator only.
    pub coordinator_output: Option<String>,
    /// Data parallelism with a coordinator only.
    pub frontend_stats_publish_address: Option<String>,
}

wire_map!(Addresses {
    inputs = "inputs",
    outputs = "outputs",
    coordinator_input = "coordinator_input",
    coordinator_output = "coordinator_output",
    frontend_stats_publish_address = "frontend_stats_publish_address",
});

impl InitMessage {
    /// The message of a frontend with one input and one output socket, to an engine on its own.
    pub fn new(input: &str, output: &str) -> Self {
        let addresses = Addresses {
            inputs: vec![input.to_owned()],
            outputs: vec![output.to_owned()],
            ..Addresses::default()
        };
        Self { addresses, parallel_config: Vec::new() }
    }

    /// Encodes the message as msgpack. On ROUTER sockets the engine's identity goes before this
    /// frame.
    pub fn encode(&self) -> Bytes {
        one_frame(self)
    }

    /// Decodes the message's one frame, without the identity that precedes it on ROUTER sockets.
    pub fn decode(frame: &Bytes) -> Result<Self, WireError> {
        from_frame(frame, "init")
    }
}

/// What an engine became after its start (`EngineCoreReadyResponse` in
/// `vllm/v1/engine/__init__.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReady {
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Blocks of its KV cache.
    pub num_gpu_blocks: u64,
    /// Tokens per block as configured.
    pub block_size: u32,
    /// Data parallelism with a coordinator only.
    pub dp_stats_address: Option<String>,
    /// The model's element type, e.g. `torch.bfloat16` or `bfloat16`.
    pub dtype: String,
    /// Its version of vLLM.
    pub vllm_version: String,
    /// Number of its processes that compute.
    pub world_size: u32,
    /// Number of engines that share the work.
    pub data_parallel_size: u32,
    /// GPUs that share each layer.
    pub tensor_parallel_size: u32,
    /// Groups of layers.
    pub pipeline_parallel_size: u32,
    /// GPUs that share a context.
    pub decode_context_parallel_size: u32,
    /// Its place among the engines that share the work, from 0.
    pub data_parallel_rank: u32,
    /// Requests that can run at once.
    pub max_num_seqs: u32,
    /// Tokens that one step can compute.
    pub max_num_batched_tokens: u32,
    /// New at each start.
    pub instance_id: String,
    /// Whether it takes LoRA requests.
    pub supports_lora: bool,
    /// Number of LoRA adapters that one batch can use.
    pub max_loras: u32,
    /// Models with state-space layers only.
    pub mamba_block_size: Option<u32>,
    /// Capacity of its KV cache in tokens.
    pub kv_cache_size_tokens: Option<u64>,
    /// Requests of `max_model_len` that fit its KV cache.
    pub kv_cache_max_concurrency: Option<f64>,
    /// The sockets of its KV events, if it publishes them.
    pub kv_events_config: Option<KvEventsConfig>,
    /// How weights are replaced.
    pub weight_transfer_backend: Option<String>,
    /// Whether it can be put to sleep.
    pub enable_sleep_mode: bool,
    /// Whether a draft model's weights can be replaced.
    pub supports_draft_weight_updates: bool,
    /// Tokens per block as its KV events count them.
    pub effective_attention_block_size: Option<u32>,
}

wire_map!(EngineReady {
    max_model_len = "max_model_len",
    num_gpu_blocks = "num_gpu_blocks",
    block_size = "block_size",
    dp_stats_address = "dp_stats_address",
    dtype = "dtype",
    vllm_version = "vllm_version",
    world_size = "world_size",
    data_parallel_size = "data_parallel_size",
    tensor_parallel_size = "tensor_parallel_size",
    pipeline_parallel_size = "pipeline_parallel_size",
    decode_context_parallel_size = "decode_context_parallel_size",
    data_parallel_rank = "data_parallel_rank",
    max_num_seqs = "max_num_seqs",
    max_num_batched_tokens = "max_num_batched_tokens",
    instance_id = "instance_id",
    supports_lora = "supports_lora",
    max_loras = "max_loras",
    mamba_block_size = "mamba_block_size",
    kv_cache_size_tokens = "kv_cache_size_tokens",
    kv_cache_max_concurrency = "kv_cache_max_concurrency",
    kv_events_config = "kv_events_config",
    weight_transfer_backend = "weight_transfer_backend",
    enable_sleep_mode = "enable_sleep_mode",
    supports_draft_weight_updates = "supports_draft_weight_updates",
    effective_attention_block_size = "effective_attention_block_size",
});

impl EngineReady {
    /// Tokens per block of the prefix cache and of KV events.
    pub fn cache_block_size(&self) -> u32 {
        self.effective_attention_block_size.unwrap_or(self.block_size)
    }

    /// Encodes the message as msgpack. On ROUTER sockets the engine's identity goes before this
    /// frame.
    pub fn encode(&self) -> Bytes {
        one_frame(self)
    }

    /// Decodes the message's one frame, without the identity. Refuses a report that lacks what a
    /// frontend can't do without.
    pub fn decode(frame: &Bytes) -> Result<Self, WireError> {
        let ready: Self = from_frame(frame, "EngineCoreReadyResponse")?;
        for (field, missing) in [
            ("vllm_version", ready.vllm_version.is_empty()),
            ("max_model_len", ready.max_model_len == 0),
            ("block_size", ready.cache_block_size() == 0),
        ] {
            if missing {
                return Err(Problem::Missing.at(field));
            }
        }
        Ok(ready)
    }
}

/// Whether and at which sockets an engine publishes KV events (`KVEventsConfig` in
/// `vllm/config/kv_events.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Whether events are published at all.
    pub enable_kv_cache_events: bool,
    /// `zmq` or `null`.
    pub publisher: String,
    /// The PUB socket as bound, e.g. `tcp://*:5557`.
    pub endpoint: String,
    /// The ROUTER socket that replays, as bound.
    pub replay_endpoint: Option<String>,
    /// Batches that can be replayed.
    pub buffer_steps: u64,
    /// High-water mark of the PUB socket.
    pub hwm: u64,
    /// Batches that wait for being published.
    pub max_queue_size: u64,
    /// Topic of every message.
    pub topic: String,
}

wire_map!(KvEventsConfig {
    enable_kv_cache_events = "enable_kv_cache_events",
    publisher = "publisher",
    endpoint = "endpoint",
    replay_endpoint = "replay_endpoint",
    buffer_steps = "buffer_steps",
    hwm = "hwm",
    max_queue_size = "max_queue_size",
    topic = "topic",
});

fn one_frame(message: &impl Wire) -> Bytes {
    let mut to = Writer::default();
    message.write(&mut to);
    to.into_frames().swap_remove(0)
}

fn from_frame<T: Wire>(frame: &Bytes, name: &'static str) -> Result<T, WireError> {
    T::read(&mut Reader::new(std::slice::from_ref(frame))?).named(name)
}
