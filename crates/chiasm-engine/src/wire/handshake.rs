//! The messages of the handshake between an engine and a frontend.
//!
//! 1. engine → handshake socket: [`Hello`] with status HELLO
//! 2. frontend → handshake socket: [`InitMessage`], the addresses to connect to
//! 3. engine → input socket: [`EngineReady`], the engine's properties
//! 4. engine → handshake socket: [`Hello`] with status READY
//!
//! 3 and 4 come in either order. Each message is one msgpack map; on ROUTER sockets the engine's
//! identity precedes it.

use bytes::Bytes;
use rmpv::Value;

use super::codec::{Wire, wire_map};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// Returns the ZMQ identity of the engine with this data-parallel rank: the rank as u16,
/// little-endian (`EngineCoreProc.__init__`).
pub fn identity(rank: u16) -> [u8; 2] {
    rank.to_le_bytes()
}

/// Returns the rank that an identity encodes; `None` if it is not an engine's identity.
pub fn rank(identity: &[u8]) -> Option<u16> {
    identity.try_into().ok().map(u16::from_le_bytes)
}

/// HELLO and READY (`startup_handshake` and `_perform_handshake` in `vllm/v1/engine/core.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// `HELLO` or `READY`.
    pub status: String,
    /// `true` for an engine that the frontend's process started.
    pub local: bool,
    /// `true` for an engine that `vllm serve --headless` started.
    pub headless: bool,
    /// A hash of the engine's parallel configuration, only in READY of an engine in a group. It is
    /// equal in all engines of a group.
    pub parallel_config_hash: Option<String>,
}

impl Wire for Hello {
    fn write(&self, to: &mut Writer) {
        let Self { status, local, headless, parallel_config_hash } = self;
        to.map(3 + usize::from(parallel_config_hash.is_some()));
        to.str("status");
        status.write(to);
        to.str("local");
        local.write(to);
        to.str("headless");
        headless.write(to);
        if parallel_config_hash.is_some() {
            to.str("parallel_config_hash");
            parallel_config_hash.write(to);
        }
    }

    wire_map!(@read
        status = "status",
        local = "local",
        headless = "headless",
        parallel_config_hash = "parallel_config_hash"
    );
}

impl Hello {
    /// Creates the first message of a headless engine.
    #[expect(
        clippy::self_named_constructors,
        reason = "the message and its status have one name in vLLM"
    )]
    pub fn hello() -> Self {
        Self {
            status: "HELLO".to_owned(),
            local: false,
            headless: true,
            parallel_config_hash: None,
        }
    }

    /// Creates the last message of the handshake.
    pub fn ready() -> Self {
        Self { status: "READY".to_owned(), ..Self::hello() }
    }

    /// Returns `true` if the status is HELLO.
    pub fn is_hello(&self) -> bool {
        self.status == "HELLO"
    }

    /// Returns `true` if the status is READY.
    pub fn is_ready(&self) -> bool {
        self.status == "READY"
    }

    /// Encodes the message as one msgpack frame. On ROUTER sockets the engine's identity precedes
    /// it.
    pub fn encode(&self) -> Bytes {
        to_frame(self)
    }

    /// Decodes the message from its frame. The identity that precedes it on ROUTER sockets must be
    /// removed.
    pub fn decode(frame: &Bytes) -> Result<Self, WireError> {
        from_frame(frame, "handshake status")
    }
}

/// INIT, with the addresses of the sockets that an engine connects to (`EngineHandshakeMetadata`
/// in `vllm/v1/engine/utils.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InitMessage {
    /// The frontend's sockets.
    pub addresses: Addresses,
    /// Overrides of the engine's parallel configuration; empty without data parallelism.
    pub parallel_config: Vec<(String, Value)>,
}

wire_map!(InitMessage { addresses = "addresses", parallel_config = "parallel_config" });

/// The frontend's sockets, as `ipc://` or `tcp://` addresses (`EngineZmqAddresses` in
/// `vllm/v1/engine/utils.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The ROUTER sockets; the engine connects to all.
    pub inputs: Vec<String>,
    /// The PULL sockets, by `client_index`.
    pub outputs: Vec<String>,
    /// The XPUB socket of a group's coordinator, from which its engines get messages.
    pub coordinator_input: Option<String>,
    /// The PULL socket of a group's coordinator, to which its engines send messages.
    pub coordinator_output: Option<String>,
    /// Not used: vLLM's coordinator tells its frontends the load of engines there.
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
    /// Creates the message of a frontend with one input and one output socket, to an engine that
    /// is in no group.
    pub fn new(input: &str, output: &str) -> Self {
        let addresses = Addresses {
            inputs: vec![input.to_owned()],
            outputs: vec![output.to_owned()],
            ..Addresses::default()
        };
        Self { addresses, parallel_config: Vec::new() }
    }

    /// Encodes the message as one msgpack frame. On ROUTER sockets the engine's identity precedes
    /// it.
    pub fn encode(&self) -> Bytes {
        to_frame(self)
    }

    /// Decodes the message from its frame. The identity that precedes it on ROUTER sockets must be
    /// removed.
    pub fn decode(frame: &Bytes) -> Result<Self, WireError> {
        from_frame(frame, "init")
    }
}

