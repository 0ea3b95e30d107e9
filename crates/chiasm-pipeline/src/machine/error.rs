//! Why jobs and files of other frontends are not taken.

use chiasm_media::MediaError;
use chiasm_types::Modality;

use crate::error::RequestError;

/// Why what a frontend has planned is not given to the engine.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The engine left after the frontend had picked it. The plan is not at fault.
    #[error("the engine is gone")]
    EngineGone,
    /// The tokens are none of the model's, or too many.
    #[error(transparent)]
    Tokens(RequestError),
    /// A media item is not what it would be here.
    #[error("media[{number}]: {error}")]
    Item {
        /// Its place among the job's, from 0.
        number: usize,
        /// What is wrong with it.
        error: ItemError,
    },
}

/// What is wrong with a media item that a frontend has planned.
#[derive(Debug, thiserror::Error)]
pub enum ItemError {
    /// Items come in the order of their places, which do not overlap.
    #[error("its place is not behind that of the one before")]
    Order,
    /// The agent does not process this modality.
    #[error("this agent takes no {0}")]
    Modality(Modality),
    /// The agent processes files only.
    #[error("this agent takes no tensors (--take-tensors)")]
    NoTensors,
    /// Nothing embeds there, or it reaches beyond the prompt.
    #[error("its placeholder is none")]
    NoPlaceholder,
    /// The file and its settings have another hash here.
    #[error("its identity is another one here: the agent's model, settings or version are others")]
    OtherIdentity,
    /// The prompt has other tokens there.
    #[error("its placeholder is another one here")]
    OtherPlaceholder,
    /// An engine would wait for ever with it.
    #[error("its {0} tokens are more than the engine can encode at once")]
    TooLarge(usize),
    /// The file is not to be had, or no item of this model.
    #[error(transparent)]
    Processing(#[from] RequestError),
}

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// It is not what it is called, or too large.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// It has another hash than it was said to have.
    #[error("the bytes are not those of this content")]
    OtherContent,
    /// There is no time to look at it.
    #[error("too much else is to be done")]
    Overloaded,
}
