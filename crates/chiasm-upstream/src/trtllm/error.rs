//! Errors of following the KV events of TensorRT-LLM.

use chiasm_backend::KvSinkError;

/// An error after which the contents of a server's cache are unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// The server has no path for events.
    #[error("it publishes no KV events (kv_cache_config.event_buffer_max_size)")]
    NoEvents,
    /// The answer is malformed.
    #[error("its answer of /kv_cache_events can't be read: {0}")]
    Answer(#[from] serde_json::Error),
    /// The server has several engines, and it is unknown which one gets a request.
    #[error("it has several engines (attention_dp) and selects one by itself")]
    SeveralEngines,
    /// The blocks are larger than the configured block size.
    #[error(
        "its blocks have {found} tokens instead of {expected}: add its tokens_per_block after the \
         address (block-size=N)"
    )]
    BlockSize { found: usize, expected: usize },
    /// The index rejects the events.
    #[error(transparent)]
    Sink(#[from] KvSinkError),
}
