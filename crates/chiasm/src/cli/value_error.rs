//! The errors of value parsers that several flags share.

use std::time::TryFromFloatSecsError;

/// The error of an invalid value of a flag.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("expected an IP address such as 127.0.0.1, or 0.0.0.0 for all of this machine")]
    IpAddress,
    #[error("expected a number of seconds")]
    Seconds,
    #[error(transparent)]
    SecondsRange(#[from] TryFromFloatSecsError),
    #[error("expected more than 0 seconds")]
    ZeroSeconds,
    #[error("expected a number, 0 or more")]
    Negative,
    #[error("expected a number, more than 0")]
    NotPositive,
    #[error("expected a number, 0 or more and less than 1")]
    NotBelowOne,
    #[error("expected a number from 0 to 1")]
    NotAFraction,
    #[error("expected a number from 0 to 1: {0} per cent is {part}", part = .0 / 100.0)]
    PerCent(f64),
    #[error("expected two numbers, such as 10..12")]
    Range,
    #[error("expected more than 0: 0 makes every engine busy")]
    AlwaysBusy,
    #[error("expected 503 or 529")]
    BusyStatus,
}

/// The error of a value that is not a JSON object.
#[derive(Debug, thiserror::Error)]
#[error("expected a JSON object: {0}")]
pub(crate) struct NotAnObject(#[from] serde_json::Error);
