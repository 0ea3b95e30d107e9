use std::error::Error;
use std::fmt;
use std::time::Duration;

/// The reason why a backend died, as a text for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeathReason(String);

impl DeathReason {
    /// Creates a reason from a text that can follow a colon: `its connection was lost`.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for DeathReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The reason why a job failed. The variant tells the caller whether another backend may be tried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The backend never started the job: it was gone, or takes no jobs at present.
    #[error("the engine did not take the request: {0}")]
    NotTaken(DeathReason),
    /// The backend died with the job. The job can be given to another backend if no output has been
    /// passed on.
    #[error("the engine is gone: {0}")]
    Dead(DeathReason),
    /// The job was not sent, because the backend would die of it or refuse it. The request is at
    /// fault.
    #[error("{field}: {message}")]
    Refused {
        /// The part of the job at fault, such as `sampling_params.max_tokens`.
        field: String,
        /// The problem with that part.
        message: String,
    },
    /// A server failed before the head of its response: with a 5xx, or by closing the connection
    /// (502). It may have started the job. The job can be given to another server if no output has
    /// been passed on.
    #[error("the server failed ({status}): {message}")]
    ServerFailed {
        /// The HTTP status.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// A server refused the API key, which the operator configured. It did not start the job.
    #[error("the server refused its API key ({status}): {message}")]
    KeyRefused {
        /// The HTTP status: 401 or 403.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// A server takes no requests at present. It did not start the job.
    #[error("the server is overloaded ({status}): {message}")]
    Overloaded {
        /// The HTTP status: 429 or 503.
        status: u16,
        /// The time after which the server may be tried again.
        retry_after: Duration,
        /// The server's message.
        message: String,
    },
    /// A server does not have the model. It did not start the job.
    #[error("the server does not have the model: {message}")]
    UnknownModel {
        /// The server's message.
        message: String,
    },
    /// A server refused the job with a 4xx. The request is at fault.
    #[error("{field}: {message}")]
    Rejected {
        /// The HTTP status.
        status: u16,
        /// The part of the job at fault.
        field: String,
        /// The server's message.
        message: String,
    },
    /// The backend failed a job with a constraint, without saying whether the constraint is at
    /// fault.
    #[error("{field}: {message}")]
    ConstraintFailed {
        /// The request field of the constraint.
        field: String,
        /// The backend's reason, or a note that it gave none.
        message: String,
    },
    /// The source of a media item failed.
    #[error(transparent)]
    Source(SourceError),
    /// The backend failed this job only. The reason is in the backend's own log.
    #[error("the engine could not process the request; see the engine's log")]
    Failed,
    /// The backend repeatedly lost media items that had been sent to it.
    #[error("the engine repeatedly lost the request's media items")]
    KeepsLosingMedia,
    /// The job was aborted because too much of its output was unread.
    #[error("the answer was aborted: too much of it was unread")]
    Unread,
    /// The backend ended a continuation without a reason.
    #[error("the engine ended the request without a result")]
    Unfinished,
}

/// The error of a [`KvSink`](crate::KvSink) that can't decode a backend's KV events. It wraps the
/// index's own error, which this crate does not inspect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvSinkError {
    /// A malformed snapshot. Nothing is known about the cache.
    #[error(transparent)]
    Snapshot(Box<dyn Error + Send + Sync>),
    /// A malformed batch of events, whose events are lost.
    #[error(transparent)]
    Batch(Box<dyn Error + Send + Sync>),
}

/// The error of a media source. It wraps the error of the source's owner, which this crate does not
/// inspect.
#[derive(Debug)]
pub struct SourceError(Box<dyn Error + Send + Sync>);

impl SourceError {
    /// Wraps the owner's error.
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }

    /// Returns the owner's error if it has the type `E`.
    ///
    /// # Errors
    /// The unchanged error if it has another type.
    pub fn downcast<E: Error + Send + Sync + 'static>(self) -> Result<Box<E>, Self> {
        self.0.downcast().map_err(Self)
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for SourceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
