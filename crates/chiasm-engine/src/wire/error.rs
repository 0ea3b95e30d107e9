//! Errors of decoding a message.

/// A message that can't be decoded.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// The innermost field that was being read, by its name in vLLM.
    pub field: &'static str,
    /// The fault of the field.
    pub problem: Problem,
}

/// The fault of a message's field.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The bytes end inside a value, or a length reaches past them.
    #[error("the message ends too early")]
    Truncated,
    /// Valid msgpack of another type.
    #[error("expected {expected}, found msgpack marker {marker:#04x}")]
    Type {
        /// The expected type.
        expected: &'static str,
        /// The first byte of the value that was found.
        marker: u8,
    },
    /// A number that its field can't hold.
    #[error("the number {0} is out of range")]
    Range(i128),
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    Utf8,
    /// An array with fewer elements than required fields.
    #[error("expected at least {expected} elements, found {found}")]
    TooShort {
        /// The number of required elements.
        expected: usize,
        /// The number of elements found.
        found: usize,
    },
    /// A tensor names an aux frame that the message does not have.
    #[error("aux frame {index} is missing, the message has {frames} frames")]
    MissingFrame {
        /// The index of the frame; the msgpack frame is 0.
        index: u64,
        /// The number of frames in the message, including the msgpack frame.
        frames: usize,
    },
    /// A tensor's bytes do not fit its shape and dtype.
    #[error("{bytes} bytes do not fit shape {shape:?} of {dtype}")]
    TensorSize {
        /// The element type as written on the wire.
        dtype: String,
        /// The shape as written on the wire.
        shape: Vec<usize>,
        /// The number of bytes received.
        bytes: usize,
    },
    /// An element type, or a kind of message or field, that this crate does not support.
    #[error("{0:?} is not supported")]
    Unsupported(String),
    /// A required field is missing.
    #[error("it is missing")]
    Missing,
    /// Values nested deeper than any real message.
    #[error("values are nested too deeply")]
    TooDeep,
}

impl Problem {
    /// Returns the error for this problem in `field`.
    pub(crate) fn at(self, field: &'static str) -> WireError {
        WireError { field, problem: self }
    }
}

/// Adds field names to decoding errors.
pub(crate) trait Named<T> {
    /// Sets the error's field, unless the name of an inner field is already set.
    fn named(self, field: &'static str) -> Result<T, WireError>;
}

impl<T> Named<T> for Result<T, WireError> {
    fn named(self, field: &'static str) -> Self {
        self.map_err(
            |error| if error.field.is_empty() { WireError { field, ..error } } else { error },
        )
    }
}
