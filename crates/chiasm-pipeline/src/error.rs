//! Errors of requests. `error.rs` of `chiasm-server` maps them to HTTP statuses.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{DeathReason, JobError};
use chiasm_fleet::WorkerFault;
use chiasm_media::{Fault, MediaError};
use chiasm_processor::ProcessorError;
use chiasm_prompt::PromptError;
use chiasm_router::RouteError;
use chiasm_vision::VisionError;
use tokio::time::Instant;

use super::past_attempts::Attempts;
use chiasm_cpu::CpuError;

/// The error of a failed request, and the field at fault, if one is.
#[derive(Clone, Debug)]
pub struct RequestError {
    /// The cause of the failure.
    pub cause: Cause,
    /// The field at fault, such as `messages[2].content[1].image_url`.
    pub field: Option<String>,
}

/// The cause of a request's failure.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The request is invalid. The client can fix that by changing the field.
    #[error("{0}")]
    Invalid(String),
    /// The prompt has more media items than allowed.
    #[error("{0}")]
    TooManyItems(String),
    /// The CPU pool did not do the request's work.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens; \
         this model's context of {max_model_len} leaves no room for an answer"
    )]
    ContextFull {
        /// The number of tokens of the expanded prompt, or a lower bound.
        tokens: usize,
        /// The maximum number of tokens of prompt and answer together.
        max_model_len: usize,
    },
    /// A media item could not be loaded.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The prompt could not be rendered, tokenized or expanded.
    #[error(transparent)]
    Prompt(Arc<PromptError>),
    /// An image can't be processed for the model.
    #[error(transparent)]
    Image(Arc<VisionError>),
    /// vLLM's own processor failed with an item or with the prompt.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    /// No worker can accept the request now.
    #[error("{0}")]
    NoWorker(String),
    /// All workers that could accept the request are suspect.
    #[error("all workers are unresponsive; try again later")]
    Silent,
    /// No worker has the LoRA adapter, for this reason.
    #[error("{0}")]
    NoAdapter(String),
    /// All workers are busy or drain.
    #[error("{0}")]
    Busy(RouteError),
    /// The engine died, and no other could be tried.
    #[error("the engine is gone: {0}")]
    EngineGone(DeathReason),
    /// A server failed, with this HTTP status, and no other worker could be tried.
    #[error("an upstream server failed: {message}")]
    ServerFailed {
        /// The HTTP status of the answer; 504 if none came in time, 502 if the connection broke.
        status: u16,
        /// The server's error message, without its address.
        message: String,
    },
    /// The servers refuse the operator's key.
    #[error(
        "an upstream server refused the API key, which the operator of this server configured: \
         {message}"
    )]
    KeyRefused {
        /// The server's error message, without its address.
        message: String,
    },
    /// The servers are overloaded.
    #[error("the upstream servers are overloaded: {message}")]
    Overloaded {
        /// The HTTP status of the answer, 429 or 503.
        status: u16,
        /// The shortest pause that a server requested.
        retry_after: Duration,
        /// The server's error message, without its address.
        message: String,
    },
    /// The servers do not have the model.
    #[error("the upstream servers do not have the model: {message}")]
    UnknownModel {
        /// The server's error message, without its address.
        message: String,
    },
    /// A server rejected the request with a 4xx status.
    #[error("{message}")]
    Rejected {
        /// The HTTP status of the answer.
        status: u16,
        /// The server's error message.
        message: String,
    },
    /// An engine died or hangs, and no other can accept the request.
    #[error("the engine failed and no other engine can accept the request")]
    NoOtherWorker,
    /// No engine accepts the request, but a server that accepts messages may.
    #[error("{cause}")]
    LeftToServers {
        /// The cause of the failure if there were no such server.
        cause: Box<Cause>,
        /// The attempts so far.
        attempts: Attempts,
    },
    /// The prompt was in several engines when they died.
    #[error(
        "several engines died while they processed this prompt; \
         it is quarantined for now (--quarantine)"
    )]
    Quarantined,
    /// The request took too long.
    #[error(
        "{} within {} s ({flag})",
        if *.flag == "--first-token-timeout" {
            "the first token did not arrive"
        } else {
            "the answer did not end"
        },
        after.as_secs_f64()
    )]
    TimedOut {
        /// The time limit.
        after: Duration,
        /// The flag that sets the limit.
        flag: &'static str,
    },
    /// This program or the engine is at fault.
    #[error("{0}")]
    Internal(String),
}

