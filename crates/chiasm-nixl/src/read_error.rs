//! The errors of a read.

use crate::{MAX_ABANDONED_READS, NixlError};

/// The reason why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The pool has no room for the bytes now.
    #[error("the memory pool for reads by NIXL has no room for {0} bytes")]
    NoRoom(u64),
    /// The read timed out, or was not started because a read of the same memory timed out recently.
    #[error("{0}")]
    TimedOut(&'static str),
    /// NIXL has failed.
    #[error(transparent)]
    Failed(#[from] NixlError),
    /// The lender's metadata is too long to be valid.
    #[error("the lender's metadata is too long to be valid")]
    InvalidMetadata,
    /// The bytes that were read do not belong to a loan with that number.
    #[error("the loan had ended")]
    LoanEnded,
    /// No more reads are started, because too many have timed out.
    #[error(
        "{MAX_ABANDONED_READS} reads have timed out: no read is started until this process restarts"
    )]
    Disabled,
}

impl ReadError {
    /// The labels of all causes.
    pub const CAUSES: [&str; 5] =
        ["nixl_no_room", "nixl_slow", "nixl_failed", "nixl_over", "nixl_off"];

    /// Returns the label of the cause.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::NoRoom(_) => "nixl_no_room",
            Self::TimedOut(_) => "nixl_slow",
            Self::Failed(_) | Self::InvalidMetadata => "nixl_failed",
            Self::LoanEnded => "nixl_over",
            Self::Disabled => "nixl_off",
        }
    }
}
