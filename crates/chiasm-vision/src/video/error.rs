//! The reasons why a video is not planned.

use crate::{Fault, ImageSize, VisionError};

/// The reason why a video cannot be planned. vLLM's own processor handles such a video, or refuses
/// it with an error of its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VideoPlanError {
    /// The model's family has no planned videos.
    #[error("videos of model_type {model_type:?} are not planned")]
    Family {
        /// The `model_type` of config.json; empty if missing.
        model_type: String,
    },
    /// An error of the code that videos share with images: of the model directory, of a setting of
    /// the request, or of the frames' size.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// A setting of the model or of the engine is not supported for videos.
    #[error("{key} {problem}")]
    Setting {
        /// The name of the setting.
        key: &'static str,
        /// The end of the sentence "key …".
        problem: String,
    },
    /// A key of `mm_processor_kwargs` or `media_io_kwargs.video` whose effect is not implemented.
    #[error("{scope}.{key} is not planned")]
    UnknownKwarg {
        /// `mm_processor_kwargs` or `media_io_kwargs.video`.
        scope: &'static str,
        /// The key.
        key: String,
    },
    /// A value in `mm_processor_kwargs` or `media_io_kwargs.video` whose effect is not implemented.
    #[error("{scope}.{key} {problem}")]
    InvalidKwarg {
        /// `mm_processor_kwargs` or `media_io_kwargs.video`.
        scope: &'static str,
        /// The key.
        key: &'static str,
        /// The end of the sentence "scope.key …".
        problem: String,
    },
    /// vLLM fails on a video with these properties, or its result is not known.
    #[error("a video of {frames} frames of {size} pixels at {fps} frames per second {problem}")]
    Video {
        /// The number of frames.
        frames: u64,
        /// The frames per second.
        fps: f64,
        /// The size of a frame.
        size: ImageSize,
        /// The end of the sentence "a video …".
        problem: String,
    },
}

impl VideoPlanError {
    /// Returns a short name of the cause, for metrics.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Family { .. } => "family",
            Self::Vision(error) => match (error.fault(), error) {
                (_, VisionError::UnknownKwarg { .. }) => "unknown_kwarg",
                (_, VisionError::InvalidKwarg { .. }) => "invalid_kwarg",
                (Fault::Request, _) => "video",
                (Fault::Model | Fault::Program, _) => "model",
            },
            Self::Setting { .. } => "setting",
            Self::UnknownKwarg { .. } => "unknown_kwarg",
            Self::InvalidKwarg { .. } => "invalid_kwarg",
            Self::Video { .. } => "video",
        }
    }
}
