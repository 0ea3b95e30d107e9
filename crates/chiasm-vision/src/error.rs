//! All that can go wrong, and whose fault it is.

use std::path::PathBuf;

use chiasm_types::Dtype;

use crate::{ImageSize, VocabularyError};

/// Why an image cannot be planned or processed, or a model not be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// A file of the model directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of the model directory is not a JSON object.
    #[error("{} is not a JSON object: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        problem: String,
    },
    /// The model takes images, but nothing says how.
    #[error(
        "{} has neither a processor_config.json with an image_processor nor a preprocessor_config.json: \
         copy it from the model's repository",
        dir.display()
    )]
    NoImageProcessor {
        /// The model directory.
        dir: PathBuf,
    },
    /// The `model_type` of config.json has no entry in the table of families.
    #[error("images of model_type {model_type:?} are not supported, only of {}", known.join(", "))]
    UnknownFamily {
        /// The one found, empty if missing.
        model_type: String,
        /// Supported ones.
        known: Vec<&'static str>,
    },
    /// The family is known, but not with this image processor.
    #[error(
        "image_processor_type {found:?} is not supported for model_type {model_type:?}, only {}",
        known.join(", ")
    )]
    UnknownImageProcessor {
        /// What was found.
        found: String,
        /// The `model_type` of config.json.
        model_type: &'static str,
        /// Supported ones.
        known: &'static [&'static str],
    },
    /// A setting of the model directory cannot be honoured.
    #[error("{key} in {} {problem}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// Completes the sentence "key in file …".
        problem: String,
    },
    /// The environment variable `CHIASM_KERNELS` names no [`crate::Implementation`] that this CPU
    /// can run.
    #[error("{} is {name:?}, but this CPU can run only {}", crate::kernels::VARIABLE, available.join(", "))]
    UnknownKernels {
        /// What was found.
        name: String,
        /// What it may be.
        available: Vec<&'static str>,
    },
    /// A key of `mm_processor_kwargs` that is not implemented.
    #[error(
        "mm_processor_kwargs.{key} is not supported, {}{}",
        if known.is_empty() { "this model takes none" } else { "only " },
        known.join(", ")
    )]
    UnknownKwarg {
        /// The key, with its parent if nested: `size.height`.
        key: String,
        /// Supported ones.
        known: &'static [&'static str],
    },
    /// A value in `mm_processor_kwargs` that the model's processor refuses.
    #[error("mm_processor_kwargs.{key} {problem}")]
    InvalidKwarg {
        /// The key, with its parent if nested: `size.shortest_edge`.
        key: &'static str,
        /// Completes the sentence "mm_processor_kwargs.key …".
        problem: String,
    },
    /// No pixels.
    #[error("an image of {size} pixels is empty")]
    EmptyImage {
        /// Its size.
        size: ImageSize,
    },
    /// More stretched than the model's processor takes.
    #[error(
        "an image of {size} pixels is too stretched: its sides may differ by a factor of {limit} at most"
    )]
    AspectRatio {
        /// Its size.
        size: ImageSize,
        /// Largest ratio of the longer to the shorter side.
        limit: u32,
    },
    /// It would be resized beyond what can be handed over.
    #[error(
        "an image of {size} pixels would be resized to {width}x{height}: lower min_pixels or max_pixels"
    )]
    TooLarge {
        /// Its size.
        size: ImageSize,
        /// Width after resizing, possibly infinite.
        width: f64,
        /// Height after resizing, possibly infinite.
        height: f64,
    },
    /// The image would not have the one size that the model's vision tower takes.
    #[error(
        "an image of {size} pixels would become {found}, but the model takes {expected}: change size or crop_size"
    )]
    TowerSize {
        /// Its size.
        size: ImageSize,
        /// Size after resizing and cropping.
        found: ImageSize,
        /// Size that the vision tower takes.
        expected: ImageSize,
    },
    /// The settings allow two arrangements of tiles for this image, and which one the model's
    /// processor takes depends on the order of a Python set.
    #[error(
        "an image of {size} pixels can be tiled in two ways that are equally good: lower min_dynamic_patch"
    )]
    AmbiguousTiles {
        /// Its size.
        size: ImageSize,
    },
    /// The tokenizer lacks a token that the family puts around images.
    #[error("the tokenizer has no token {token:?}, which {model_type} models need")]
    MissingToken {
        /// The token's text.
        token: &'static str,
        /// The family.
        model_type: &'static str,
    },
    /// The tokenizer fails on a text that the family puts around images.
    #[error("the tokenizer cannot encode {text:?}: {source}")]
    Tokenizer {
        /// The text.
        text: String,
        /// Why.
        source: VocabularyError,
    },
    /// The model directory turns resizing off, and this image does not consist of whole patches.
    #[error(
        "an image of {size} pixels is not a multiple of {factor} in both sides, and do_resize is off"
    )]
    Indivisible {
        /// Its size.
        size: ImageSize,
        /// Patch size times merge size.
        factor: u32,
    },
    /// A buffer does not hold the image that it is said to hold.
    #[error("an image of {size} pixels has {expected} bytes, not {found}")]
    PixelCount {
        /// Its size.
        size: ImageSize,
        /// 3 · width · height.
        expected: u128,
        /// Length of the buffer.
        found: usize,
    },
    /// The image is not the one that was planned.
    #[error("planned for an image of {planned} pixels, got one of {found}")]
    OtherImage {
        /// [`crate::ImagePlan::original`].
        planned: ImageSize,
        /// Size of the image handed in.
        found: ImageSize,
    },
    /// The output buffer is not [`crate::ImagePlan::pixel_bytes`] long.
    #[error("the pixel tensor has {expected} bytes, the buffer for it {found}")]
    OutputLength {
        /// [`crate::ImagePlan::pixel_bytes`].
        expected: usize,
        /// Length of the buffer.
        found: usize,
    },
    /// Normalised pixels are asked for in a type that cannot hold them.
    #[error("normalised pixels cannot be written as {}", .0.torch_name())]
    NotAFloat(Dtype),
}

/// The one who can mend a [`VisionError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client's: its image or its `mm_processor_kwargs`. The same request fails again.
    Request,
    /// The operator's: the model directory or the environment. Nothing can be served.
    Model,
    /// Chiasm's own: a contract between crates is broken.
    Program,
}

impl VisionError {
    /// The one who can mend it.
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Read { .. }
            | Self::Json { .. }
            | Self::NoImageProcessor { .. }
            | Self::UnknownFamily { .. }
            | Self::UnknownImageProcessor { .. }
            | Self::Setting { .. }
            | Self::MissingToken { .. }
            | Self::Tokenizer { .. }
            | Self::UnknownKernels { .. } => Fault::Model,
            Self::UnknownKwarg { .. }
            | Self::InvalidKwarg { .. }
            | Self::EmptyImage { .. }
            | Self::AspectRatio { .. }
            | Self::TooLarge { .. }
            | Self::TowerSize { .. }
            | Self::AmbiguousTiles { .. }
            | Self::Indivisible { .. } => Fault::Request,
            Self::PixelCount { .. }
            | Self::OtherImage { .. }
            | Self::OutputLength { .. }
            | Self::NotAFloat(_) => Fault::Program,
        }
    }
}
