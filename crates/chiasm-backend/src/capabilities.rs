use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use chiasm_types::{Dtype, Role};

use crate::{Network, PlanClass, PreloadedAdapter, Supports};

/// The capabilities of a worker, as its backend found them when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The engine and its version, for operators: `vLLM 0.32.0`.
    pub engine: String,
    /// The plan class: how prompts are expanded and keyed for this worker.
    pub class: PlanClass,
    /// The stages of requests that the worker computes.
    pub role: Role,
    /// The capacity in bytes of the store in which the engines of a machine share embeddings; 0 if
    /// they share none.
    pub embedding_store_bytes: u64,
    /// The maximum number of tokens of prompt and answer together.
    pub max_model_len: usize,
    /// The maximum number of tokens per step. The engine's encoder cache holds at least as many
    /// embeddings.
    pub max_batched_tokens: usize,
    /// The maximum number of requests that run concurrently; more are queued. 0 if not reported.
    pub max_running: usize,
    /// The number of blocks of the KV cache.
    pub total_blocks: u64,
    /// The number of embeddings that the engine's encoder cache keeps between requests, in tokens.
    /// An estimate if the engine does not report it; 0 for none.
    pub encoder_cache_tokens: u64,
    /// The capacity of the receiver cache in bytes: processed media items that need not be sent
    /// again. 0 for none.
    pub receiver_cache_bytes: u64,
    /// The maximum number of LoRA adapters per step; 0 if adapters can't be loaded.
    pub max_loras: usize,
    /// The preloaded LoRA adapters, by the names that engines use.
    pub adapters: BTreeMap<String, PreloadedAdapter>,
    /// The optional parts of a request that the worker supports.
    pub supports: Supports,
    /// The form of a job's prompt.
    pub input: InputForm,
    /// The form in which the worker takes media items.
    pub media: MediaForm,
    /// The way tensors reach the worker.
    pub hand_off: HandOff,
    /// The location of the worker.
    pub locality: Locality,
    /// The network over which the worker exchanges prompts with engines on other machines; `None`
    /// if prompts stay on its machine.
    pub private_network: Option<Network>,
    /// The source of knowledge about the KV cache.
    pub kv: KvSource,
}

impl Capabilities {
    /// The number of tokens that stands for an unknown limit.
    pub const UNLIMITED_TOKENS: usize = u32::MAX as usize;
}

/// The form of a job's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputForm {
    /// Token ids; answers are token ids, too.
    Tokens,
    /// The client's own messages; answers are text.
    Messages,
}

/// The form in which a worker takes media items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaForm {
    /// The worker takes no media items.
    None,
    /// Tensors with values of this format.
    Tensors(TensorFormat),
    /// The encoded bytes that the client sent, under our identity.
    Encoded,
}

/// The format of tensor values. It determines whether Chiasm or the engine normalises them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorFormat {
    /// 8-bit values, decoded and resized. The engine rescales and normalises them; floats would
    /// silently be normalised twice.
    Raw,
    /// Floats of this type, normalised by Chiasm.
    Normalized(Dtype),
}

impl fmt::Display for TensorFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw => f.write_str("raw"),
            Self::Normalized(dtype) => f.write_str(dtype.torch_name()),
        }
    }
}

/// The way tensors reach a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOff {
    /// In memory that both sides map. Tensors that find no room there are sent inline.
    SharedMemory,
    /// In the request's message.
    Inline,
    /// The worker takes no tensors.
    None,
}

/// The location of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Locality {
    /// This machine: the worker can map memory of this process.
    Here,
    /// The machine with this address.
    Host(IpAddr),
    /// An unknown machine.
    Unknown,
}

/// The source of knowledge about a worker's KV cache.
///
/// Every source is converted to one form for the index: a reset, then batches with consecutive
/// numbers. A source that begins with a snapshot of revision R sends the snapshot as batch R, which
/// clears everything and stores the snapshot's blocks; the deltas follow from R + 1 on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// No source. The router assumes that the worker keeps each prompt for some time after it has
    /// received it.
    Unknown {
        /// The reason, for operators.
        why: String,
    },
    /// Batches of events that the engine publishes over ZMQ, numbered from its start with an empty
    /// cache.
    Events(KvEventStream),
    /// The backend itself, which reports to the sink of
    /// [`Backend::follow_kv`](crate::Backend::follow_kv).
    Backend,
}

/// The address of an engine's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventStream {
    /// The address of the publisher, without wildcards.
    pub endpoint: String,
    /// The address for replays of published batches. Without it, a lost message means that the
    /// stream has to start over.
    pub replay_endpoint: Option<String>,
    /// The prefix of the topics to subscribe to; empty for all.
    pub topic: String,
}

impl KvEventStream {
    /// Returns the stream of an engine at `locality`, with addresses that this machine can reach.
    ///
    /// A wildcard in an engine's address stands for the engine's own machine only: on any other
    /// machine, that port may belong to another engine, whose blocks would be attributed to this
    /// one. `None` if the publisher, or the replay address that the engine has, can't be reached.
    pub fn for_locality(
        endpoint: &str,
        replay_endpoint: Option<&str>,
        topic: &str,
        locality: &Locality,
    ) -> Option<Self> {
        let replay_endpoint = match replay_endpoint {
            Some(endpoint) => Some(reachable(endpoint, locality)?),
            None => None,
        };
        Some(Self {
            endpoint: reachable(endpoint, locality)?,
            replay_endpoint,
            topic: topic.to_owned(),
        })
    }
}

/// Returns an address that this machine can reach for an engine's `endpoint`; `None` if there is
/// none.
fn reachable(endpoint: &str, locality: &Locality) -> Option<String> {
    let tcp = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
    let Some((host, port)) = tcp else {
        // Paths and other names are only valid on the engine's machine.
        return (*locality == Locality::Here).then(|| endpoint.to_owned());
    };
    let host = match (host, locality) {
        ("*" | "0.0.0.0" | "[::]", Locality::Here) => "127.0.0.1".to_owned(),
        ("*" | "0.0.0.0" | "[::]", Locality::Host(IpAddr::V4(address))) => address.to_string(),
        ("*" | "0.0.0.0" | "[::]", Locality::Host(IpAddr::V6(address))) => format!("[{address}]"),
        ("*" | "0.0.0.0" | "[::]", Locality::Unknown) => return None,
        ("127.0.0.1" | "localhost" | "[::1]", Locality::Host(_) | Locality::Unknown) => {
            return None;
        }
        (host, _) => host.to_owned(),
    };
    Some(format!("tcp://{host}:{port}"))
}
