//! The message fields that contain reasoning.

/// The message fields that contain reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningFields {
    /// `true` to write the field `reasoning`: vLLM's name.
    pub reasoning: bool,
    /// `true` to write the field `reasoning_content`: the older name, which many clients read.
    pub reasoning_content: bool,
}

impl Default for ReasoningFields {
    fn default() -> Self {
        Self { reasoning: true, reasoning_content: true }
    }
}
