//! The errors of a reading.

use crate::{MOST_ABANDONED, NixlError};

/// Why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum NotRead {
    /// The pool has no room for it now.
    #[error("there is no room for {0} bytes among what NIXL may read into")]
    NoRoom(u64),
    /// It has missed its deadline, or another reading of that memory has a moment ago.
    #[error("{0}")]
    Slow(&'static str),
    /// NIXL has failed.
    #[error(transparent)]
    Failed(#[from] NixlError),
    /// What a lender says of its memory is too long to be that.
    #[error("what the lender says of its memory is too long to be that")]
    Nonsense,
    /// What was read is no loan of that number.
    #[error("the loan was over")]
    Over,
    /// Too many readings have missed their deadline for more to be begun.
    #[error(
        "{MOST_ABANDONED} readings have missed their deadline: nothing is read any more until this process is started again"
    )]
    Off,
}

impl NotRead {
    /// All causes.
    pub const CAUSES: [&str; 5] =
        ["nixl_no_room", "nixl_slow", "nixl_failed", "nixl_over", "nixl_off"];

    /// In a word.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::NoRoom(_) => "nixl_no_room",
            Self::Slow(_) => "nixl_slow",
            Self::Failed(_) | Self::Nonsense => "nixl_failed",
            Self::Over => "nixl_over",
            Self::Off => "nixl_off",
        }
    }
}
