//! The error of reading events.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A KV-event payload is not a `KVEventBatch` as vLLM writes it. The engine is at fault, so
    /// reading the same bytes again does not help. The batch's events are lost, and everything
    /// known of the engine's cache must be dropped.
    #[error(
        "malformed KV event batch: {field} is missing or has another type; \
         check the engine's vLLM version"
    )]
    Malformed {
        /// The field that could not be read.
        field: &'static str,
    },
}
