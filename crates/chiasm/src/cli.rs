//! The command line. Every flag of `serve` may also be given as an environment variable `CHIASM_…`.

mod media;
mod processor;
mod simulate;

use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use chiasm_router::{Decoding, Policy, Weights};
use chiasm_server::{Limits, Network};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::{Map, Value};

pub(crate) use media::MediaArgs;
pub(crate) use processor::{ProcessorArgs, ProcessorChoice};
pub(crate) use simulate::SimulateArgs;

/// One fast front door before many multimodal LLM engines.
#[derive(Debug, Parser)]
#[command(version, about, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model: an OpenAI-compatible frontend before several engines
    Serve(Box<ServeArgs>),
    /// Show the main job in a minute: a frontend, two simulated engines and a small conversation set
    Demo(DemoArgs),
    /// Tell what an image means for a model's prompt: identity, layout, tensors
    Inspect(InspectArgs),
    /// List the engines that are or can be taken over by another frontend, or stop them
    Engines(EnginesArgs),
    /// Run one simulated engine on vLLM's wire
    SimEngine(SimEngineArgs),
    /// Compare routing policies on a modelled fleet in virtual time
    Simulate(Box<SimulateArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory with config.json, tokenizer.json and the processor's configuration
    pub(crate) model: PathBuf,
    /// The model's name in requests [default: MODEL as given]
    #[arg(long, env = "CHIASM_SERVED_MODEL_NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Address to listen on
    #[arg(long, env = "CHIASM_HOST", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, env = "CHIASM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Jinja file that replaces the model's chat template
    #[arg(long, env = "CHIASM_CHAT_TEMPLATE", value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Engines")]
    pub(crate) engines: EngineArgs,
    #[command(flatten, next_help_heading = "Routing")]
    pub(crate) routing: RoutingArgs,
    #[command(flatten, next_help_heading = "Media")]
    pub(crate) media: MediaArgs,
    #[command(flatten, next_help_heading = "vLLM's processor")]
    pub(crate) processor: ProcessorArgs,
    #[command(flatten, next_help_heading = "Limits")]
    pub(crate) limits: LimitArgs,
    #[command(flatten, next_help_heading = "Simulated engines")]
    pub(crate) sim_args: SimArgs,

    /// Flags for every vLLM engine, after `--`
    #[arg(last = true, value_name = "VLLM_FLAGS")]
    pub(crate) vllm_args: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Number of vLLM engines to launch
    #[arg(long, env = "CHIASM_ENGINES", default_value_t = 1, conflicts_with_all = ["sim", "attach"])]
    pub(crate) engines: u32,
    /// The vllm command
    #[arg(long, env = "CHIASM_VLLM", value_name = "PATH", default_value = "vllm")]
    pub(crate) vllm: PathBuf,
    /// Give each engine this many GPUs of its own, by CUDA_VISIBLE_DEVICES [default: leave it to vLLM]
    #[arg(long, env = "CHIASM_GPUS_PER_ENGINE")]
    pub(crate) gpus_per_engine: Option<u32>,
    /// Give all engines the same, first GPUs
    #[arg(long, requires = "gpus_per_engine")]
    pub(crate) share_gpu: bool,
    /// Handshake port of the first launched engine; the next ones follow it [default: free ones]
    #[arg(long, env = "CHIASM_ENGINE_PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) engine_port: Option<u16>,
    /// Use this many simulated engines instead
    #[arg(long, env = "CHIASM_SIM", value_name = "N", conflicts_with = "attach")]
    pub(crate) sim: Option<u32>,
    /// Wait on these handshake addresses (tcp://host:port) for engines that somebody else starts
    #[arg(long, env = "CHIASM_ATTACH", value_name = "HANDSHAKE_ADDR", num_args = 1.., value_delimiter = ',')]
    pub(crate) attach: Vec<String>,
    /// Let launched engines outlive this process by so many seconds, for another chiasm serve with the same MODEL and flags for
    /// engines to take them over; chiasm engines lists and stops them [default: they end with this process]
    #[arg(long, env = "CHIASM_KEEP_ENGINES", value_name = "SECONDS", value_parser = some_seconds, conflicts_with_all = ["sim", "attach"])]
    pub(crate) keep_engines: Option<Duration>,
    /// Folder for what a later frontend has to know to take over the engines of this one [default: $XDG_STATE_HOME/chiasm or
    /// ~/.local/state/chiasm]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// GiB of each engine's cache of processed images (vLLM's --mm-processor-cache-gb), 0 for none. For engines to attach
    /// it must be what they were started with [default: 4; for --attach unknown, so that every image is sent]
    #[arg(long, env = "CHIASM_RECEIVER_CACHE_GB", value_parser = weight)]
    pub(crate) receiver_cache_gb: Option<f64>,
    /// How images reach the engines
    #[arg(long, env = "CHIASM_MM_TRANSFER", value_enum, default_value_t = MmTransfer::Auto)]
    pub(crate) mm_transfer: MmTransfer,
    /// GiB of shared memory for each engine's images, taken from /dev/shm as they are needed [default: 1 more than
    /// --receiver-cache-gb, which the engine fills with them]
    #[arg(long, env = "CHIASM_MM_ARENA_GB", value_parser = positive)]
    pub(crate) mm_arena_gb: Option<f64>,
    /// What engines are sent: raw values, which they normalise, or normalised floats [default: auto]
    #[arg(long, env = "CHIASM_MM_TENSOR_FORMAT", value_enum)]
    pub(crate) mm_tensor_format: Option<TensorFormats>,
    /// The name of --mm-tensor-format before 0.2
    #[arg(long, env = "CHIASM_PIXELS", value_enum, hide = true, conflicts_with = "mm_tensor_format")]
    pub(crate) pixels: Option<TensorFormats>,
    /// Settings of the image processor for all requests, which a request's own replace key by key (vLLM's
    /// --mm-processor-kwargs). Launched engines are told; engines to attach must have been started with the same
    #[arg(long, env = "CHIASM_MM_PROCESSOR_KWARGS", value_name = "JSON", value_parser = json_object)]
    pub(crate) mm_processor_kwargs: Option<Map<String, Value>>,
    /// Refuse engines with a vLLM newer than the tested ones
    #[arg(long, env = "CHIASM_STRICT_VLLM_VERSION")]
    pub(crate) strict_vllm_version: bool,
    /// Seconds that an engine may take to become ready
    #[arg(long, env = "CHIASM_STARTUP_TIMEOUT", value_parser = seconds, default_value = "1800")]
    pub(crate) startup_timeout: Duration,
    /// Seconds for which an engine may say nothing before it is suspect and gets no new requests
    #[arg(long, env = "CHIASM_ENGINE_TIMEOUT", value_parser = some_seconds, default_value = "10")]
    pub(crate) engine_timeout: Duration,
    /// Seconds for which an engine on --attach may say nothing before requests that wait for it move; engines that are
    /// launched here are judged by what their processes do
    #[arg(long, env = "CHIASM_ENGINE_HANG_TIMEOUT", value_parser = some_seconds, default_value = "60")]
    pub(crate) engine_hang_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MmTransfer {
    /// Not at all if the engine has them, else in shared memory, else in messages
    Auto,
    /// As auto, but engines that can't open shared memory are not used
    Shm,
    /// Not at all if the engine has them, else in messages
    Inline,
    /// In messages, every time: nothing is cached or shared
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TensorFormats {
    /// Raw where vLLM normalises by default and its flags do not say otherwise
    Auto,
    /// Raw: the engine normalises
    Raw,
    /// Normalised, in the model's element type
    Float,
}

#[derive(Debug, Args)]
pub(crate) struct RoutingArgs {
    /// How a worker is picked: kv+media (the least work: KV blocks and images that it holds, weighed against its load), kv
    /// (blind to images beyond their KV blocks), round-robin, random, least-loaded or power-of-two
    #[arg(long, env = "CHIASM_POLICY", default_value_t = Policy::KvMedia)]
    pub(crate) policy: Policy,
    /// Cost of a prompt block that has to be computed
    #[arg(long, env = "CHIASM_PREFILL_WEIGHT", value_parser = weight, default_value_t = Weights::default().prefill)]
    pub(crate) prefill_weight: f64,
    /// Cost of a prompt block that an engine loads from its CPU or storage tier
    #[arg(long, env = "CHIASM_FETCH_WEIGHT", value_parser = weight, default_value_t = Weights::default().fetch)]
    pub(crate) fetch_weight: f64,
    /// Cost of a block's worth of image embeddings that has to be encoded
    #[arg(long, env = "CHIASM_ENCODE_WEIGHT", value_parser = weight, default_value_t = Weights::default().encode)]
    pub(crate) encode_weight: f64,
    /// Cost of a block's worth of image embeddings whose pixels have to be processed and handed over
    #[arg(long, env = "CHIASM_PROCESS_WEIGHT", value_parser = weight, default_value_t = Weights::default().process)]
    pub(crate) process_weight: f64,
    /// What the work of requests that wait for their first token counts for, in parts of the request's own
    #[arg(long, env = "CHIASM_QUEUE_WEIGHT", value_parser = weight, default_value_t = Weights::default().queue)]
    pub(crate) queue_weight: f64,
    /// Cost of a block that running requests use
    #[arg(long, env = "CHIASM_LOAD_WEIGHT", value_parser = weight, default_value_t = Weights::default().load)]
    pub(crate) load_weight: f64,
    /// What the work that a worker did in the last seconds beyond the mean counts for, in parts of it
    #[arg(long, env = "CHIASM_BALANCE_WEIGHT", value_parser = weight, default_value_t = Weights::default().balance)]
    pub(crate) balance_weight: f64,
    /// Steps of one token each that an engine makes per second while it answers: 1 over the usual time between two tokens
    #[arg(long, env = "CHIASM_DECODE_STEPS_PER_SECOND", value_parser = weight, default_value_t = Decoding::default().steps_per_second)]
    pub(crate) decode_steps_per_second: f64,
    /// What reading one block's keys and values takes in such a step, in parts of computing a prompt block
    #[arg(long, env = "CHIASM_DECODE_READ_PER_BLOCK", value_parser = weight, default_value_t = Decoding::default().read_per_block)]
    pub(crate) decode_read_per_block: f64,
    /// Spreads choices: a worker's chance falls by e for so much more cost; 0 always takes the lowest
    #[arg(long, env = "CHIASM_ROUTING_TEMPERATURE", value_parser = weight, default_value_t = 0.0)]
    pub(crate) routing_temperature: f64,
    /// Send nothing to engines whose KV cache is in use to this part, 0 to 1 [default: no bound]
    #[arg(long, env = "CHIASM_BUSY_KV_USAGE", value_parser = positive)]
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
    #[arg(long, env = "CHIASM_SESSION_HEADER", value_name = "NAME", default_value = "x-session-id")]
    pub(crate) session_header: String,
    /// Most sessions to remember; the least recently used are forgotten
    #[arg(long, env = "CHIASM_MAX_SESSIONS", default_value_t = 100_000)]
    pub(crate) max_sessions: usize,
    /// Seconds for which an engine without KV events is taken to keep a prompt that it was sent
    #[arg(long, env = "CHIASM_APPROXIMATE_TTL", value_parser = seconds, default_value = "120")]
    pub(crate) approximate_ttl: Duration,
    /// Most bytes for what is known of the engines' KV caches; beyond it the least recently used blocks are forgotten
    #[arg(long, env = "CHIASM_INDEX_MAX_BYTES", default_value_t = 4 << 30)]
    pub(crate) index_max_bytes: usize,
}

#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Most bytes of a request body
    #[arg(long, env = "CHIASM_MAX_BODY_BYTES", default_value_t = 64 << 20)]
    pub(crate) max_body_bytes: usize,
    /// Most JSON values in a request beside messages and prompts: in template settings, tool calls and the like
    #[arg(long, env = "CHIASM_MAX_JSON_VALUES", default_value_t = Limits::default().json_values)]
    pub(crate) max_json_values: usize,
    /// Most messages in a request
    #[arg(long, env = "CHIASM_MAX_MESSAGES", default_value_t = Limits::default().messages)]
    pub(crate) max_messages: usize,
    /// Most content parts in all messages of a request
    #[arg(long, env = "CHIASM_MAX_CONTENT_PARTS", default_value_t = Limits::default().content_parts)]
    pub(crate) max_content_parts: usize,
    /// Seconds that a request body may take to arrive
    #[arg(long, env = "CHIASM_BODY_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) body_timeout: Duration,
    /// Bytes per second of a request body that have to arrive, over any ten seconds; 0 for any
    #[arg(long, env = "CHIASM_MIN_BODY_RATE", default_value_t = 1024)]
    pub(crate) min_body_rate: u64,
    /// Most open connections of clients; for more, others that wait for their clients are closed
    #[arg(long, env = "CHIASM_MAX_CONNECTIONS", default_value_t = 8192)]
    pub(crate) max_connections: usize,
    /// Seconds after which a connection is closed that has not sent the head of its next request
    #[arg(long, env = "CHIASM_HEAD_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) head_timeout: Duration,
    /// Seconds after which a connection is closed whose client reads nothing of its answer
    #[arg(long, env = "CHIASM_WRITE_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) write_timeout: Duration,
    /// Most requests in flight; more get 503 [default: twice what the engines run at once, but at least 1024]
    #[arg(long, env = "CHIASM_MAX_REQUESTS")]
    pub(crate) max_requests: Option<usize>,
    /// Proxies that are believed about whom a request is from, in X-Forwarded-For or Forwarded: addresses or networks
    #[arg(long, env = "CHIASM_TRUSTED_PROXIES", value_name = "CIDR", num_args = 1.., value_delimiter = ',')]
    pub(crate) trusted_proxies: Vec<Network>,
    /// Most seconds of this server's CPU time that one request may ask for, by estimate before the work is done; more gets 413
    #[arg(long, env = "CHIASM_MAX_REQUEST_COST", value_parser = seconds, default_value = "10")]
    pub(crate) max_request_cost: Duration,
    /// Threads for decoding, tokenizing and parsing; cheap and very dear work have more of their own [default: one less than cores]
    #[arg(long, env = "CHIASM_CPU_THREADS")]
    pub(crate) cpu_threads: Option<usize>,
    /// Seconds that a request may wait for its first token, 0 for any number
    #[arg(long, env = "CHIASM_FIRST_TOKEN_TIMEOUT", value_parser = seconds, default_value = "600")]
    pub(crate) first_token_timeout: Duration,
    /// Seconds that a request may take in all, 0 for any number
    #[arg(long, env = "CHIASM_REQUEST_TIMEOUT", value_parser = seconds, default_value = "3600")]
    pub(crate) request_timeout: Duration,
    /// Seconds for which a prompt is refused that was in three engines when they died
    #[arg(long, env = "CHIASM_QUARANTINE", value_parser = seconds, default_value = "60")]
    pub(crate) quarantine: Duration,
    /// Seconds after SIGTERM for which requests are still taken, while /ready says that none should be sent
    #[arg(long, env = "CHIASM_DRAIN_DELAY", value_parser = seconds, default_value = "0")]
    pub(crate) drain_delay: Duration,
    /// Seconds that requests in flight get to finish after that
    #[arg(long, env = "CHIASM_DRAIN_TIMEOUT", value_parser = seconds, default_value = "30")]
    pub(crate) drain_timeout: Duration,
}

/// A simulated engine's size and speed.
#[derive(Clone, Debug, Args)]
pub(crate) struct SimArgs {
    /// Tokens per block of a simulated engine's KV cache
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) sim_block_size: u32,
    /// Blocks of its KV cache
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_blocks: u32,
    /// Longest prompt and answer together
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_max_model_len: usize,
    /// Prompt tokens that it computes per second
    #[arg(long, default_value_t = 20_000.0, value_parser = weight)]
    pub(crate) sim_prefill_rate: f64,
    /// Steps that it decodes per second
    #[arg(long, default_value_t = 100.0, value_parser = weight)]
    pub(crate) sim_decode_rate: f64,
    /// Milliseconds that it takes to encode an image
    #[arg(long, default_value_t = 20.0, value_parser = weight)]
    pub(crate) sim_image_ms: f64,
    /// Runs all of that so many times faster
    #[arg(long, default_value_t = 1.0, value_parser = weight)]
    pub(crate) sim_speedup: f64,
    /// Leaves out the plugin that opens shared memory
    #[arg(long)]
    pub(crate) sim_no_plugin: bool,
    /// Publishes no KV events
    #[arg(long)]
    pub(crate) sim_no_kv_events: bool,
    /// Loses KV event batches with these numbers on their way, such as 10..12 for 10 and 11
    #[arg(long, value_name = "FROM..TO", value_parser = range, default_value = "0..0")]
    pub(crate) sim_lose_kv_batches: Range<u64>,
    /// KV event batches that it can replay
    #[arg(long, default_value_t = 10_000)]
    pub(crate) sim_replay_batches: usize,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Leave the server up afterwards
    #[arg(long)]
    pub(crate) keep: bool,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Directory with config.json and the processor's configuration
    #[arg(long)]
    pub(crate) model: PathBuf,
    /// Files or http(s) or data: URLs
    #[arg(required = true, value_name = "IMAGE|URL")]
    pub(crate) images: Vec<String>,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Write each tensor there, as .npy
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,
    /// Tokens per block, for the block keys
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_size: u32,
    /// Dump normalised floats instead of raw pixels
    #[arg(long)]
    pub(crate) normalized: bool,
    /// Image processor settings as in a request's mm_processor_kwargs, as JSON
    #[arg(long, value_name = "JSON", value_parser = json_object, default_value = "{}")]
    pub(crate) mm_processor_kwargs: Map<String, Value>,
}

