//! The trait of an image family, and the parsed kwargs of a request.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::fingerprint::Fingerprint;
use crate::kernels::Normalization;
use crate::{ImagePlan, ImagePrompt, ImageSize, VisionError};

/// The settings of one model and the arithmetic of its layouts. The pixel loops are in `kernels`.
pub(crate) trait Family: Send + Sync + std::fmt::Debug {
    /// Returns the same model with `mm_processor_kwargs` in place of its own settings.
    ///
    /// # Errors
    /// [`VisionError::UnknownKwarg`] and [`VisionError::InvalidKwarg`].
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError>;

    /// Adds the other names of each setting in a request's kwargs, where vLLM adds them.
    ///
    /// Without them, an engine's kwarg under another name overrides the request's setting.
    fn add_aliases(&self, _request: &mut Map<String, Value>) {}

    /// Returns the layout of a non-empty image of this size.
    ///
    /// # Errors
    /// The errors of [`Fault::Request`](crate::Fault::Request).
    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError>;

    /// Returns the image size for which vLLM assumes the most embeddings
    /// (`get_image_size_with_most_features` of its models).
    fn largest_image(&self) -> ImageSize;

    /// Returns the number of embeddings that vLLM assumes for the largest video, or 0 if the model
    /// takes no videos.
    ///
    /// The context has `context_tokens` tokens, of which an image takes `image_tokens`.
    fn largest_video(&self, _context_tokens: usize, _image_tokens: usize) -> usize {
        0
    }

    /// Writes every setting that changes an image's tensors or its placeholder's tokens, and no
    /// other setting.
    ///
    /// Families that share a `model_type` must write different names.
    fn fingerprint(&self, out: &mut Fingerprint);

    /// Returns the normalisation of each channel, for pixels that are not passed on raw.
    fn normalization(&self) -> &Normalization;

    /// Returns the text and tokens that represent an image in a prompt.
    fn prompt(&self) -> &ImagePrompt;

    /// Returns the pairs of [`VisionModel::counted_rows`](crate::VisionModel::counted_rows).
    fn counted_rows(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
}

/// A request's `mm_processor_kwargs`, parsed by [`crate::VisionModel::parse_kwargs`].
///
/// They override the settings of the model directory. The default overrides nothing.
#[derive(Clone, Debug, Default)]
pub struct ImageKwargs(pub(crate) Option<Arc<dyn Family>>);
