//! Errors of the jobs and files that frontends on other machines send.

use chiasm_media::MediaError;
use chiasm_types::Modality;

use crate::error::RequestError;

/// The reason why a planned job is refused.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The engine left after the frontend had picked it. The plan is not at fault.
    #[error("the engine is gone")]
    EngineGone,
    /// There are too many tokens, or tokens that the model does not have.
    #[error(transparent)]
    Tokens(RequestError),
    /// A media item differs from the plan that this process computes.
    #[error("media[{number}]: {error}")]
    Item {
        /// The item's index in the job, from 0.
        number: usize,
        /// The problem with the item.
        error: ItemError,
    },
}

/// A problem with a media item that a frontend has planned.
#[derive(Debug, thiserror::Error)]
pub enum ItemError {
    /// The items are not in the order of their placeholders, or placeholders overlap.
    #[error("the placeholder does not follow that of the previous item")]
    Order,
    /// The agent does not process this modality.
    #[error("this agent does not support {0}")]
    Modality(Modality),
    /// The agent accepts files only.
    #[error("this agent does not accept tensors (--take-tensors)")]
    NoTensors,
    /// The agent accepts no cuts of videos.
    #[error("this agent does not accept cuts of videos (--take-tensors)")]
    NoCuts,
    /// The placeholder has no embeddings, or exceeds the prompt.
    #[error("the placeholder is empty or exceeds the prompt")]
    NoPlaceholder,
    /// This process computes another hash for the file and its settings.
    #[error("the item's identity differs: the agent has another model, version or settings")]
    OtherIdentity,
    /// The prompt has other tokens at the placeholder.
    #[error("the agent computes another placeholder")]
    OtherPlaceholder,
    /// The item is too large: the engine would wait for ever with it.
    #[error("the item's {0} tokens are more than the engine can encode at once")]
    TooLarge(usize),
    /// The file is unavailable, or can't be processed for this model.
    #[error(transparent)]
    Processing(#[from] RequestError),
}

/// The reason why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The file is not of its modality, or too large.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The file has another hash than the frontend announced.
    #[error("the file's hash differs from the announced one")]
    OtherContent,
    /// This process is overloaded.
    #[error("the agent is overloaded")]
    Overloaded,
}

/// The reason why the cut of a video is refused.
#[derive(Debug, thiserror::Error)]
pub enum CutError {
    /// This process accepts no cuts.
    #[error("the agent does not accept cuts of videos (--take-tensors)")]
    NotAccepted,
    /// The cut does not have each planned frame once.
    #[error("the frames are not those that were planned")]
    OtherFrames,
}
