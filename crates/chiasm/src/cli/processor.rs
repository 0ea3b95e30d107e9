//! Flags of vLLM's own processor.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_processor::Sandbox;
use clap::{Args, ValueEnum};

use super::{positive_seconds, seconds};

#[derive(Debug, Args)]
pub(crate) struct ProcessorArgs {
    /// Processor that makes media tensors: native (Chiasm's only), vllm (vLLM's only, in the Python
    /// of --vllm), or auto (Chiasm's for images of model families and formats that it supports,
    /// else vLLM's)
    #[arg(long, env = "CHIASM_PROCESSOR", value_enum, default_value_t = ProcessorChoice::Auto)]
    pub(crate) processor: ProcessorChoice,
    /// vllm command of a further vLLM release: its processor makes the items for engines of that
    /// release, in as many processes as that of --vllm; may be given several times. Engines of
    /// other releases get no such items
    #[arg(long, env = "CHIASM_PROCESSOR_VLLM", value_name = "PATH", value_delimiter = ',')]
    pub(crate) processor_vllm: Vec<PathBuf>,
    /// Sandbox (Landlock and seccomp) of the processes that read media with vLLM's processor: auto
    /// (if the kernel supports it), require or off
    #[arg(
        long,
        env = "CHIASM_PROCESSOR_SANDBOX",
        value_enum,
        default_value_t = SandboxChoice::Auto
    )]
    pub(crate) processor_sandbox: SandboxChoice,
    /// Number of media items that vLLM's processor makes at once, each in its own process [default:
    /// one less than cores]
    #[arg(long, env = "CHIASM_PROCESSORS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) processors: Option<u32>,
    /// Maximum number of media items that wait for vLLM's processor; more get 503
    #[arg(long, env = "CHIASM_PROCESSOR_QUEUE", default_value_t = 256)]
    pub(crate) processor_queue: u32,
    /// Maximum seconds for vLLM's processor to make one media item; slower ones get 504
    #[arg(
        long,
        env = "CHIASM_PROCESSOR_TIMEOUT",
        value_parser = positive_seconds,
        default_value = "60"
    )]
    pub(crate) processor_timeout: Duration,
    /// Maximum bytes of one media item and its tensors together
    #[arg(long, env = "CHIASM_PROCESSOR_ITEM_BYTES", default_value_t = 2 << 30)]
    pub(crate) processor_item_bytes: u64,
    /// Maximum bytes of address space that a process of vLLM's processor may use beyond its initial
    /// size; 0 for no limit
    #[arg(long, env = "CHIASM_PROCESSOR_MEMORY_BYTES", default_value_t = 16 << 30)]
    pub(crate) processor_memory_bytes: u64,
    /// Maximum seconds of a video; 0 for no limit
    #[arg(long, env = "CHIASM_MAX_VIDEO_SECONDS", value_parser = seconds, default_value = "3600")]
    pub(crate) max_video_seconds: Duration,
    /// Maximum number of pixels of a video's frame, width times height; 0 for no limit
    #[arg(long, env = "CHIASM_MAX_VIDEO_PIXELS", default_value_t = 7680 * 4320)]
    pub(crate) max_video_pixels: u64,
    /// Maximum seconds of an audio recording; 0 for no limit
    #[arg(long, env = "CHIASM_MAX_AUDIO_SECONDS", value_parser = seconds, default_value = "3600")]
    pub(crate) max_audio_seconds: Duration,
    /// Maximum number of videos that are decoded at once; a video counts as several, up to half of
    /// them, if more is decoded of it than a minute of 1280 by 720 pixels at 30 frames per second
    /// [default: --processors, but no more than fit into half of the memory that is free at the
    /// start, at twice --processor-item-bytes each]
    #[arg(
        long,
        env = "CHIASM_MAX_CONCURRENT_VIDEOS",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_concurrent_videos: Option<u32>,
    /// Accept mm_processor_kwargs and media_io_kwargs in requests for items that vLLM's processor
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