/// The properties that an engine reports when it is ready (`EngineCoreReadyResponse` in
/// `vllm/v1/engine/__init__.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReady {
    /// The maximum length of prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// The number of blocks of the KV cache.
    pub num_gpu_blocks: u64,
    /// The configured block size in tokens.
    pub block_size: u32,
    /// Only used by data parallelism with a coordinator.
    pub dp_stats_address: Option<String>,
    /// The model's element type, e.g. `torch.bfloat16` or `bfloat16`.
    pub dtype: String,
    /// The engine's version of vLLM.
    pub vllm_version: String,
    /// The number of the engine's worker processes.
    pub world_size: u32,
    /// The number of engines that share the work.
    pub data_parallel_size: u32,
    /// The number of GPUs that share each layer.
    pub tensor_parallel_size: u32,
    /// The number of pipeline stages, each a group of layers.
    pub pipeline_parallel_size: u32,
    /// The number of GPUs that share a context.
    pub decode_context_parallel_size: u32,
    /// The engine's rank among those that share the work, from 0.
    pub data_parallel_rank: u32,
    /// The maximum number of requests that run at once.
    pub max_num_seqs: u32,
    /// The maximum number of tokens that one step computes.
    pub max_num_batched_tokens: u32,
    /// An id that is new at each start.
    pub instance_id: String,
    /// `true` if the engine accepts LoRA requests.
    pub supports_lora: bool,
    /// The maximum number of LoRA adapters in one batch.
    pub max_loras: u32,
    /// The block size of state-space layers; `None` for models without them.
    pub mamba_block_size: Option<u32>,
    /// The capacity of the KV cache in tokens.
    pub kv_cache_size_tokens: Option<u64>,
    /// The number of requests of `max_model_len` that fit the KV cache.
    pub kv_cache_max_concurrency: Option<f64>,
    /// The sockets of the engine's KV events, if it publishes them.
    pub kv_events_config: Option<KvEventsConfig>,
    /// The mechanism by which weights are replaced.
    pub weight_transfer_backend: Option<String>,
    /// `true` if the engine can be put to sleep.
    pub enable_sleep_mode: bool,
    /// `true` if a draft model's weights can be replaced.
    pub supports_draft_weight_updates: bool,
    /// The block size of KV events, in tokens.
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
    /// Returns the block size of the prefix cache and of KV events, in tokens.
    pub fn cache_block_size(&self) -> u32 {
        self.effective_attention_block_size.unwrap_or(self.block_size)
    }

    /// Encodes the message as one msgpack frame. On ROUTER sockets the engine's identity precedes
    /// it.
    pub fn encode(&self) -> Bytes {
        to_frame(self)
    }

    /// Decodes the message from its frame, without the identity.
    ///
    /// # Errors
    /// The frame can't be decoded, or lacks the version, the maximum length or the block size.
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

/// An engine's configuration for publishing KV events (`KVEventsConfig` in
/// `vllm/config/kv_events.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// `true` if events are published.
    pub enable_kv_cache_events: bool,
    /// The publisher: `zmq` or `null`.
    pub publisher: String,
    /// The bound address of the PUB socket, e.g. `tcp://*:5557`.
    pub endpoint: String,
    /// The bound address of the ROUTER socket that replays events.
    pub replay_endpoint: Option<String>,
    /// The number of batches that can be replayed.
    pub buffer_steps: u64,
    /// The high-water mark of the PUB socket.
    pub hwm: u64,
    /// The maximum number of batches that wait to be published.
    pub max_queue_size: u64,
    /// The topic of every message.
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

/// Encodes a message that has no aux frames.
fn to_frame(message: &impl Wire) -> Bytes {
    let mut to = Writer::default();
    message.write(&mut to);
    to.into_frames().swap_remove(0)
}

fn from_frame<T: Wire>(frame: &Bytes, name: &'static str) -> Result<T, WireError> {
    T::read(&mut Reader::new(std::slice::from_ref(frame))?).named(name)
}
