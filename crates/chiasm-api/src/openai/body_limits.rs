//! The bounds on the content of a request body.

/// The bounds on the content of a request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// JSON values in one body, beside its messages and prompts.
    pub json_values: usize,
    /// Messages in one body.
    pub messages: usize,
    /// Parts of the content of all messages in one body.
    pub content_parts: usize,
}

impl Default for BodyLimits {
    fn default() -> Self {
        Self { json_values: 100_000, messages: 16_384, content_parts: 65_536 }
    }
}
