//! The words of a method that failed.

/// `failure_message` of vLLM's `UtilityOutput`: an engine's own words, which have no other form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FailureMessage(pub String);
