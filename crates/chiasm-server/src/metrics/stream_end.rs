//! The ends of streamed answers.

chiasm_types::every_variant! {
    /// The end of a streamed answer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum StreamEnd {
        /// It was sent to its end.
        Finished,
        /// An error ended it.
        Failed,
        /// The client left.
        Left,
    }
}

impl StreamEnd {
    /// The name in metrics and the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Left => "left",
        }
    }
}
