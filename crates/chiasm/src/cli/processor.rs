//! Flags of vLLM's own processor.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_processor::Sandbox;
use clap::{Args, ValueEnum};

use super::{positive_seconds, seconds};

#[derive(Debug, Args)]
pub(crate) struct ProcessorArgs {
    /// What makes tensors of media: auto (Chiasm where it has the model's family and the file is an
    /// image that it reads, else vLLM's own processor, from the Python of --vllm), native (Chiasm
    /// alone) or vllm (vLLM's own processor alone)
    #[arg(long, env = "CHIASM_PROCESSOR", value_enum, default_value_t = ProcessorChoice::Auto)]
    pub(crate) processor: ProcessorChoice,
    /// vllm command of another release than that of --vllm, whose processor makes items for engines
    /// of that release, with as many processes; may be given several times. Engines of a release
    /// that is not there get no such items
    #[arg(long, env = "CHIASM_PROCESSOR_VLLM", value_name = "PATH", value_delimiter = ',')]
    pub(crate) processor_vllm: Vec<PathBuf>,
    /// Whether processes that read media with vLLM's processor lock themselves before, with
    /// Landlock and seccomp: auto (where the kernel has both), require or off
    #[arg(long, env = "CHIASM_PROCESSOR_SANDBOX", value_enum, default_value_t = SandboxChoice::Auto)]
    pub(crate) processor_sandbox: SandboxChoice,
    /// Media items that vLLM's processor makes at once, each in a process of its own [default: one
    /// per core but one]
    #[arg(long, env = "CHIASM_PROCESSORS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) processors: Option<u32>,
    /// Most media items that wait for one of those processes; more get 503
    #[arg(long, env = "CHIASM_PROCESSOR_QUEUE", default_value_t = 256)]
    pub(crate) processor_queue: u32,
    /// Seconds that vLLM's processor may take for one media item
    #[arg(long, env = "CHIASM_PROCESSOR_TIMEOUT", value_parser = positive_seconds, default_value = "60")]
    pub(crate) processor_timeout: Duration,
    /// Most bytes of one media item and its tensors together
    #[arg(long, env = "CHIASM_PROCESSOR_ITEM_BYTES", default_value_t = 2 << 30)]
    pub(crate) processor_item_bytes: u64,
    /// Most bytes of address space that one of those processes may take beyond what it begins with,
    /// 0 for any number
    #[arg(long, env = "CHIASM_PROCESSOR_MEMORY_BYTES", default_value_t = 16 << 30)]
    pub(crate) processor_memory_bytes: u64,
    /// Most seconds of a video, 0 for any number
    #[arg(long, env = "CHIASM_MAX_VIDEO_SECONDS", value_parser = seconds, default_value = "3600")]
    pub(crate) max_video_seconds: Duration,
    /// Most pixels of a video's frame, width times height, 0 for any number
    #[arg(long, env = "CHIASM_MAX_VIDEO_PIXELS", default_value_t = 7680 * 4320)]
    pub(crate) max_video_pixels: u64,
    /// Most seconds of a recording, 0 for any number
    #[arg(long, env = "CHIASM_MAX_AUDIO_SECONDS", value_parser = seconds, default_value = "3600")]
    pub(crate) max_audio_seconds: Duration,
    /// Most videos that are decoded at once [default: as many as --processors, but no more than
    /// half of the memory that is free at the start has room for, each with twice
    /// --processor-item-bytes]
    #[arg(long, env = "CHIASM_MAX_CONCURRENT_VIDEOS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_concurrent_videos: Option<u32>,
    /// Take mm_processor_kwargs and media_io_kwargs of requests for items that vLLM's processor
    /// makes (vLLM's flag)
    #[arg(long, env = "CHIASM_TRUST_REQUEST_MM_KWARGS")]
    pub(crate) trust_request_mm_kwargs: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProcessorChoice {
    Auto,
    Native,
    Vllm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SandboxChoice {
    Off,
    Auto,
    Require,
}

impl From<SandboxChoice> for Sandbox {
    fn from(choice: SandboxChoice) -> Self {
        match choice {
            SandboxChoice::Off => Self::Off,
            SandboxChoice::Auto => Self::Auto,
            SandboxChoice::Require => Self::Require,
        }
    }
}
