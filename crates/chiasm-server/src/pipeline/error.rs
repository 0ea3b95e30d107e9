//! Why the pipeline can't answer a request. `error.rs` of this crate alone says which HTTP status that is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Death, JobError};
use chiasm_media::{Fault, MediaError};
use chiasm_processor::ProcessorError;
use chiasm_prompt::PromptError;
use chiasm_router::RouteError;
use chiasm_vision::VisionError;

use super::generation::Attempts;

/// A failed request: what went wrong, and the request's field at fault where it is one's.
#[derive(Clone, Debug)]
pub(crate) struct RequestError {
    /// What went wrong.
    pub cause: Cause,
    /// The field, such as `messages[2].content[1].image_url`.
    pub field: Option<String>,
}

/// What went wrong with a request.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Cause {
    /// The client can fix it by changing the field.
    #[error("{0}")]
    Invalid(String),
    /// The prompt has more media items than allowed.
    #[error("{0}")]
    TooManyItems(String),
    /// The request asks for more work of this process than one may.
    #[error(
        "the request needs {:.1} s of this server's CPU time by estimate, at most {} s are allowed (--max-request-cost)",
        cost.as_secs_f64(),
        limit.as_secs_f64()
    )]
    TooCostly {
        /// What it would have asked for in all.
        cost: Duration,
        /// What it may ask for.
        limit: Duration,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens; this model's context of {max_model_len} leaves no room for an answer")]
    ContextFull {
        /// Tokens of the expanded prompt, at least.
        tokens: usize,
        /// Tokens of prompt and answer together.
        max_model_len: usize,
    },
    /// A media item could not be had.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The prompt could not be made.
    #[error(transparent)]
    Prompt(Arc<PromptError>),
    /// An image can't be what the model takes.
    #[error(transparent)]
    Image(Arc<VisionError>),
    /// vLLM's own processor made nothing of an item, or of the prompt.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    /// No worker can take the request now.
    #[error("{0}")]
    NoWorker(String),
    /// No worker has the LoRA adapter, for this reason.
    #[error("{0}")]
    NoAdapter(String),
    /// All workers are busy.
    #[error("{0}")]
    Busy(RouteError),
    /// The engine died, and no other one could be tried.
    #[error("the engine is gone: {0}")]
    EngineGone(Death),
    /// An engine died or hangs, and no other can take the request.
    #[error("the engine failed and no other can take the request")]
    NoOtherWorker,
    /// No worker that is given tokens takes the request, for this reason, and a server that is given messages may.
    #[error("{why}")]
    LeftToServers {
        /// What it would be told if there were no such server.
        why: Box<Cause>,
        /// What it has been through.
        tried: Attempts,
    },
    /// The prompt was in several engines when they died.
    #[error("this prompt was in several engines when they died; it is not given to another one for now (--quarantine)")]
    Quarantined,
    /// The request took too long.
    #[error("{} within {} s ({flag})", if *.flag == "--first-token-timeout" { "no token came" } else { "the answer did not end" }, after.as_secs_f64())]
    TimedOut {
        /// The time that it had.
        after: Duration,
        /// The flag that limits it.
        flag: &'static str,
    },
    /// The fault is ours or the engine's.
    #[error("{0}")]
    Internal(String),
}

impl RequestError {
    /// The client can fix it by changing `field`.
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { cause: Cause::Invalid(message.into()), field: Some(field.into()) }
    }

    /// The fault is ours or the engine's.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Cause::Internal(message.into()).into()
    }

    /// No engine has said yet what it is.
    pub(crate) fn not_ready() -> Self {
        Cause::NoWorker("no engine is ready yet".to_owned()).into()
    }

    /// Names the field when the error does not yet name one.
    #[must_use]
    pub(crate) fn at(mut self, field: &str) -> Self {
        self.field.get_or_insert_with(|| field.to_owned());
        self
    }

    /// Whether the same item will fail in the same way again: the fault is in what the client sent.
    pub(super) fn is_permanent(&self) -> bool {
        match &self.cause {
            Cause::Invalid(_) | Cause::TooManyItems(_) | Cause::ContextFull { .. } => true,
            Cause::Media(error) => matches!(
                error.fault(),
                Fault::BadRequest
                    | Fault::Forbidden
                    | Fault::NotFound
                    | Fault::TooLarge
                    | Fault::Unsupported
                    | Fault::Corrupt
            ),
            Cause::Prompt(error) => error.is_request_fault(),
            Cause::Image(error) => error.fault() == chiasm_vision::Fault::Request,
            Cause::Processor(error) => matches!(
                error,
                ProcessorError::Refused(_)
                    | ProcessorError::TimedOut { .. }
                    | ProcessorError::Died
                    | ProcessorError::Nonsense(_)
            ),
            _ => false,
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl std::error::Error for RequestError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.cause)
    }
}

impl From<Cause> for RequestError {
    fn from(cause: Cause) -> Self {
        Self { cause, field: None }
    }
}

impl From<MediaError> for RequestError {
    fn from(error: MediaError) -> Self {
        Cause::Media(error).into()
    }
}

impl From<ProcessorError> for RequestError {
    fn from(error: ProcessorError) -> Self {
        Cause::Processor(error).into()
    }
}

impl From<VisionError> for RequestError {
    fn from(error: VisionError) -> Self {
        Cause::Image(Arc::new(error)).into()
    }
}

impl From<PromptError> for RequestError {
    fn from(error: PromptError) -> Self {
        Cause::Prompt(Arc::new(error)).into()
    }
}

impl From<RouteError> for RequestError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::Busy(_) => Cause::Busy(error).into(),
            error => Cause::NoWorker(error.to_string()).into(),
        }
    }
}

impl From<JobError> for RequestError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Dead(death) | JobError::NotTaken(death) => Cause::EngineGone(death).into(),
            JobError::Refused { field, message } => Self::invalid(field, message),
            // What a source of ours says is ours; what else comes by that way is a fault of the program.
            JobError::Source(error) => {
                error.downcast().map_or_else(|other| Self::internal(other.to_string()), |ours| *ours)
            }
            error => Self::internal(error.to_string()),
        }
    }
}
