//! The limits on the content of a request body.

/// The limits on the content of a request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// The maximum number of JSON values in one body, besides its messages and prompts.
    pub json_values: usize,
    /// The maximum number of messages in one body.
    pub messages: usize,
    /// The maximum number of content parts of all messages in one body.
    pub content_parts: usize,
}

impl Default for BodyLimits {
    fn default() -> Self {
        Self { json_values: 100_000, messages: 16_384, content_parts: 65_536 }
    }
}
