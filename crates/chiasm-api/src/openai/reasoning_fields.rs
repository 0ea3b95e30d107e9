//! The fields of messages that have reasoning.

/// The fields of messages that have reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningFields {
    /// vLLM's name of it.
    pub reasoning: bool,
    /// The older name, which many clients read.
    pub reasoning_content: bool,
}

impl Default for ReasoningFields {
    fn default() -> Self {
        Self { reasoning: true, reasoning_content: true }
    }
}
