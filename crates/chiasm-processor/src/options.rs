//! The settings of a processor.

use std::path::PathBuf;
use std::time::Duration;

/// The sandbox policy of children. A child enters the sandbox before it reads any client data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// No sandbox.
    Off,
    /// A sandbox if the kernel supports it.
    #[default]
    Auto,
    /// A sandbox is required; without kernel support the processor does not start.
    Require,
}

impl Sandbox {
    /// Returns the policy's name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Require => "require",
        }
    }
}

/// The limits of items; 0 means no limit. They are checked against the container before decoding,
/// and against the decoded item.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ItemLimits {
    /// The maximum duration of a video.
    pub video_duration: Duration,
    /// The maximum number of pixels of a video frame.
    pub video_pixels: u64,
    /// The maximum duration of a recording.
    pub audio_duration: Duration,
}

/// The settings of a processor.
#[derive(Clone, Debug)]
pub struct ProcessorOptions {
    /// The Python interpreter with vLLM.
    pub python: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
    /// The engines' flags of `vllm serve`. Some of them change tensors or prompts.
    pub vllm_flags: Vec<String>,
    /// The number of items that are made concurrently, at least 1.
    pub children: usize,
    /// The maximum number of items that wait for a child.
    pub queue: usize,
    /// The time limit of one call.
    pub timeout: Duration,
    /// The time limit of the fork server's start.
    pub startup_timeout: Duration,
    /// The minimum time between two starts of the fork server. Doubles while starts fail.
    pub restart_pause: Duration,
    /// The maximum size of an item's file and tensors together.
    pub item_bytes: u64,
    /// The address space, in bytes, that a child may allocate beyond its initial size; 0 for no
    /// limit.
    pub address_space: u64,
    /// The limits of items.
    pub limits: ItemLimits,
    /// The sandbox policy of children.
    pub sandbox: Sandbox,
}
