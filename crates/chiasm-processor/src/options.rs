//! The settings that a processor is started with.

use std::path::PathBuf;
use std::time::Duration;

/// Whether children lock themselves before the first foreign byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// They do not.
    Off,
    /// They do where the kernel has what it takes.
    #[default]
    Auto,
    /// They do, or nothing is served.
    Require,
}

impl Sandbox {
    /// The name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Require => "require",
        }
    }
}

/// What no item may be beyond, as far as its container tells before it is decoded, and by what
/// comes of it; 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ItemLimits {
    /// How long a video may last.
    pub video_duration: Duration,
    /// Pixels of a video's frame.
    pub video_pixels: u64,
    /// How long a recording may last.
    pub audio_duration: Duration,
}

/// What a processor is started with.
#[derive(Clone, Debug)]
pub struct ProcessorOptions {
    /// The Python that has vLLM.
    pub python: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
    /// Flags of `vllm serve`, as the engines have them: some change tensors or prompts.
    pub vllm_flags: Vec<String>,
    /// Items that are made at once, at least 1.
    pub children: usize,
    /// Calls that may wait for a child.
    pub queue: usize,
    /// How long one call may take.
    pub timeout: Duration,
    /// How long the fork server may take to be ready.
    pub startup_timeout: Duration,
    /// The minimum time between two starts of the fork server. Doubles while starts fail.
    pub restart_pause: Duration,
    /// Bytes of an item's file and its tensors together, at most.
    pub item_bytes: u64,
    /// Bytes of address space that a child may take beyond what it begins with; 0 for any number.
    pub address_space: u64,
    /// What items may be.
    pub limits: ItemLimits,
    /// Whether children lock themselves.
    pub sandbox: Sandbox,
}
