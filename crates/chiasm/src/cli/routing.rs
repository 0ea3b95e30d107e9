//! Flags of routing.

use std::time::Duration;

use chiasm_router::{Decoding, Policy, Weights};
use clap::Args;

use super::{ValueError, fraction, non_negative, seconds};

#[derive(Debug, Args)]
pub(crate) struct RoutingArgs {
    /// How a worker is picked: kv+media (the least work: KV blocks and images that it holds,
    /// weighed against its load), kv (blind to images beyond their KV blocks), round-robin, random,
    /// least-loaded or power-of-two
    #[arg(long, env = "CHIASM_POLICY", default_value_t = Policy::KvMedia)]
    pub(crate) policy: Policy,
    /// Cost of a prompt block that has to be computed
    #[arg(long, env = "CHIASM_PREFILL_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().prefill)]
    pub(crate) prefill_weight: f64,
    /// Cost of a prompt block that an engine loads from its CPU or storage tier
    #[arg(long, env = "CHIASM_FETCH_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().fetch)]
    pub(crate) fetch_weight: f64,
    /// Cost of a block's worth of image embeddings that has to be encoded
    #[arg(long, env = "CHIASM_ENCODE_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().encode)]
    pub(crate) encode_weight: f64,
    /// Cost of a block's worth of image embeddings whose pixels have to be processed and handed
    /// over
    #[arg(long, env = "CHIASM_PROCESS_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().process)]
    pub(crate) process_weight: f64,
    /// What the work of requests that wait for their first token counts for, in parts of the
    /// request's own
    #[arg(long, env = "CHIASM_QUEUE_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().queue)]
    pub(crate) queue_weight: f64,
    /// Cost of a block that running requests use
    #[arg(long, env = "CHIASM_LOAD_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().load)]
    pub(crate) load_weight: f64,
    /// What the work that a worker did in the last seconds beyond the mean counts for, in parts of
    /// it
    #[arg(long, env = "CHIASM_BALANCE_WEIGHT", value_parser = non_negative, default_value_t = Weights::default().balance)]
    pub(crate) balance_weight: f64,
    /// Steps of one token each that an engine makes per second while it answers: 1 over the usual
    /// time between two tokens
    #[arg(long, env = "CHIASM_DECODE_STEPS_PER_SECOND", value_parser = non_negative, default_value_t = Decoding::default().steps_per_second)]
    pub(crate) decode_steps_per_second: f64,
    /// What reading one block's keys and values takes in such a step, in parts of computing a
    /// prompt block
    #[arg(long, env = "CHIASM_DECODE_READ_PER_BLOCK", value_parser = non_negative, default_value_t = Decoding::default().read_per_block)]
    pub(crate) decode_read_per_block: f64,
    /// Spreads choices: a worker's chance falls by e for so much more cost; 0 always takes the
    /// lowest
    #[arg(long, env = "CHIASM_ROUTING_TEMPERATURE", value_parser = non_negative, default_value_t = 0.0)]
    pub(crate) routing_temperature: f64,
    /// Send nothing to engines whose KV cache is in use to this part, 0 to 1 [default: no bound]
    #[arg(long, env = "CHIASM_BUSY_KV_USAGE", value_parser = busy_kv_usage)]
    pub(crate) busy_kv_usage: Option<f64>,
    /// Send nothing to engines that have so many prompt tokens to compute [default: no bound]
    #[arg(long, env = "CHIASM_BUSY_PENDING_TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) busy_pending_tokens: Option<u64>,
    /// Send nothing to engines in which so many requests wait [default: no bound]
    #[arg(long, env = "CHIASM_BUSY_WAITING", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) busy_waiting: Option<u64>,
    /// Status of requests that find all engines busy: 503 or 529
    #[arg(long, env = "CHIASM_BUSY_STATUS", default_value_t = 503, value_parser = busy_status)]
    pub(crate) busy_status: u16,
    /// Header whose value keeps requests together on one engine; empty for none
    #[arg(
        long,
        env = "CHIASM_SESSION_HEADER",
        value_name = "NAME",
        default_value = "x-session-id"
    )]
    pub(crate) session_header: String,
    /// Most sessions to remember; the least recently used are forgotten
    #[arg(long, env = "CHIASM_MAX_SESSIONS", default_value_t = 100_000)]
    pub(crate) max_sessions: usize,
    /// Seconds for which an engine without KV events is taken to keep a prompt that it was sent
    #[arg(long, env = "CHIASM_APPROXIMATE_TTL", value_parser = seconds, default_value = "120")]
    pub(crate) approximate_ttl: Duration,
    /// Most bytes for what is known of the engines' KV caches; beyond it the least recently used
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
