//! The ends of streamed answers.

chiasm_types::every_variant! {
    /// The end of a streamed answer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum StreamEnd {
        /// The answer was sent completely.
        Finished,
        /// An error ended the answer.
        Failed,
        /// The client disconnected.
        Left,
    }
}

impl StreamEnd {
    /// Returns the name in metrics and the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Left => "left",
        }
    }
}
