//! Errors of the processor.

use std::path::PathBuf;
use std::time::Duration;

/// An error of a call or of the processor's start.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessorError {
    /// The `vllm` command does not exist, or has no Python beside it.
    #[error("no Python with vLLM found for {}: {reason}", command.display())]
    NoPython {
        /// The `vllm` command.
        command: PathBuf,
        /// The cause.
        reason: String,
    },
    /// vLLM has no usable processor for this model. Holds vLLM's message.
    #[error("vLLM's processor can't be used: {0}")]
    Unsupported(String),
    /// The process cannot be started, or has ended. A retry may succeed.
    #[error("vLLM's processor is unavailable: {0}")]
    Unavailable(String),
    /// The queue is full.
    #[error("the queue of vLLM's processor is full (--processor-queue)")]
    QueueFull,
    /// vLLM refused the item or the prompt. Holds vLLM's message.
    #[error("{0}")]
    Refused(String),
    /// A video decodes to another number of frames than its index says, or to frames of another
    /// size. The whole video must be processed instead.
    #[error("the video decodes to other frames than its index says: {0}")]
    OtherFrames(String),
    /// The call exceeded its deadline.
    #[error(
        "vLLM's processor did not finish within {} s (--processor-timeout)",
        after.as_secs_f64()
    )]
    TimedOut {
        /// The time limit of a call.
        after: Duration,
    },
    /// The child died during the call.
    #[error("vLLM's processor crashed during the call")]
    ChildDied,
    /// The child's reply is invalid.
    #[error("vLLM's processor sent an invalid reply: {0}")]
    InvalidReply(String),
}
