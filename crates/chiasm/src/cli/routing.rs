//! Flags of routing.

use std::time::Duration;

use chiasm_router::{Decoding, Policy, Weights};
use clap::Args;

use super::{ValueError, fraction, non_negative, seconds};

#[derive(Debug, Args)]
pub(crate) struct RoutingArgs {
    /// Routing policy: kv+media (the worker with the least work, counting its load and the KV
    /// blocks and images that it holds), kv (the same, blind to images beyond their KV blocks),
    /// round-robin, random, least-loaded or power-of-two
    #[arg(long, env = "CHIASM_POLICY", default_value_t = Policy::KvMedia)]
    pub(crate) policy: Policy,
    /// Cost of computing one prompt block
    #[arg(
        long,
        env = "CHIASM_PREFILL_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().prefill
    )]
    pub(crate) prefill_weight: f64,
    /// Cost of loading one prompt block from an engine's CPU or storage tier
    #[arg(
        long,
        env = "CHIASM_FETCH_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().fetch
    )]
    pub(crate) fetch_weight: f64,
    /// Cost of encoding one block of image embeddings
    #[arg(
        long,
        env = "CHIASM_ENCODE_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().encode
    )]
    pub(crate) encode_weight: f64,
    /// Cost of making and handing over the tensors for one block of image embeddings
    #[arg(
        long,
        env = "CHIASM_PROCESS_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().process
    )]
    pub(crate) process_weight: f64,
    /// Weight of the work of requests that wait for their first token; 1 counts it in full
    #[arg(
        long,
        env = "CHIASM_QUEUE_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().queue
    )]
    pub(crate) queue_weight: f64,
    /// Cost of one block in use by running requests
    #[arg(
        long,
        env = "CHIASM_LOAD_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().load
    )]
    pub(crate) load_weight: f64,
    /// Weight of a worker's work of the last seconds in excess of the mean; 1 counts it in full
    #[arg(
        long,
        env = "CHIASM_BALANCE_WEIGHT",
        value_parser = non_negative,
        default_value_t = Weights::default().balance
    )]
    pub(crate) balance_weight: f64,
    /// Decoding steps per second of an engine, each of one token per request: the inverse of the
    /// usual time between two tokens
    #[arg(
        long,
        env = "CHIASM_DECODE_STEPS_PER_SECOND",
        value_parser = non_negative,
        default_value_t = Decoding::default().steps_per_second
    )]
    pub(crate) decode_steps_per_second: f64,
    /// Time for a decoding step to read one block's keys and values, as a fraction of the time to
    /// compute a prompt block
    #[arg(
        long,
        env = "CHIASM_DECODE_READ_PER_BLOCK",
        value_parser = non_negative,
        default_value_t = Decoding::default().read_per_block
    )]
    pub(crate) decode_read_per_block: f64,
    /// Randomness of the choice of a worker, in units of cost: a worker that costs this much more
    /// is chosen e times less often; 0 always takes the lowest cost
    #[arg(
        long,
        env = "CHIASM_ROUTING_TEMPERATURE",
        value_parser = non_negative,
        default_value_t = 0.0
    )]
    pub(crate) routing_temperature: f64,
    /// KV cache usage at which an engine gets no new requests, as a fraction above 0 and up to 1
    /// [default: no limit]
    #[arg(long, env = "CHIASM_BUSY_KV_USAGE", value_parser = busy_kv_usage)]
    pub(crate) busy_kv_usage: Option<f64>,
    /// Number of prompt tokens still to compute at which an engine gets no new requests [default:
    /// no limit]
    #[arg(
        long,
        env = "CHIASM_BUSY_PENDING_TOKENS",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) busy_pending_tokens: Option<u64>,
    /// Number of requests waiting in an engine at which it gets no new requests [default: no limit]
    #[arg(long, env = "CHIASM_BUSY_WAITING", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) busy_waiting: Option<u64>,
    /// HTTP status of requests when all engines are busy: 503 or 529
    #[arg(long, env = "CHIASM_BUSY_STATUS", default_value_t = 503, value_parser = busy_status)]
    pub(crate) busy_status: u16,
    /// Header that names a session, whose requests all go to one engine; empty for none
    #[arg(
        long,
        env = "CHIASM_SESSION_HEADER",
        value_name = "NAME",
        default_value = "x-session-id"
    )]
    pub(crate) session_header: String,
    /// Maximum number of sessions to remember; beyond it the least recently used are forgotten
    #[arg(long, env = "CHIASM_MAX_SESSIONS", default_value_t = 100_000)]
    pub(crate) max_sessions: usize,
    /// Seconds for which an engine without KV events is assumed to keep a prompt that it was sent
    #[arg(long, env = "CHIASM_APPROXIMATE_TTL", value_parser = seconds, default_value = "120")]
    pub(crate) approximate_ttl: Duration,
    /// Maximum bytes of the index of the engines' KV caches; beyond it the least recently used
    /// blocks are forgotten
    #[arg(long, env = "CHIASM_INDEX_MAX_BYTES", default_value_t = 4 << 30)]
    pub(crate) index_max_bytes: usize,
}

/// Parses a fraction of a KV cache above 0: at 0 every engine would be busy.
fn busy_kv_usage(text: &str) -> Result<f64, ValueError> {
    let part = fraction(text)?;
    if part > 0.0 { Ok(part) } else { Err(ValueError::AlwaysBusy) }
}

fn busy_status(text: &str) -> Result<u16, ValueError> {
    match text {
        "503" => Ok(503),
        "529" => Ok(529),
        _ => Err(ValueError::BusyStatus),
    }
}
