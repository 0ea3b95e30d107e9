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
    /// Number of vLLM engines to launch, by role if some only encode, prefill or decode:
    /// prefill=2,decode=4 [default: 1, or none with --agents, --discovery or --upstream]
    #[arg(long, env = "CHIASM_ENGINES", value_name = "N", conflicts_with_all = ["sim", "attach"])]
    pub(crate) engines: Option<EngineCounts>,
    /// The vllm command, which without a folder is looked for beside chiasm and in the PATH
    #[arg(long, env = "CHIASM_VLLM", value_name = "PATH", default_value = "vllm")]
    pub(crate) vllm: PathBuf,
    /// Give each engine this many GPUs of its own, by CUDA_VISIBLE_DEVICES [default: leave it to
    /// vLLM]
    #[arg(long, env = "CHIASM_GPUS_PER_ENGINE")]
    pub(crate) gpus_per_engine: Option<u32>,
    /// Give all engines the same GPU (with --gpus-per-engine the same, first GPUs), each with its
    /// part of 0.9 of the memory unless its flags have --gpu-memory-utilization; they start one
    /// after the other. For trials: they slow each other down
    #[arg(long, env = "CHIASM_SHARE_GPU", conflicts_with_all = ["sim", "attach"])]
    pub(crate) share_gpu: bool,
    /// Handshake port of the first launched engine; the next ones follow it [default: free ones]
    #[arg(long, env = "CHIASM_ENGINE_PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) engine_port: Option<u16>,
    /// Use this many simulated engines instead, by role as with --engines
    #[arg(long, env = "CHIASM_SIM", value_name = "N", conflicts_with = "attach")]
    pub(crate) sim: Option<EngineCounts>,
    /// Wait on these handshake addresses (tcp://host:port, or of an engine with a role
    /// prefill=tcp://host:port) for engines that somebody else starts
    #[arg(long, env = "CHIASM_ATTACH", value_name = "HANDSHAKE_ADDR", num_args = 1.., value_delimiter = ',')]
    pub(crate) attach: Vec<AttachArg>,
    /// Give requests to this server, which somebody else runs: vllm+http://HOST:PORT (or
    /// vllm+https:) is vllm serve of the same model with --enable-scale-out, or with mode=chat
    /// behind it as it is, sglang+http://HOST:PORT SGLang with --enable-metrics,
    /// trtllm+http://HOST:PORT trtllm-serve, http://HOST:PORT (or https:) any server of OpenAI's
    /// API, dynamo+etcd://HOST:PORT,…/NAMESPACE (or dynamo+etcds:, with the files of --etcd-ca-file
    /// and so on, or dynamo+file:///FOLDER/NAMESPACE) the workers of Dynamo that an etcd or a
    /// folder names. Options go behind commas: model=NAME, mode=chat, block-size=N,
    /// api-key-file=FILE, ca-file=FILE; of Dynamo model=NAME, images, tensors[=TYPE],
    /// listen=IP:PORT, announce=IP:PORT. May be given several times
    #[arg(long, env = "CHIASM_UPSTREAM", value_name = "URL", value_delimiter = ' ')]
    pub(crate) upstream: Vec<UpstreamArg>,
    /// Let launched engines outlive this process by so many seconds, for another chiasm serve with
    /// the same MODEL and flags for engines to take them over; chiasm engines lists and stops them
    /// [default: they end with this process]
    #[arg(long, env = "CHIASM_KEEP_ENGINES", value_name = "SECONDS", value_parser = positive_seconds, conflicts_with_all = ["sim", "attach"])]
    pub(crate) keep_engines: Option<Duration>,
    /// Folder for what a later frontend has to know to take over the engines of this one, and to go
    /// on with what is known of KV caches [default: $XDG_STATE_HOME/chiasm or
    /// ~/.local/state/chiasm]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// GiB of each engine's cache of processed images (vLLM's --mm-processor-cache-gb), 0 for none.
    /// For engines to attach it must be what they were started with [default: 4; for --attach
    /// unknown, so that every image is sent]
    #[arg(long, env = "CHIASM_RECEIVER_CACHE_GB", value_parser = non_negative)]
    pub(crate) receiver_cache_gb: Option<f64>,
    /// How images reach the engines
    #[arg(long, env = "CHIASM_MM_TRANSFER", value_enum, default_value_t = MmTransfer::Auto)]
    pub(crate) mm_transfer: MmTransfer,
    /// GiB of shared memory for each engine's images, taken from /dev/shm as they are needed
    /// [default: 1 more than --receiver-cache-gb, which the engine fills with them]
    #[arg(long, env = "CHIASM_MM_ARENA_GB", value_parser = positive)]
    pub(crate) mm_arena_gb: Option<f64>,
    /// GiB of shared memory for images that are on their way to workers of Dynamo on this machine
    /// as tensors (`tensors` behind their address). What finds no room goes as it came
    #[arg(long, env = "CHIASM_DYNAMO_TENSORS_GB", value_parser = positive, default_value = "1")]
    pub(crate) dynamo_tensors_gb: f64,
    /// What engines are sent: raw values, which they normalise, or normalised floats [default:
    /// auto]
    #[arg(long, env = "CHIASM_MM_TENSOR_FORMAT", value_enum)]
    pub(crate) mm_tensor_format: Option<TensorFormats>,
    /// The former name of --mm-tensor-format
    #[arg(
        long,
        env = "CHIASM_PIXELS",
        value_enum,
        hide = true,
        conflicts_with = "mm_tensor_format"
    )]
    pub(crate) pixels: Option<TensorFormats>,
    /// Settings of the image processor for all requests, which a request's own replace key by key
    /// (vLLM's --mm-processor-kwargs). Launched engines are told; engines to attach must have been
    /// started with the same
    #[arg(long, env = "CHIASM_MM_PROCESSOR_KWARGS", value_name = "JSON", value_parser = json_object)]
    pub(crate) mm_processor_kwargs: Option<Map<String, Value>>,
    /// Refuse engines with a vLLM newer than the tested ones
    #[arg(long, env = "CHIASM_STRICT_VLLM_VERSION")]
    pub(crate) strict_vllm_version: bool,
    /// Seconds that an engine may take to become ready
    #[arg(long, env = "CHIASM_STARTUP_TIMEOUT", value_parser = seconds, default_value = "1800")]
    pub(crate) startup_timeout: Duration,
    /// Seconds for which an engine may say nothing before it is suspect and gets no new requests
    #[arg(long, env = "CHIASM_ENGINE_TIMEOUT", value_parser = positive_seconds, default_value = "10")]
    pub(crate) engine_timeout: Duration,
    /// Seconds for which an engine on --attach may say nothing before requests that wait for it
    /// move; engines that are launched here are judged by what their processes do
    #[arg(long, env = "CHIASM_ENGINE_HANG_TIMEOUT", value_parser = positive_seconds, default_value = "60")]
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
