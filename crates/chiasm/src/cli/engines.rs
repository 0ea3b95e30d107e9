//! Flags of the engines: their sources, and the transfer of media to them.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_types::Role;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::roles::{AttachArg, EngineCounts};
use super::upstream::UpstreamArg;
use super::{json_object, non_negative, positive, positive_seconds, seconds};

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Number of vLLM engines to launch, in total or by role (encode, prefill, decode, aggregated)
    /// as in prefill=2,decode=4 [default: 1, or none with --agents, --discovery or --upstream]
    #[arg(long, env = "CHIASM_ENGINES", value_name = "N", conflicts_with_all = ["sim", "attach"])]
    pub(crate) engines: Option<EngineCounts>,
    /// The vllm command; a name without a folder is looked up beside chiasm, then in the PATH
    #[arg(long, env = "CHIASM_VLLM", value_name = "PATH", default_value = "vllm")]
    pub(crate) vllm: PathBuf,
    /// Number of GPUs for each engine (for a group: of all its ranks together), not shared with
    /// others, taken in order from CUDA_VISIBLE_DEVICES [default: vLLM decides; for a group the
    /// product of its parallel sizes]
    #[arg(long, env = "CHIASM_GPUS_PER_ENGINE")]
    pub(crate) gpus_per_engine: Option<u32>,
    /// For trials: run all engines on one GPU, or with --gpus-per-engine on the same first GPUs;
    /// the engines slow each other down. They start one after the other and divide 0.9 of the
    /// memory, unless their flags have --gpu-memory-utilization
    #[arg(long, env = "CHIASM_SHARE_GPU", conflicts_with_all = ["sim", "attach"])]
    pub(crate) share_gpu: bool,
    /// Handshake port of the first launched engine; the next engines get the following ports
    /// [default: free ports]
    #[arg(long, env = "CHIASM_ENGINE_PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) engine_port: Option<u16>,
    /// Number of simulated engines to run in place of real ones, in total or by role as in
    /// --engines
    #[arg(long, env = "CHIASM_SIM", value_name = "N", conflicts_with = "attach")]
    pub(crate) sim: Option<EngineCounts>,
    /// Handshake addresses on which to wait for engines that are started by others:
    /// tcp://HOST:PORT, or ROLE=tcp://HOST:PORT for an engine with a role
    #[arg(
        long,
        env = "CHIASM_ATTACH",
        value_name = "HANDSHAKE_ADDR",
        num_args = 1..,
        value_delimiter = ','
    )]
    pub(crate) attach: Vec<AttachArg>,
    /// Server, started by others, to route requests to; may be given several times.
    /// http://HOST:PORT detects what the server is: vLLM, SGLang, TensorRT-LLM, or any server with
    /// OpenAI's API. A prefix names the kind: vllm+http://HOST:PORT (a server with
    /// --enable-scale-out, or any with the option mode=chat), sglang+http://HOST:PORT,
    /// trtllm+http://HOST:PORT, openai+http://HOST:PORT; https works for each.
    /// dynamo+etcd://HOST:PORT,…/NAMESPACE (or dynamo+etcds:, with the files of --etcd-ca-file,
    /// --etcd-certfile and --etcd-keyfile) and dynamo+file:///FOLDER/NAMESPACE stand for the Dynamo
    /// workers registered in an etcd or a folder. Options follow after commas: model=NAME,
    /// mode=chat, block-size=N, api-key-file=FILE, ca-file=FILE; for Dynamo model=NAME, images,
    /// tensors[=TYPE], listen=IP:PORT, announce=IP:PORT
    #[arg(long, env = "CHIASM_UPSTREAM", value_name = "URL", value_delimiter = ' ')]
    pub(crate) upstream: Vec<UpstreamArg>,
    /// Seconds for which launched engines outlive this process, so that a new one with the same
    /// MODEL and engine flags can take them over; chiasm engines lists and stops them [default:
    /// engines end with this process]
    #[arg(
        long,
        env = "CHIASM_KEEP_ENGINES",
        value_name = "SECONDS",
        value_parser = positive_seconds,
        conflicts_with_all = ["sim", "attach"]
    )]
    pub(crate) keep_engines: Option<Duration>,
    /// Folder for state that later processes read: records of engines to take over, knowledge of KV
    /// caches and the default block key secret [default: $XDG_STATE_HOME/chiasm or
    /// ~/.local/state/chiasm]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Size in GiB of each engine's receiver cache of media tensors; 0 for no cache. For attached
    /// engines, give the size they were started with [default: 4; unknown with --attach, so every
    /// image is sent]
    #[arg(
        long,
        visible_alias = "mm-processor-cache-gb",
        env = "CHIASM_RECEIVER_CACHE_GB",
        value_parser = non_negative
    )]
    pub(crate) receiver_cache_gb: Option<f64>,
    /// Transfer of media tensors to the engines
    #[arg(long, env = "CHIASM_MM_TRANSFER", value_enum, default_value_t = MmTransfer::Auto)]
    pub(crate) mm_transfer: MmTransfer,
    /// GiB of shared memory for each engine's media tensors, allocated in /dev/shm as needed
    /// [default: 1 more than --receiver-cache-gb, as the cache keeps its tensors there]
    #[arg(long, env = "CHIASM_MM_ARENA_GB", value_parser = positive)]
    pub(crate) mm_arena_gb: Option<f64>,
    /// GiB of shared memory for images in flight as tensors to Dynamo workers on this machine
    /// (option tensors of --upstream). Images that do not fit are sent as the client sent them
    #[arg(long, env = "CHIASM_DYNAMO_TENSORS_GB", value_parser = positive, default_value = "1")]
    pub(crate) dynamo_tensors_gb: f64,
    /// Format of the image tensors that engines get: raw values, which engines normalise, or
    /// normalised floats [default: auto]
    #[arg(long, env = "CHIASM_MM_TENSOR_FORMAT", value_enum)]
    pub(crate) mm_tensor_format: Option<TensorFormats>,
    /// Former name of --mm-tensor-format
    #[arg(
        long,
        env = "CHIASM_PIXELS",
        value_enum,
        hide = true,
        conflicts_with = "mm_tensor_format"
    )]
    pub(crate) pixels: Option<TensorFormats>,
    /// Image processor settings for all requests (vLLM's --mm-processor-kwargs); a request's own
    /// settings override them key by key. Launched engines get them; attached engines must have
    /// been started with the same
    #[arg(
        long,
        env = "CHIASM_MM_PROCESSOR_KWARGS",
        value_name = "JSON",
        value_parser = json_object
    )]
    pub(crate) mm_processor_kwargs: Option<Map<String, Value>>,
    /// Refuse engines whose vLLM is newer than the tested versions
    #[arg(long, env = "CHIASM_STRICT_VLLM_VERSION")]
    pub(crate) strict_vllm_version: bool,
    /// Seconds within which an engine must become ready
    #[arg(long, env = "CHIASM_STARTUP_TIMEOUT", value_parser = seconds, default_value = "1800")]
    pub(crate) startup_timeout: Duration,
    /// Seconds of silence after which an engine is suspect and gets no new requests
    #[arg(
        long,
        env = "CHIASM_ENGINE_TIMEOUT",
        value_parser = positive_seconds,
        default_value = "10"
    )]
    pub(crate) engine_timeout: Duration,
    /// Seconds of silence after which an attached engine counts as hung, and requests that wait for
    /// it move to others. Launched engines are judged by the activity of their processes instead;
    /// those of a group (--data-parallel-size after --) start again together after this time
    #[arg(
        long,
        env = "CHIASM_ENGINE_HANG_TIMEOUT",
        value_parser = positive_seconds,
        default_value = "60"
    )]
    pub(crate) engine_hang_timeout: Duration,
}

impl EngineArgs {
    /// Returns the role of each engine that is launched, simulated or attached.
    pub(crate) fn roles(&self) -> impl Iterator<Item = Role> {
        let counts = [&self.engines, &self.sim].into_iter().flatten();
        counts.flat_map(EngineCounts::roles).chain(self.attach.iter().map(|attach| attach.role))
    }

    /// Returns `true` if any engine is launched, simulated or attached besides those of agents.
    pub(crate) fn has_any(&self) -> bool {
        let counts = [&self.engines, &self.sim].into_iter().flatten();
        !self.attach.is_empty() || counts.map(EngineCounts::total).sum::<u64>() > 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MmTransfer {
    /// Not sent if the engine has them, else in shared memory, else in messages
    Auto,
    /// As auto, but engines that can't open shared memory are not used
    Shm,
    /// Not sent if the engine has them, else in messages
    Inline,
    /// In messages, every time; nothing is cached or shared
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TensorFormats {
    /// Raw where vLLM normalises by default and its flags do not disable that, else float
    Auto,
    /// Raw values, which the engine normalises
    Raw,
    /// Normalised floats, in the model's element type
    Float,
}
