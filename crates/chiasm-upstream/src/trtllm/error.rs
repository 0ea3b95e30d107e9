//! Errors of following the KV events of TensorRT-LLM.

use chiasm_backend::KvSinkError;

/// An error after which nothing can be known of a server's cache.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// The server has no path for events.
    #[error("it tells no KV events (kv_cache_config.event_buffer_max_size)")]
    NoEvents,
    /// The answer is malformed.
    #[error("its answer to /kv_cache_events can't be read: {0}")]
    Answer(#[from] serde_json::Error),
    /// The server has several engines, and it is unknown which one gets a request.
    #[error("it has several engines (attention_dp) and chooses among them by itself")]
    SeveralEngines,
    /// The blocks are larger than the configured block size.
    #[error(
        "it has blocks of {found} tokens, of which {expected} were expected: its tokens_per_block \
         goes behind its address (block-size=N)"
    )]
    BlockSize { found: usize, expected: usize },
    /// The index rejects the events.
    #[error(transparent)]
    Sink(#[from] KvSinkError),
}
