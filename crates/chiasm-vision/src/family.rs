//! The trait of an image family, and the kwargs of one request.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::fingerprint::Fingerprint;
use crate::kernels::Normalization;
use crate::{ImagePlan, ImagePrompt, ImageSize, VisionError};

/// One model's settings, and the arithmetic of its layout. The pixel loops lie in `kernels`.
pub(crate) trait Family: Send + Sync + std::fmt::Debug {
    /// The same model with a request's `mm_processor_kwargs` in place of its own settings.
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError>;

    /// Gives the settings in a request's kwargs their other names too, if they have any, so that
    /// one of the engine's kwargs under another name does not win over the request's.
    fn add_other_names(&self, _request: &mut Map<String, Value>) {}

    /// The layout of an image of this size, which is not empty.
    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError>;

    /// The image that vLLM takes to have most embeddings (`get_image_size_with_most_features` of
    /// its models).
    fn largest_image(&self) -> ImageSize;

    /// Embeddings of the video that vLLM takes to have most of them, where a context has so many
    /// tokens, and so many of them are for an image beside it; 0 if the model takes no videos.
    fn largest_video(&self, _context: usize, _image: usize) -> usize {
        0
    }

    /// Writes every setting that changes an image's tensors or the tokens of its placeholder, and
    /// no other. Families that share a `model_type` differ in the names that they write.
    fn fingerprint(&self, out: &mut Fingerprint);

    /// What happens to each channel's value if the pixels are not handed over raw.
    fn normalization(&self) -> &Normalization;

    /// How an image is written in a prompt.
    fn prompt(&self) -> &ImagePrompt;

    /// See [`VisionModel::counted_rows`](crate::VisionModel::counted_rows).
    fn counted_rows(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
}

/// Settings of one request that override the model directory's: its `mm_processor_kwargs`, parsed
/// by [`crate::VisionModel::parse_kwargs`]. The default overrides nothing.
#[derive(Clone, Debug, Default)]
pub struct ImageKwargs(pub(crate) Option<Arc<dyn Family>>);
