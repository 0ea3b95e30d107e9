//! The ends of streamed answers.

/// How a streamed answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// It was sent to its end.
    Finished,
    /// An error ended it.
    Failed,
    /// The client left.
    Left,
}

impl StreamEnd {
    pub(super) const ALL: [Self; 3] = [Self::Finished, Self::Failed, Self::Left];

    /// The name in metrics and the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Left => "left",
        }
    }
}
