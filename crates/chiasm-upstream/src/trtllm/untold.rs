//! Errors of following the KV events of TensorRT-LLM.

use chiasm_backend::KvSinkError;

/// A reason that nothing can be known of a server's cache.
#[derive(Debug, thiserror::Error)]
pub(super) enum Untold {
    /// It has no path for events.
    #[error("it tells no KV events (kv_cache_config.event_buffer_max_size)")]
    NoEvents,
    /// An answer of another form.
    #[error("its answer to /kv_cache_events can't be read: {0}")]
    Answer(#[from] serde_json::Error),
    /// Which engine gets a request is not known.
    #[error("it has several engines (attention_dp) and chooses among them by itself")]
    SeveralEngines,
    /// Blocks are larger than the operator has said.
    #[error(
        "it has blocks of {found} tokens, of which {expected} were expected: its tokens_per_block \
         goes behind its address (block-size=N)"
    )]
    BlockSize { found: usize, expected: usize },
    /// The index does not take the events.
    #[error(transparent)]
    Sink(#[from] KvSinkError),
}
