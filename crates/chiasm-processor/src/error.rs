use std::path::PathBuf;
use std::time::Duration;

/// Why the processor gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessorError {
    /// There is no such command, or no Python beside it.
    #[error("no Python with vLLM: {}: {reason}", command.display())]
    NoPython {
        /// The vllm command.
        command: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The processor of this model can't be had: in its own words.
    #[error("vLLM's processor can't be used: {0}")]
    NotServed(String),
    /// The process can't be started, or ended, for a reason that may pass.
    #[error("vLLM's processor is not there: {0}")]
    Gone(String),
    /// The queue is full.
    #[error("as many items wait for vLLM's processor as may (--processor-queue)")]
    Busy,
    /// vLLM does not take the item or the prompt: in its own words.
    #[error("{0}")]
    Refused(String),
    /// The child took longer than it may.
    #[error("vLLM's processor did not come to an end within {} s (--processor-timeout)", after.as_secs_f64())]
    TimedOut {
        /// How long it may take.
        after: Duration,
    },
    /// The child ended.
    #[error("vLLM's processor broke down over it")]
    Died,
    /// The child's answer makes no sense.
    #[error("vLLM's processor gave an answer that makes no sense: {0}")]
    Nonsense(String),
}
