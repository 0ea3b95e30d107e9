//! Flags of simulated engines.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{non_negative, positive, positive_seconds, range};

/// Flags of the size and speed of simulated engines.
#[derive(Clone, Debug, Args)]
pub(crate) struct SimArgs {
    /// Tokens per block of a simulated engine's KV cache
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) sim_block_size: u32,
    /// Blocks in a simulated engine's KV cache
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_blocks: u32,
    /// Maximum number of tokens in a prompt and its answer together
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_max_model_len: usize,
    /// Maximum number of requests that a simulated engine runs at once
    #[arg(
        long,
        default_value_t = 128,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=4096)
    )]
    pub(crate) sim_max_num_seqs: usize,
    /// Text of every answer, such as a tool call [default: a description of what the engine
    /// received]
    #[arg(long, value_name = "TEXT")]
    pub(crate) sim_answer: Option<String>,
    /// File for the times at which the outputs of steps are ready: nanoseconds since 1970, eight
    /// bytes each, little endian
    #[arg(long, value_name = "FILE")]
    pub(crate) sim_step_log: Option<PathBuf>,
    /// File for the times at which requests arrive, in the format of --sim-step-log
    #[arg(long, value_name = "FILE")]
    pub(crate) sim_request_log: Option<PathBuf>,
    /// Prompt tokens computed per second
    #[arg(long, default_value_t = 20_000.0, value_parser = positive)]
    pub(crate) sim_prefill_rate: f64,
    /// Decoding steps per second; each gives every running request one token
    #[arg(long, default_value_t = 100.0, value_parser = positive)]
    pub(crate) sim_decode_rate: f64,
    /// Milliseconds to encode one image
    #[arg(long, default_value_t = 20.0, value_parser = non_negative)]
    pub(crate) sim_image_ms: f64,
    /// Factor by which prefill, decoding and encoding are faster
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub(crate) sim_speedup: f64,
    /// vLLM version that simulated engines report [default: 0.32.0]
    #[arg(long, value_name = "VERSION")]
    pub(crate) sim_vllm_version: Option<String>,
    /// Simulate engines without the plugin that opens shared memory
    #[arg(long)]
    pub(crate) sim_no_plugin: bool,
    /// Accept LoRA adapters, as engines of a frontend with --lora-modules do
    #[arg(long)]
    pub(crate) sim_lora: bool,
    /// Have a KV connector, as prefill and decode engines do. For chiasm sim-engine: chiasm serve
    /// sets it by role
    #[arg(long)]
    pub(crate) sim_kv_connector: bool,
    /// Folder from which to read the embeddings of encode engines. For chiasm sim-engine: chiasm
    /// serve sets it by role
    #[arg(long, value_name = "DIR")]
    pub(crate) sim_embeddings: Option<PathBuf>,
    /// Only encode, and write the embeddings to the folder of --sim-embeddings
    #[arg(long, requires = "sim_embeddings")]
    pub(crate) sim_encodes: bool,
    /// Seconds for which an engine keeps a prompt that it has computed for another engine
    #[arg(long, default_value = "30", value_parser = positive_seconds)]
    pub(crate) sim_prompt_lease: Duration,
    /// Publish no KV events
    #[arg(long)]
    pub(crate) sim_no_kv_events: bool,
    /// Sequence numbers of KV event batches that get lost on the way, such as 10..12 for 10 and 11
    #[arg(long, value_name = "FROM..TO", value_parser = range, default_value = "0..0")]
    pub(crate) sim_lose_kv_batches: Range<u64>,
    /// Number of KV event batches that an engine can replay
    #[arg(long, default_value_t = 10_000)]
    pub(crate) sim_replay_batches: usize,
}

#[derive(Debug, Args)]
pub(crate) struct SimEngineArgs {
    /// Handshake address of the frontend, such as tcp://127.0.0.1:29550
    #[arg(long, value_name = "ADDR")]
    pub(crate) handshake: String,
    /// Model directory with the tokenizer for answers [default: one token per byte]
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Data-parallel rank
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u16,
    /// Size of the receiver cache, in GiB; 0 for no cache
    #[arg(long, default_value_t = 4.0, value_parser = non_negative)]
    pub(crate) receiver_cache_gb: f64,
    /// Address for publishing KV events; port 0 picks a free one
    #[arg(long, default_value = "tcp://127.0.0.1:0")]
    pub(crate) kv_events: String,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}
