//! The errors of value parsers that several flags share.

use std::error::Error;
use std::fmt::Display;
use std::num::{IntErrorKind, ParseIntError};

use clap::error::ErrorKind;

/// The error of an invalid value of a flag.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("expected an IP address such as 127.0.0.1, or 0.0.0.0 for all of this machine")]
    IpAddress,
    #[error("expected a number of seconds")]
    Seconds,
    #[error("expected 0 or more seconds")]
    NegativeSeconds,
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
    #[error("expected HOST:PORT, such as gpu1:8100")]
    AgentAddress,
}

/// Returns the text for an invalid whole number, in place of the text of Rust's parser or of clap.
/// Returns `None` for any other error.
///
/// clap writes `0 is not in 1..=1024`, with the maximum of `u64` for no maximum.
pub(super) fn describe_number(error: &(dyn Error + 'static), is_bytes: bool) -> Option<String> {
    if let Some(error) = error.downcast_ref::<ParseIntError>() {
        let text = match error.kind() {
            IntErrorKind::PosOverflow => "the number is too large",
            _ if is_bytes => "expected a whole number of bytes, such as 67108864",
            _ => "expected a whole number",
        };
        return Some(text.to_owned());
    }
    let text = error.to_string();
    let (min, max) = text.split_once(" is not in ")?.1.split_once("..")?;
    let max = max.trim_start_matches('=');
    Some(if max == u64::MAX.to_string() {
        format!("expected {min} or more")
    } else {
        format!("expected a whole number from {min} to {max}")
    })
}

/// Creates an error without the usage of the command.
pub(super) fn plain_error(kind: ErrorKind, message: impl Display) -> clap::Error {
    clap::Error::raw(kind, format!("{message}\n"))
}

/// The error of a value that is not a JSON object.
#[derive(Debug, thiserror::Error)]
#[error("expected a JSON object: {0}")]
pub(crate) struct NotAnObject(#[from] serde_json::Error);
