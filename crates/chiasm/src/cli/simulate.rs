//! The flags of `chiasm simulate`.

use std::path::PathBuf;
use std::str::FromStr;

use chiasm_router::{Policy, StageWeights, UnknownPolicy, Weights};
use chiasm_simulate::{SimulateError, Workload};
use clap::Args;

use super::roles::{EngineCounts, RoleError};
use super::{ValueError, non_negative, positive};

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Engines of the fleet, such as 6, prefill=2,decode=4 or encode=1,aggregated=5; several
    /// numbers, separated by commas, or the flag several times, are fleets of which all are asked
    /// the same
    #[arg(long, value_name = "LIST", default_value = "32", value_parser = fleets)]
    pub(crate) workers: Vec<List<EngineCounts>>,
    /// Requests; of a trace at most so many [default: 1,000 per worker of the largest fleet, or the
    /// whole trace]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    /// Part of the requests that come first and don't count, while caches fill
    #[arg(long, value_parser = part, default_value_t = 0.25)]
    pub(crate) warm_up: f64,
    /// What is asked: shared-image-qa, multi-turn-images, image-after-text, unique-images,
    /// shared-system-prompt, mixed, or several of them, or all
    #[arg(long, value_name = "LIST", default_value = "mixed", value_parser = workloads, conflicts_with = "trace")]
    pub(crate) workload: List<Workload>,
    /// Requests from a file of JSON lines in Mooncake's format: timestamp (ms), input_length,
    /// output_length, hash_ids
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// How workers are picked: kv+media, kv, round-robin, random, least-loaded, power-of-two, or
    /// several, or all
    #[arg(long, value_name = "LIST", default_value = "all", value_parser = policies)]
    pub(crate) policy: List<Policy>,
    /// Part of each fleet's own saturation at which requests arrive [default: 0.7; a trace has
    /// times of its own]
    #[arg(long, value_parser = positive, conflicts_with = "rate")]
    pub(crate) load: Option<f64>,
    /// The policy whose saturation it is
    #[arg(long, value_name = "POLICY", default_value_t = Policy::RoundRobin)]
    pub(crate) saturation_of: Policy,
    /// Requests per second, instead of --load
    #[arg(long, value_parser = positive)]
    pub(crate) rate: Option<f64>,
    /// Frontends before the engines; each request comes to one of them at random
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) frontends: u8,
    /// Milliseconds from a frontend's choice, a first token or an end until the other frontends
    /// know of it
    #[arg(long, value_name = "MS", value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) announce_ms: f64,
    /// Frontends are told nothing of each other's requests, as of engines without agents
    #[arg(long, conflicts_with = "announce_ms")]
    pub(crate) no_announcements: bool,
    /// Of the requests, their times, the frontends they come to and the routers' choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Policies that run side by side, each on one thread
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: u16,
    /// Write a page with the policies side by side to this file, too
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten, next_help_heading = "Cost of a worker")]
    pub(crate) weights: WeightArgs,
    #[command(flatten, next_help_heading = "Generated requests")]
    pub(crate) size: SizeArgs,
    #[command(flatten, next_help_heading = "Engine model")]
    pub(crate) engine: ModelArgs,
}

/// The router's weights, as for `serve`.
#[derive(Debug, Args)]
pub(crate) struct WeightArgs {
    /// A prompt block that has to be computed
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().prefill)]
    pub(crate) prefill_weight: f64,
    /// A block's worth of image embeddings that has to be encoded
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().encode)]
    pub(crate) encode_weight: f64,
    /// A block's worth of image embeddings whose tensors have to be made
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().process)]
    pub(crate) process_weight: f64,
    /// The work of requests that wait, in parts of the request's own
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().queue)]
    pub(crate) queue_weight: f64,
    /// A block that running requests use
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().load)]
    pub(crate) load_weight: f64,
    /// The work that a worker did in the last seconds beyond the mean, in parts of it
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().balance)]
    pub(crate) balance_weight: f64,
    /// A prompt block that an engine gets from the one that has computed it; an eighth of it is
    /// that of a block's embeddings from the one that has encoded them
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().transfer)]
    pub(crate) transfer_weight: f64,
    /// A second engine, whatever the length of the prompt
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().hop)]
    pub(crate) hop_weight: f64,
    /// The work of a prompt, in parts of it, for each request whose answer waits while a decode
    /// engine computes it
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().disturb)]
    pub(crate) disturb_weight: f64,
    /// Spreads choices
    #[arg(long, value_parser = non_negative, default_value_t = 0.0)]
    pub(crate) routing_temperature: f64,
}

#[derive(Debug, Args)]
pub(crate) struct SizeArgs {
    /// Images of the catalogue, per worker
    #[arg(long, default_value_t = 32)]
    pub(crate) images_per_worker: usize,
    /// How unequal their popularity is (Zipf's exponent)
    #[arg(long, value_parser = non_negative, default_value_t = 0.9)]
    pub(crate) zipf_exponent: f64,
    /// Conversations that are open at once, per worker
    #[arg(long, default_value_t = 64)]
    pub(crate) chats_per_worker: usize,
}

