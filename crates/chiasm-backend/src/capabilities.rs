use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use chiasm_types::{Dtype, Role};

use crate::{Network, OwnAdapter, PlanClass, Supports};

/// What one worker can do, as its backend found out when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The engine and its version, for people: `vLLM 0.32.0`.
    pub engine: String,
    /// How prompts are expanded and keyed for this worker.
    pub class: PlanClass,
    /// Which stages of requests it computes.
    pub role: Role,
    /// Bytes of embeddings that engines of its machine have encoded and all of them find there; 0
    /// where they leave none for each other.
    pub embedding_store_bytes: u64,
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Tokens that one step computes. The engine's encoder cache holds at least as many embeddings.
    pub max_batched_tokens: usize,
    /// Requests that it runs at once; more wait in it. 0 when it does not tell.
    pub max_running: usize,
    /// Blocks of the KV cache.
    pub total_blocks: u64,
    /// Embeddings that the engine keeps between requests, in tokens, or is taken to keep if it does
    /// not tell; 0 for none.
    pub encoder_cache_tokens: u64,
    /// Bytes of processed media items that the engine keeps, so that they need not be sent again; 0
    /// for none.
    pub receiver_cache_bytes: u64,
    /// LoRA adapters that the requests of one step may use; 0 if it can't be made to load any.
    pub max_loras: usize,
    /// LoRA adapters that it has by itself, by the names that engines know them by.
    pub adapters: BTreeMap<String, OwnAdapter>,
    /// The optional parts of a request that it supports.
    pub supports: Supports,
    /// What a job for it consists of.
    pub input: InputForm,
    /// The form in which it takes media items.
    pub media: MediaForm,
    /// How tensors get to it.
    pub hand_off: HandOff,
    /// Where it runs.
    pub locality: Locality,
    /// The network over which it hands prompts to engines of other machines, and gets theirs;
    /// `None` if prompts stay on its machine.
    pub private_network: Option<Network>,
    /// Where knowledge of its KV cache comes from.
    pub kv: KvSource,
}

/// What a job's prompt has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputForm {
    /// Token ids; answers are tokens too.
    Tokens,
    /// The client's own messages; answers are text.
    Messages,
}

/// The form in which a worker takes media items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaForm {
    /// It takes none.
    None,
    /// Tensors whose values are of this format.
    Tensors(TensorFormat),
    /// The encoded bytes as the client sent them, under our identity.
    Encoded,
}

/// Who normalises an item's values, and what is therefore handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorFormat {
    /// 8-bit values as decoded and resized: the engine rescales and normalises them. Floats would
    /// be normalised twice, silently.
    Raw,
    /// Normalised here, as floats of this type.
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

/// How tensors get to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOff {
    /// Both sides map the memory that they lie in; what finds no room there goes inline.
    SharedMemory,
    /// They are part of the request's message.
    Inline,
    /// The worker takes no tensors.
    None,
}

/// Where a worker runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Locality {
    /// The worker is on this machine: it can map memory of this process.
    Here,
    /// The worker is on the machine of this address.
    Host(IpAddr),
    /// It is not known where.
    Unknown,
}

/// Where knowledge of a worker's KV cache comes from.
///
/// Whatever the source, it is brought into one shape for the index: first a reset, then batches
/// with rising numbers, none missing. A source that begins with a snapshot at revision R fits it as
/// a batch with number R which clears everything and stores what is there, and deltas from R + 1
/// on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// There is none, for this reason. The worker is taken to hold what it was sent, for a while.
    Unknown {
        /// Why, for people.
        why: String,
    },
    /// The engine publishes batches of events over ZMQ, numbered from its start with an empty cache
    /// on.
    Events(KvEventStream),
    /// The backend itself tells, to whom [`Backend::follow_kv`](crate::Backend::follow_kv) names.
    Backend,
}

/// Where an engine publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventStream {
    /// Address of the publisher, without wildcards.
    pub endpoint: String,
    /// Address where published batches can be asked for again; without one a lost message means
    /// starting over.
    pub replay_endpoint: Option<String>,
    /// Prefix of the topics that are published; empty for all.
    pub topic: String,
}

impl KvEventStream {
    /// The stream that an engine at `locality` says it publishes, as this machine can reach it: an
    /// address with a wildcard is one of the machine where the engine runs, and of no other, as
    /// what is there may be another engine's, whose blocks would be believed to be this one's.
    /// `None` if it can't be reached, or batches that were lost could not be asked for where the
    /// engine says they can.
    pub fn at(
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

/// An address as this machine can reach it; `None` if it can't.
fn reachable(endpoint: &str, locality: &Locality) -> Option<String> {
    let tcp = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
    let Some((host, port)) = tcp else {
        // Paths and names of the engine's machine mean nothing on another one.
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
