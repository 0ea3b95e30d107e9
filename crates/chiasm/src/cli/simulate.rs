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
    /// Engines of the fleet, in total or by role: 6, prefill=2,decode=4 or encode=1,aggregated=5.
    /// Several numbers separated by commas, or the flag several times, run the same requests on
    /// several fleets
    #[arg(long, value_name = "LIST", default_value = "32", value_parser = fleets)]
    pub(crate) workers: Vec<List<EngineCounts>>,
    /// Number of requests; with --trace, the maximum [default: 1,000 per worker of the largest
    /// fleet, or the whole trace]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    /// Fraction of the requests, at the beginning, that fill caches and are not measured
    #[arg(long, value_parser = fraction_below_one, default_value_t = 0.25)]
    pub(crate) warm_up: f64,
    /// Generated workload: shared-image-qa, multi-turn-images, image-after-text, unique-images,
    /// shared-system-prompt or mixed; several separated by commas, or all
    #[arg(
        long,
        value_name = "LIST",
        default_value = "mixed",
        value_parser = workloads,
        conflicts_with = "trace"
    )]
    pub(crate) workload: List<Workload>,
    /// File of requests as JSON lines in Mooncake's format: timestamp (ms), input_length,
    /// output_length, hash_ids
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Routing policies to compare: kv+media, kv, round-robin, random, least-loaded or
    /// power-of-two; several separated by commas, or all
    #[arg(long, value_name = "LIST", default_value = "all", value_parser = policies)]
    pub(crate) policy: List<Policy>,
    /// Request rate, as a fraction of each fleet's own saturation [default: 0.7; a trace has its
    /// own times]
    #[arg(long, value_parser = positive, conflicts_with = "rate")]
    pub(crate) load: Option<f64>,
    /// Policy whose saturation --load is a fraction of
    #[arg(long, value_name = "POLICY", default_value_t = Policy::RoundRobin)]
    pub(crate) saturation_of: Policy,
    /// Request rate in requests per second, instead of --load
    #[arg(long, value_parser = positive)]
    pub(crate) rate: Option<f64>,
    /// Number of frontends; each request arrives at a random one
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) frontends: u8,
    /// Milliseconds until the other frontends know of a frontend's choice of a worker, a first
    /// token or a request's end
    #[arg(long, value_name = "MS", value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) announce_ms: f64,
    /// Do not announce requests between frontends, as with engines without agents
    #[arg(long, conflicts_with = "announce_ms")]
    pub(crate) no_announcements: bool,
    /// Seed of the requests, their arrival times, their frontends and the routers' choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Number of policies to run at once, each on one thread
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: u16,
    /// Also write a page that shows the policies side by side to this file
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
    /// Cost of computing one prompt block
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().prefill)]
    pub(crate) prefill_weight: f64,
    /// Cost of encoding one block of image embeddings
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().encode)]
    pub(crate) encode_weight: f64,
    /// Cost of making and handing over the tensors for one block of image embeddings
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().process)]
    pub(crate) process_weight: f64,
    /// Weight of the work of requests that wait for their first token; 1 counts it in full
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().queue)]
    pub(crate) queue_weight: f64,
    /// Cost of one block in use by running requests
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().load)]
    pub(crate) load_weight: f64,
    /// Weight of a worker's work of the last seconds in excess of the mean; 1 counts it in full
    #[arg(long, value_parser = non_negative, default_value_t = Weights::default().balance)]
    pub(crate) balance_weight: f64,
    /// Cost of transferring one prompt block from the engine that computed it; one block of
    /// embeddings costs an eighth of that
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().transfer)]
    pub(crate) transfer_weight: f64,
    /// Cost of using a second engine, whatever the length of the prompt
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().hop)]
    pub(crate) hop_weight: f64,
    /// Weight of a prompt's work on a decode engine, for each request whose answer it delays; 1
    /// counts it in full
    #[arg(long, value_parser = non_negative, default_value_t = StageWeights::default().disturb)]
    pub(crate) disturb_weight: f64,
    /// Randomness of the choice of a worker, in units of cost: a worker that costs this much more
    /// is chosen e times less often; 0 always takes the lowest cost
    #[arg(long, value_parser = non_negative, default_value_t = 0.0)]
    pub(crate) routing_temperature: f64,
}

#[derive(Debug, Args)]
pub(crate) struct SizeArgs {
    /// Images in the catalogue, per worker
    #[arg(long, default_value_t = 32)]
    pub(crate) images_per_worker: usize,
    /// Zipf exponent of the images' popularity; 0 makes all equally popular
    #[arg(long, value_parser = non_negative, default_value_t = 0.9)]
    pub(crate) zipf_exponent: f64,
    /// Conversations open at once, per worker
    #[arg(long, default_value_t = 64)]
    pub(crate) chats_per_worker: usize,
}

/// Flags of the modelled engine. The defaults are those of Qwen2.5-VL-7B on a GPU of the H100's
/// class; `docs/simulate.md` derives them.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Tokens per block of an engine's KV cache
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_size: u32,
    /// Blocks in an engine's KV cache
    #[arg(long, default_value_t = 60_000)]
    pub(crate) num_blocks: u32,
    /// Maximum number of requests that an engine runs at once
    #[arg(long, default_value_t = 1024)]
    pub(crate) max_num_seqs: usize,
    /// Maximum number of tokens that a step computes
    #[arg(long, default_value_t = 8192)]
    pub(crate) max_num_batched_tokens: usize,
    /// Fixed time of a step, in milliseconds
    #[arg(long, value_parser = non_negative, default_value_t = 2.0)]
    pub(crate) step_overhead_ms: f64,
    /// Milliseconds to read the weights, once per step
    #[arg(long, value_parser = non_negative, default_value_t = 6.0)]
    pub(crate) weights_ms: f64,
    /// Tokens that an engine computes per second
    #[arg(long, value_parser = positive, default_value_t = 28_000.0)]
    pub(crate) prefill_rate: f64,
    /// Image embeddings that an engine encodes per second
    #[arg(long, value_parser = positive, default_value_t = 70_000.0)]
    pub(crate) encode_rate: f64,
    /// GB per second at which an engine sends or receives a prompt's keys and values, or reads
    /// embeddings of other engines
    #[arg(long, value_parser = positive, default_value_t = 25.0)]
    pub(crate) transfer_rate: f64,
    /// Latency of receiving a prompt, in milliseconds, besides the time for its bytes
    #[arg(long, value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) transfer_latency_ms: f64,
    /// Capacity of an engine's encoder cache, in image embeddings
    #[arg(long, default_value_t = 114_688)]
    pub(crate) encoder_cache_tokens: u64,
    /// Capacity that frontends assume for the encoder cache, in image embeddings [default: the real
    /// one]
    #[arg(long)]
    pub(crate) believed_encoder_cache_tokens: Option<u64>,
    /// Maximum bytes of embeddings that encode engines store for all engines
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30)]
    pub(crate) embedding_store_bytes: u64,
    /// Size of an engine's receiver cache of tensors, in GiB
    #[arg(long, value_parser = non_negative, default_value_t = 4.0)]
    pub(crate) receiver_cache_gb: f64,
    /// Milliseconds from the end of a step until frontends know its KV events
    #[arg(long, value_parser = non_negative, default_value_t = 1.0)]
    pub(crate) event_delay_ms: f64,
    /// Nanoseconds that a frontend's thread needs per pixel of an image whose tensor the engine
    /// lacks
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
fn fraction_below_one(text: &str) -> Result<f64, ValueError> {
    non_negative(text).ok().filter(|fraction| *fraction < 1.0).ok_or(ValueError::NotBelowOne)
}