impl Cause {
    /// Returns `true` if the request's image can't be processed, but another image could be.
    pub fn is_image_fault_of_request(&self) -> bool {
        matches!(self, Self::Image(error) if error.fault() == chiasm_vision::Fault::Request)
    }
}

impl RequestError {
    /// Creates an error that the client can fix by changing `field`.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { cause: Cause::Invalid(message.into()), field: Some(field.into()) }
    }

    /// Creates an error for which this program or the engine is at fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Cause::Internal(message.into()).into()
    }

    /// Creates the error of a media item whose tensors do not fit the prompt that was planned for
    /// it. The cached plan must have been replaced before, or planning again would repeat it.
    pub(super) fn stale_plan(reason: impl Into<String>) -> Self {
        ProcessorError::Unavailable(format!("{}; try again", reason.into())).into()
    }

    /// Creates the error for requests before any engine has connected.
    pub fn not_ready() -> Self {
        Cause::NoWorker("no engine is ready yet".to_owned()).into()
    }

    /// Sets the field at fault, unless it is set already.
    #[must_use]
    pub fn at(mut self, field: &str) -> Self {
        self.field.get_or_insert_with(|| field.to_owned());
        self
    }

    /// Returns `true` if the same item would fail again in the same way, because the client's data
    /// is at fault.
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
            Cause::Image(_) => self.cause.is_image_fault_of_request(),
            Cause::Processor(error) => matches!(
                error,
                ProcessorError::Refused(_)
                    | ProcessorError::TimedOut { .. }
                    | ProcessorError::ChildDied
                    | ProcessorError::InvalidReply(_)
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

impl From<CpuError> for RequestError {
    fn from(error: CpuError) -> Self {
        Cause::Cpu(error).into()
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

impl From<DeathReason> for Cause {
    fn from(death: DeathReason) -> Self {
        Self::EngineGone(death)
    }
}

impl From<WorkerFault> for Cause {
    fn from(fault: WorkerFault) -> Self {
        match fault {
            WorkerFault::Failed { status, message } => Self::ServerFailed { status, message },
            WorkerFault::KeyRefused { message } => Self::KeyRefused { message },
            WorkerFault::Overloaded { status, until, message } => {
                let retry_after = until.saturating_duration_since(Instant::now());
                Self::Overloaded { status, retry_after, message }
            }
            WorkerFault::UnknownModel { message } => Self::UnknownModel { message },
        }
    }
}

impl From<RouteError> for RequestError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::Busy(_) | RouteError::Drained => Cause::Busy(error).into(),
            RouteError::Suspect(_) => Cause::Silent.into(),
            error => Cause::NoWorker(error.to_string()).into(),
        }
    }
}

impl From<JobError> for RequestError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Dead(death) | JobError::NotTaken(death) => Cause::EngineGone(death).into(),
            JobError::Refused { field, message } => Self::invalid(field, message),
            JobError::Rejected { status, field, message } => {
                Self { cause: Cause::Rejected { status, message }, field: Some(field) }
            }
            JobError::ServerFailed { status, message } => {
                Cause::ServerFailed { status, message }.into()
            }
            JobError::KeyRefused { message, .. } => Cause::KeyRefused { message }.into(),
            JobError::Overloaded { status, retry_after, message } => {
                Cause::Overloaded { status, retry_after, message }.into()
            }
            JobError::UnknownModel { message } => Cause::UnknownModel { message }.into(),
            JobError::ConstraintFailed { field, message } => Self::internal(message).at(&field),
            // Our own sources return `RequestError`. Any other error there is a bug.
            JobError::Source(error) => error
                .downcast()
                .map_or_else(|other| Self::internal(other.to_string()), |error| *error),
            error => Self::internal(error.to_string()),
        }
    }
}