#[derive(Debug, Args)]
pub(crate) struct EnginesArgs {
    /// The state folder of the frontends [default: as of chiasm serve]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// End this engine, which no frontend may have
    #[arg(long, value_name = "NAME", conflicts_with = "stop_all")]
    pub(crate) stop: Option<String>,
    /// End all engines that no frontend has
    #[arg(long)]
    pub(crate) stop_all: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SimEngineArgs {
    /// The frontend's handshake address, such as tcp://127.0.0.1:29550
    #[arg(long, value_name = "ADDR")]
    pub(crate) handshake: String,
    /// Model directory whose tokenizer its answers use [default: one token per byte]
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Data-parallel rank
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u16,
    /// GiB of its cache of processed images, 0 for none
    #[arg(long, default_value_t = 4.0, value_parser = weight)]
    pub(crate) receiver_cache_gb: f64,
    /// Address to publish KV events on; port 0 picks a free one
    #[arg(long, default_value = "tcp://127.0.0.1:0")]
    pub(crate) kv_events: String,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

fn some_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        Duration::ZERO => Err("expected more than 0 seconds".to_owned()),
        some => Ok(some),
    }
}

fn json_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

fn weight(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(weight) if weight.is_finite() && weight >= 0.0 => Ok(weight),
        _ => Err("expected a number, 0 or more".to_owned()),
    }
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let ends = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.ok_or_else(|| "expected two numbers, such as 10..12".to_owned())
}

fn busy_status(text: &str) -> Result<u16, String> {
    match text {
        "503" => Ok(503),
        "529" => Ok(529),
        _ => Err("expected 503 or 529".to_owned()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    weight(text).ok().filter(|&number| number > 0.0).ok_or_else(|| "expected a number, more than 0".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn vllm_flags_come_after_two_dashes() {
        let cli = Cli::parse_from(["chiasm", "serve", "m", "--engines", "2", "--", "--dtype", "float32"]);
        let Command::Serve(args) = cli.command else { panic!("serve") };
        assert_eq!(args.engines.engines, 2);
        assert_eq!(args.vllm_args, ["--dtype", "float32"]);
    }

    #[test]
    fn policies_and_workloads_are_lists() {
        let cli = Cli::parse_from(["chiasm", "simulate", "--policy", "kv,kv+media", "--workload", "all"]);
        let Command::Simulate(args) = cli.command else { panic!("simulate") };
        assert_eq!(args.policy.0, [Policy::Kv, Policy::KvMedia]);
        assert_eq!(args.workload.0.len(), 6);
        let error = Cli::try_parse_from(["chiasm", "simulate", "--policy", "best"]).unwrap_err().to_string();
        assert!(error.contains("round-robin"), "{error}");
    }
}
