//! What can go wrong while events are read.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A KV-event payload is not what vLLM's `KVEventBatch` looks like. The engine is at fault;
    /// reading the same bytes again does not help. What the batch said is lost, so whatever is
    /// known of the engine's cache has to be dropped.
    #[error(
        "malformed KV event batch: {what} is missing or has another type; check the engine's vLLM version"
    )]
    Malformed {
        /// The field that could not be read.
        what: &'static str,
    },
}
