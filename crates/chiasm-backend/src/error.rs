use std::error::Error;
use std::fmt;
use std::time::Duration;

/// How a backend went, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death(String);

impl Death {
    /// Words that follow a colon: `its connection was lost`.
    pub fn new(how: impl Into<String>) -> Self {
        Self(how.into())
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a job has no result, and what its owner can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The backend never began with the job: it was gone, or takes none for now.
    #[error("the engine did not take the request: {0}")]
    NotTaken(Death),
    /// The backend is gone, and had the job. A job that nothing of was passed on can be given to
    /// another one.
    #[error("the engine is gone: {0}")]
    Dead(Death),
    /// The job would break the backend or be refused by it, so it was not sent. The fault is in the
    /// request.
    #[error("{field}: {message}")]
    Refused {
        /// The part of the job at fault, such as `sampling_params.max_tokens`.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// A server failed before the head of its answer: with a 5xx, or by ending the connection
    /// (502). It may have begun. While nothing of its answer was passed on, the job can be given to
    /// another one.
    #[error("the server failed ({status}): {message}")]
    ServerFailed {
        /// The HTTP status.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// A server refuses the key that it is sent, which is the operator's. It did not begin.
    #[error("the server refuses its key ({status}): {message}")]
    KeyRefused {
        /// The HTTP status: 401 or 403.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// A server takes no requests for now. It did not begin.
    #[error("the server takes no requests now ({status}): {message}")]
    Overloaded {
        /// The HTTP status: 429 or 503.
        status: u16,
        /// The time after which the server may be tried again.
        retry_after: Duration,
        /// The server's words.
        message: String,
    },
    /// A server does not have the model. It did not begin.
    #[error("the server does not have the model: {message}")]
    UnknownModel {
        /// The server's words.
        message: String,
    },
    /// A server refused the job with a 4xx. The fault is in the request.
    #[error("{field}: {message}")]
    Rejected {
        /// The HTTP status.
        status: u16,
        /// The part of the job at fault.
        field: String,
        /// The server's words.
        message: String,
    },
    /// The backend failed this job, whose answer it holds to a constraint, and does not say that
    /// the constraint is at fault.
    #[error("{field}: {message}")]
    ConstraintFailed {
        /// The field of the request that the constraint came from.
        field: String,
        /// The backend's reason, or that it gave none.
        message: String,
    },
    /// A media item could not be had from its source.
    #[error(transparent)]
    Source(SourceError),
    /// The backend failed this job alone, for a reason that it keeps in its own log.
    #[error("the engine could not process the request; its log says why")]
    Failed,
    /// The backend kept losing media items that it had been sent.
    #[error("the engine keeps losing the request's media items")]
    KeepsLosingMedia,
    /// Too many outputs were waiting to be read, so the job was aborted.
    #[error("too much of the answer was waiting to be read")]
    Unread,
    /// The backend ended a continuation without saying how.
    #[error("the engine ended the request without a result")]
    Unfinished,
}

/// An index can't read what a backend says of its KV cache. The seam does not look at the index's
/// own error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvSinkError {
    /// A malformed snapshot: nothing is known of the cache.
    #[error(transparent)]
    Snapshot(Box<dyn Error + Send + Sync>),
    /// A malformed batch of events: what it says is lost.
    #[error(transparent)]
    Batch(Box<dyn Error + Send + Sync>),
}

/// What a media source's owner made of its failure: the seam passes it through without a look.
#[derive(Debug)]
pub struct SourceError(Box<dyn Error + Send + Sync>);

impl SourceError {
    /// Wraps the owner's error.
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }

    /// The owner's error, if it is of this type.
    ///
    /// # Errors
    /// The same error when it is of another type.
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
