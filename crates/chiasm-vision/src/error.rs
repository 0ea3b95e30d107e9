//! The errors of this crate, and the party that can fix each of them.

use std::path::PathBuf;

use chiasm_types::Dtype;

use crate::{ImageSize, VocabularyError};

/// An error from loading a model, planning an image or processing one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// A file of the model directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A file of the model directory is not a JSON object.
    #[error("{} is not a JSON object: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The message of the JSON parser.
        problem: String,
    },
    /// The model takes images, but its directory has no settings of an image processor.
    #[error(
        "{} has neither a processor_config.json with an image_processor nor a \
         preprocessor_config.json: copy it from the model's repository",
        dir.display()
    )]
    NoImageProcessor {
        /// The model directory.
        dir: PathBuf,
    },
    /// The `model_type` of config.json has no entry in the table of families.
    #[error(
        "images of model_type {model_type:?} are not supported; supported: {}",
        known.join(", ")
    )]
    UnknownFamily {
        /// The `model_type`; empty if missing.
        model_type: String,
        /// The supported model types.
        known: Vec<&'static str>,
    },
    /// The family is known, but this image processor is not supported for it.
    #[error(
        "image_processor_type {found:?} is not supported for model_type {model_type:?}; \
         supported: {}",
        known.join(", ")
    )]
    UnknownImageProcessor {
        /// The `image_processor_type` of the model directory.
        found: String,
        /// The `model_type` of config.json.
        model_type: &'static str,
        /// The supported image processors.
        known: &'static [&'static str],
    },
    /// A setting of the model directory is invalid or not supported.
    #[error("{key} in {} {problem}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The name of the setting.
        key: &'static str,
        /// The end of the sentence "key in file …".
        problem: String,
    },
    /// The environment variable `CHIASM_KERNELS` does not name a [`crate::Implementation`] that
    /// this CPU can run.
    #[error(
        "{} is {name:?}, but this CPU can run only {}",
        crate::kernels::KERNELS_ENV,
        available.join(", ")
    )]
    UnknownKernels {
        /// The value of the variable.
        name: String,
        /// The implementations that this CPU can run.
        available: Vec<&'static str>,
    },
    /// A key of `mm_processor_kwargs` that is not implemented.
    #[error(
        "mm_processor_kwargs.{key} is not supported; {}{}",
        if known.is_empty() { "this model supports none" } else { "supported: " },
        known.join(", ")
    )]
    UnknownKwarg {
        /// The key, with its parent if nested: `size.height`.
        key: String,
        /// The supported keys.
        known: &'static [&'static str],
    },
    /// A value in `mm_processor_kwargs` that the model's processor refuses.
    #[error("mm_processor_kwargs.{key} {problem}")]
    InvalidKwarg {
        /// The key, with its parent if nested: `size.shortest_edge`.
        key: &'static str,
        /// The end of the sentence "mm_processor_kwargs.key …".
        problem: String,
    },
    /// The image has no pixels.
    #[error("an image of {size} pixels is empty")]
    EmptyImage {
        /// The size of the image.
        size: ImageSize,
    },
    /// The ratio of the image's sides is larger than the model's processor accepts.
    #[error(
        "the aspect ratio of an image of {size} pixels is too large: at most {limit}:1 is supported"
    )]
    AspectRatio {
        /// The size of the image.
        size: ImageSize,
        /// The largest accepted ratio of the longer to the shorter side.
        limit: u32,
    },
    /// The resized image would be too large for the engine or for memory.
    #[error(
        "an image of {size} pixels would be resized to {width}x{height}: lower min_pixels or \
         max_pixels"
    )]
    TooLarge {
        /// The size of the image.
        size: ImageSize,
        /// The width after resizing; may be infinite.
        width: f64,
        /// The height after resizing; may be infinite.
        height: f64,
    },
    /// The processed image would not have the size that the model's vision tower takes.
    #[error(
        "an image of {size} pixels would become {found}, but the model takes {expected}: change \
         size or crop_size"
    )]
    TowerSize {
        /// The size of the image.
        size: ImageSize,
        /// The size after resizing and cropping.
        found: ImageSize,
        /// The size that the vision tower takes.
        expected: ImageSize,
    },
    /// Two arrangements of tiles fit this image equally well. The model's processor picks one by
    /// the iteration order of a Python set.
    #[error(
        "an image of {size} pixels can be tiled in two ways that are equally good: lower \
         min_dynamic_patch"
    )]
    AmbiguousTiles {
        /// The size of the image.
        size: ImageSize,
    },
    /// The tokenizer lacks a token that the family places around images.
    #[error("the tokenizer has no token {token:?}, which {model_type} models need")]
    MissingToken {
        /// The token's text.
        token: &'static str,
        /// The `model_type` of the family.
        model_type: &'static str,
    },
    /// The tokenizer cannot encode a text that the family places around images.
    #[error("the tokenizer cannot encode {text:?}: {source}")]
    Tokenizer {
        /// The text.
        text: String,
        /// The error of the vocabulary.
        source: VocabularyError,
    },
    /// Resizing is off in the model directory, and the image does not consist of whole patches.
    #[error(
        "an image of {size} pixels is not resized because do_resize is off, but both sides must be \
        multiples of {factor}"
    )]
    Indivisible {
        /// The size of the image.
        size: ImageSize,
        /// The patch size times the merge size, in pixels.
        factor: u32,
    },
    /// The length of a pixel buffer does not match the size of its image.
    #[error("an image of {size} pixels has {expected} bytes, not {found}")]
    PixelCount {
        /// The size of the image.
        size: ImageSize,
        /// `3 * width * height`.
        expected: u128,
        /// The length of the buffer in bytes.
        found: usize,
    },
    /// The image has another size than the planned one.
    #[error("planned for an image of {planned} pixels, got one of {found}")]
    SizeMismatch {
        /// [`crate::ImagePlan::original`].
        planned: ImageSize,
        /// The size of the image to process.
        found: ImageSize,
    },
    /// The plan of a video has no frame of this index.
    #[error("the plan has {frames} frames, so none of index {index}")]
    FrameIndex {
        /// The index of the frame to process.
        index: usize,
        /// The number of planned frames.
        frames: usize,
    },
    /// The output buffer is not [`crate::ImagePlan::pixel_bytes`] long.
    #[error("the pixel tensor has {expected} bytes, the buffer for it {found}")]
    OutputLength {
        /// [`crate::ImagePlan::pixel_bytes`].
        expected: usize,
        /// The length of the buffer in bytes.
        found: usize,
    },
    /// Normalised pixels are requested in a type that is not a supported float.
    #[error("normalised pixels cannot be written as {}", .0.torch_name())]
    NotAFloat(Dtype),
}

/// The party that can fix a [`VisionError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client: its image or its `mm_processor_kwargs` are invalid. A retry fails again.
    Request,
    /// The operator: the model directory or the environment is invalid. The model cannot be
    /// served.
    Model,
    /// The program: the caller broke a contract of this crate.
    Program,
}

impl VisionError {
    /// Returns the party that can fix the error.
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
            | Self::SizeMismatch { .. }
            | Self::FrameIndex { .. }
            | Self::OutputLength { .. }
            | Self::NotAFloat(_) => Fault::Program,
        }
    }
}
