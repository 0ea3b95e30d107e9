//! What can be wrong with a message.

/// A message from the other side does not mean what this crate knows.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// The innermost field that was being read, by its name in vLLM.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a field of a message.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The bytes end inside a value, or a length reaches past them.
    #[error("the message ends too early")]
    Truncated,
    /// Valid msgpack of another type.
    #[error("expected {expected}, found msgpack marker {marker:#04x}")]
    Type {
        /// What should be here.
        expected: &'static str,
        /// First byte of what is here.
        marker: u8,
    },
    /// A number that its field can't hold.
    #[error("the number {0} is out of range")]
    Range(i128),
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    Utf8,
    /// An array with fewer elements than the fields that must be there.
    #[error("expected at least {expected} elements, found {found}")]
    TooShort {
        /// Elements that must be there.
        expected: usize,
        /// Elements that are there.
        found: usize,
    },
    /// A tensor names an aux frame that did not come.
    #[error("aux frame {index} is missing, the message has {frames} frames")]
    MissingFrame {
        /// Index of the frame; the msgpack frame is 0.
        index: u64,
        /// Frames of the message, counted from the msgpack frame.
        frames: usize,
    },
    /// A tensor's bytes do not fit its shape and dtype.
    #[error("{bytes} bytes do not fit shape {shape:?} of {dtype}")]
    TensorSize {
        /// Element type as written on the wire.
        dtype: String,
        /// Shape as written on the wire.
        shape: Vec<usize>,
        /// Bytes that came.
        bytes: usize,
    },
    /// An element type or a kind of message or field that this crate does not speak.
    #[error("{0:?} is not supported")]
    Unsupported(String),
    /// A field that must be there is not.
    #[error("it is missing")]
    Missing,
    /// Values nested deeper than any real message.
    #[error("values are nested too deeply")]
    TooDeep,
}

impl Problem {
    /// Says in which field the problem is.
    pub(crate) fn at(self, field: &'static str) -> WireError {
        WireError { field, problem: self }
    }
}

/// Names the field, unless an inner one has been named already.
pub(crate) trait Named<T> {
    fn named(self, field: &'static str) -> Result<T, WireError>;
}

impl<T> Named<T> for Result<T, WireError> {
    fn named(self, field: &'static str) -> Self {
        self.map_err(
            |error| if error.field.is_empty() { WireError { field, ..error } } else { error },
        )
    }
}
