//! Parsing of values in `mm_processor_kwargs` and `media_io_kwargs.video`.

use serde_json::Value;

use super::VideoPlanError;

/// The name of a request's processor kwargs.
pub(super) const PROCESSOR: &str = "mm_processor_kwargs";
/// The name of a request's loader kwargs.
pub(super) const MEDIA_IO: &str = "media_io_kwargs.video";

/// The name of an object in a request, for error messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope(pub(super) &'static str);

impl Scope {
    /// Creates the error for an unknown key.
    pub(super) fn unknown(self, key: &str) -> VideoPlanError {
        VideoPlanError::UnknownKwarg { scope: self.0, key: key.into() }
    }

    /// Creates the error for an invalid value.
    pub(super) fn invalid(self, key: &'static str, problem: &str) -> VideoPlanError {
        VideoPlanError::InvalidKwarg { scope: self.0, key, problem: problem.into() }
    }

    /// Parses a number.
    pub(super) fn number(self, key: &'static str, value: &Value) -> Result<f64, VideoPlanError> {
        value.as_f64().ok_or_else(|| self.invalid(key, "must be a number"))
    }

    /// Parses an integer from 1 to 2^31.
    pub(super) fn positive(self, key: &'static str, value: &Value) -> Result<u64, VideoPlanError> {
        value
            .as_u64()
            .filter(|number| (1..=1 << 31).contains(number))
            .ok_or_else(|| self.invalid(key, "must be an integer from 1 to 2^31"))
    }

    /// Parses a boolean.
    pub(super) fn flag(self, key: &'static str, value: &Value) -> Result<bool, VideoPlanError> {
        value.as_bool().ok_or_else(|| self.invalid(key, "must be true or false"))
    }
}
