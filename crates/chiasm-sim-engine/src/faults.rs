//! Failures on purpose, for tests of what a frontend does about them.

use std::ops::Range;

/// When and how the engine fails.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Number of generated tokens, of all requests together, after which the engine dies instead of
    /// sending the next one: `Some(0)` is before the first token. `None` is never.
    pub die_after_tokens: Option<u64>,
    /// The manner in which it dies then.
    pub death: Death,
    /// Sequence numbers of KV event batches that are not published. Replay still has them.
    pub drop_kv_batches: Range<u64>,
}

/// How an engine dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Death {
    /// The connections close and nothing is said, as after `kill -9`.
    #[default]
    Silent,
    /// ENGINE_CORE_DEAD is sent and then the connections close, as when a worker of vLLM has
    /// failed.
    Announced,
}
