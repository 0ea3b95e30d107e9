//! The error message of a failed method call.

/// `failure_message` of vLLM's `UtilityOutput`: the engine's error as free text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FailureMessage(pub String);
