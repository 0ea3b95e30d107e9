//! Failures on purpose, for tests of what a frontend does about them.

use std::ops::Range;

/// When and how the engine fails.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Dies instead of sending the output after this many generated tokens, of all requests together: with
    /// `Some(0)` before the first token. `None`: never.
    pub die_after_tokens: Option<u64>,
    /// How it dies then.
    pub death: Death,
    /// Sequence numbers of KV event batches that are not published. Replay still has them.
    pub drop_kv_batches: Range<u64>,
}

/// How an engine dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Death {
    /// Like `kill -9`: the connections close, nothing is said.
    #[default]
    Silent,
    /// Like a failed worker: ENGINE_CORE_DEAD, then the connections close.
    Announced,
}