/// Flags of the modelled engine. The defaults are those of Qwen2.5-VL-7B on a GPU of the H100's
/// class; `docs/routing.md` derives them.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Tokens per block of an engine's KV cache
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_size: u32,
    /// Blocks of its KV cache
    #[arg(long, default_value_t = 60_000)]
    pub(crate) num_blocks: u32,
    /// Requests that run at once
    #[arg(long, default_value_t = 1024)]
    pub(crate) max_num_seqs: usize,
    /// Tokens of a step
    #[arg(long, default_value_t = 8192)]
    pub(crate) max_num_batched_tokens: usize,
    /// Milliseconds that a step takes besides its work
    #[arg(long, value_parser = non_negative, default_value_t = 2.0)]
    pub(crate) step_overhead_ms: f64,
    /// Milliseconds that reading the weights takes, once a step
    #[arg(long, value_parser = non_negative, default_value_t = 6.0)]
    pub(crate) weights_ms: f64,
    /// Tokens that it computes per second
    #[arg(long, value_parser = positive, default_value_t = 28_000.0)]
    pub(crate) prefill_rate: f64,
    /// Image embeddings that it encodes per second
    #[arg(long, value_parser = positive, default_value_t = 70_000.0)]
    pub(crate) encode_rate: f64,
    /// GB per second at which an engine gives or gets keys and values of a prompt, or reads
    /// embeddings that others have left
    #[arg(long, value_parser = positive, default_value_t = 25.0)]
    pub(crate) transfer_rate: f64,
    /// Milliseconds that getting a prompt takes besides
    #[arg(long, value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) transfer_latency_ms: f64,
    /// Image embeddings that its encoder's cache holds
    #[arg(long, default_value_t = 114_688)]
    pub(crate) encoder_cache_tokens: u64,
    /// Those that frontends take it to hold, if others
    #[arg(long)]
    pub(crate) believed_encoder_cache_tokens: Option<u64>,
    /// Bytes of embeddings that engines which encode leave for all
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30)]
    pub(crate) embedding_store_bytes: u64,
    /// GiB of its cache of tensors
    #[arg(long, value_parser = non_negative, default_value_t = 4.0)]
    pub(crate) receiver_cache_gb: f64,
    /// Milliseconds until its events are known
    #[arg(long, value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) event_delay_ms: f64,
    /// Nanoseconds that a frontend takes per pixel whose tensor the engine lacks
    #[arg(long, value_parser = non_negative, default_value_t = 5.0)]
    pub(crate) pixel_ns: f64,
    /// Threads of all frontends together, per worker
    #[arg(long, default_value_t = 2)]
    pub(crate) threads_per_worker: usize,
}

/// A list separated by commas. A newtype, because clap would treat a `Vec` as several values.
#[derive(Clone, Debug)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// Parses a list; `all` is the value of the word `all`.
fn list<T: Clone + FromStr>(text: &str, all: &[T]) -> Result<List<T>, T::Err> {
    if text == "all" {
        return Ok(List(all.to_vec()));
    }
    text.split(',').map(str::parse::<T>).collect::<Result<_, _>>().map(List)
}

fn workloads(text: &str) -> Result<List<Workload>, SimulateError> {
    list(text, &Workload::ALL)
}

fn policies(text: &str) -> Result<List<Policy>, UnknownPolicy> {
    list(text, &Policy::ALL)
}

/// The error of a value that is not a list of fleets.
#[derive(Debug, thiserror::Error)]
enum FleetError {
    #[error(transparent)]
    Counts(#[from] RoleError),
    #[error("expected numbers from 1 to 100,000")]
    Size,
    #[error("expected numbers from 1 to 100,000, or ROLE=NUMBER,…")]
    NotANumber,
}

/// Parses a list of fleet sizes, or one fleet by the roles of its engines.
fn fleets(text: &str) -> Result<List<EngineCounts>, FleetError> {
    let checked = |fleet: EngineCounts| {
        let is_valid = (1..=100_000).contains(&fleet.total());
        is_valid.then_some(fleet).ok_or(FleetError::Size)
    };
    if text.contains('=') {
        return Ok(List(vec![checked(text.parse()?)?]));
    }
    let fleet = |number: &str| {
        let fleet = number.parse().map(EngineCounts::aggregated);
        fleet.map_err(|_| FleetError::NotANumber).and_then(checked)
    };
    text.split(',').map(fleet).collect::<Result<_, _>>().map(List)
}

impl SimulateArgs {
    /// Returns the fleets in the order of the command line.
    pub(crate) fn fleets(&self) -> impl Iterator<Item = &EngineCounts> {
        self.workers.iter().flat_map(|list| &list.0)
    }
}

/// Parses a fraction below 1.
fn part(text: &str) -> Result<f64, ValueError> {
    non_negative(text).ok().filter(|part| *part < 1.0).ok_or(ValueError::NotBelowOne)
}
