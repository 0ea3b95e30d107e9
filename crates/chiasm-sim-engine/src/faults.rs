//! Deliberate failures, for tests of a frontend's reactions.

use std::ops::Range;

/// The time and the manner of a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// The number of generated tokens, of all requests together, after which the engine dies
    /// instead of sending the next one: `Some(0)` is before the first token. `None` is never.
    pub die_after_tokens: Option<u64>,
    /// The manner of death.
    pub death: Death,
    /// The sequence numbers of KV event batches that are not published. They can still be replayed.
    pub drop_kv_batches: Range<u64>,
}

/// The manner in which an engine dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Death {
    /// The connections close without a message, as after `kill -9`.
    #[default]
    Silent,
    /// ENGINE_CORE_DEAD is sent before the connections close, as when a worker of vLLM fails.
    Announced,
}
