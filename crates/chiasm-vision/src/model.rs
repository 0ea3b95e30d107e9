//! The public entry point: plans and processes the images of one model.

use std::path::Path;
use std::sync::Arc;

use chiasm_types::{Dtype, VllmVersion};
use half::{bf16, f16};
use serde_json::{Map, Value};

use crate::engine_kwargs;
use crate::families::{self, FamilyEntry};
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::kernels::{Elements, Implementation, Job, Parallelism};
use crate::model_dir::ModelDir;
use crate::{
    ImageKwargs, ImagePlan, ImagePrompt, ImageSize, PixelFormat, RgbView, VisionError, Vocabulary,
};

/// The kinds of media that an engine accepts, among those that its model supports:
/// `--limit-mm-per-prompt` of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedMedia {
    /// `true` if the engine accepts images.
    pub images: bool,
    /// `true` if the engine accepts videos.
    pub videos: bool,
}

impl AcceptedMedia {
    /// Every kind that the model supports.
    pub const ALL: Self = Self { images: true, videos: true };
}

/// The image family and settings of one model. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct VisionModel {
    entry: &'static FamilyEntry,
    /// The family with the settings of the model directory.
    base: Arc<dyn Family>,
    engine_kwargs: Map<String, Value>,
    /// `base` with `engine_kwargs`.
    family: Arc<dyn Family>,
    /// The fingerprint of a request without kwargs, cached because most requests need it.
    fingerprint: Vec<u8>,
    kernels: Implementation,
}

impl VisionModel {
    /// Reads `config.json` and the image processor's settings from a model directory.
    ///
    /// The settings come from `processor_config.json`, else from `preprocessor_config.json`.
    /// Returns `Ok(None)` for a text-only model, which has no `vision_config`. `vocabulary` is the
    /// model's tokenizer, for families whose placeholders have tokens that config.json does not
    /// name.
    ///
    /// # Errors
    /// The errors of [`crate::Fault::Model`]: an unreadable file, an unsupported family or
    /// processor, a setting that cannot be applied exactly, or a `CHIASM_KERNELS` that names no
    /// available [`Implementation`].
    pub fn from_model_dir(
        dir: &Path,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Option<Self>, VisionError> {
        let Some(dir) = ModelDir::read(dir)? else {
            return Ok(None);
        };
        let entry = families::find(&dir)?;
        let kernels =
            Implementation::selected().map_err(|unknown| VisionError::UnknownKernels {
                name: unknown.0.clone(),
                available: Implementation::available().map(Implementation::name).collect(),
            })?;
        let base = (entry.build)(&dir, vocabulary)?;
        let fingerprint = fingerprint(entry, base.as_ref());
        Ok(Some(Self {
            entry,
            family: base.clone(),
            base,
            engine_kwargs: Map::new(),
            fingerprint,
            kernels,
        }))
    }

    /// Overrides the settings of the model directory for all requests, as
    /// `--mm-processor-kwargs` of vLLM does.
    ///
    /// The accepted keys are those of [`VisionModel::parse_kwargs`]. A request's kwargs override
    /// these settings key by key, recursively within objects.
    ///
    /// # Errors
    /// The errors of [`VisionModel::parse_kwargs`].
    pub fn with_engine_kwargs(self, kwargs: Map<String, Value>) -> Result<Self, VisionError> {
        let family = self.base.with_kwargs(&kwargs)?;
        Ok(Self {
            fingerprint: fingerprint(self.entry, family.as_ref()),
            family,
            engine_kwargs: kwargs,
            ..self
        })
    }

    /// Selects another implementation of the pixel loops. The output bits stay the same.
    #[must_use]
    pub fn with_implementation(self, kernels: Implementation) -> Self {
        Self { kernels, ..self }
    }

    /// Returns the implementation of the pixel loops that [`VisionModel::process`] runs.
    pub fn implementation(&self) -> Implementation {
        self.kernels
    }

    /// Returns the `model_type` of the family, for instance `qwen2_vl`.
    pub fn family(&self) -> &'static str {
        self.entry.model_type
    }

    /// Returns the text and tokens that represent an image in a prompt.
    pub fn prompt(&self) -> &ImagePrompt {
        self.family.prompt()
    }

    /// Returns pairs of tensor names whose row counts must agree.
    ///
    /// The first tensor has as many rows as the product of the second tensor's three extents.
    /// Engines crash on an item where they differ.
    pub fn counted_rows(&self) -> &'static [(&'static str, &'static str)] {
        self.family.counted_rows()
    }

    /// Returns the first version of vLLM that normalises this family's pixels in the engine by
    /// default; `None` if no version does.
    ///
    /// From that version on the engine needs [`PixelFormat::RawU8`], because it would normalise
    /// floats a second time. Older engines need floats.
    pub fn engine_normalizes_since(&self) -> Option<VllmVersion> {
        self.entry.engine_normalizes_since
    }

    /// Parses a request's `mm_processor_kwargs`.
    ///
    /// They override the model's own settings and those of [`VisionModel::with_engine_kwargs`].
    /// `docs/images.md` lists the keys of each family.
    ///
    /// # Errors
    /// [`VisionError::UnknownKwarg`] for a key that is not implemented,
    /// [`VisionError::InvalidKwarg`] for an invalid value.
    pub fn parse_kwargs(&self, kwargs: &Map<String, Value>) -> Result<ImageKwargs, VisionError> {
        if kwargs.is_empty() {
            return Ok(ImageKwargs::default());
        }
        let mut request = kwargs.clone();
        if !self.engine_kwargs.is_empty() {
            self.base.add_aliases(&mut request);
            request = engine_kwargs::merge(&self.engine_kwargs, request);
        }
        Ok(ImageKwargs(Some(self.base.with_kwargs(&request)?)))
    }

    /// Computes the layout of an image of this size, in constant time and memory.
    ///
    /// `size` is the size after the EXIF orientation. The number of tokens may exceed the model's
    /// context; check [`ImagePlan::tokens`] before expanding the prompt or allocating the tensor.
    ///
    /// # Errors
    /// The errors of [`crate::Fault::Request`]: the image is empty, too large or too elongated.
    pub fn plan(&self, size: ImageSize, kwargs: &ImageKwargs) -> Result<ImagePlan, VisionError> {
        if size.area() == 0 {
            return Err(VisionError::EmptyImage { size });
        }
        self.family_for(kwargs).plan(size)
    }

    /// Returns the number of embeddings of the largest item that vLLM expects, for a context of
    /// `context_tokens`; 0 if no item is accepted.
    ///
    /// vLLM's encoder cache holds at least this number (`compute_mm_encoder_budget` in its
    /// `encoder_cache_manager.py`). A request's kwargs can make an item larger.
    pub fn largest_item(&self, context_tokens: usize, accepted: AcceptedMedia) -> usize {
        let image = if accepted.images {
            // vLLM does not start with settings for which this size is refused.
            self.family.plan(self.family.largest_image()).map_or(0, |plan| plan.tokens)
        } else {
            0
        };
        let video =
            if accepted.videos { self.family.largest_video(context_tokens, image) } else { 0 };
        image.max(video)
    }

    /// Returns the family with the settings of these kwargs.
    fn family_for<'a>(&'a self, kwargs: &'a ImageKwargs) -> &'a dyn Family {
        kwargs.0.as_ref().unwrap_or(&self.family).as_ref()
    }

    /// Returns canonical bytes of the family and the settings in effect: everything except the
    /// image that changes its tensors or its placeholder.
    ///
    /// Kwargs that equal the model's settings do not change the fingerprint. The bytes are the same
    /// in every version of Chiasm that makes the same tensors, because engines cache items under
    /// hashes of them.
    pub fn fingerprint(&self, kwargs: &ImageKwargs) -> Vec<u8> {
        match &kwargs.0 {
            None => self.fingerprint.clone(),
            Some(family) => fingerprint(self.entry, family.as_ref()),
        }
    }

    /// Returns the fingerprint of a request without kwargs.
    ///
    /// It changes if and only if the family changes, or a setting that affects the placeholders or
    /// tensors of a request without kwargs.
    pub fn default_fingerprint(&self) -> &[u8] {
        &self.fingerprint
    }

    /// Writes the pixel tensor: resizes the image, cuts it into patches or tiles, and normalises it
    /// if `format` requires that.
    ///
    /// CPU-bound: takes from a few to tens of milliseconds. `out` must have
    /// `plan.pixel_bytes(format)` bytes and is overwritten completely.
    ///
    /// # Errors
    /// The errors of [`crate::Fault::Program`]: image, plan, format and buffer do not match.
    pub fn process(
        &self,
        image: RgbView<'_>,
        plan: &ImagePlan,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<(), VisionError> {
        self.process_with(image, plan, format, Parallelism::Single, out)
    }

    /// Writes the pixel tensor like [`VisionModel::process`], on the given threads.
    ///
    /// # Errors
    /// The errors of [`VisionModel::process`].
    pub fn process_with(
        &self,
        image: RgbView<'_>,
        plan: &ImagePlan,
        format: PixelFormat,
        parallelism: Parallelism<'_>,
        out: &mut [u8],
    ) -> Result<(), VisionError> {
        if image.size() != plan.original {
            return Err(VisionError::SizeMismatch { planned: plan.original, found: image.size() });
        }
        let expected = plan.pixel_bytes(format);
        if out.len() != expected {
            return Err(VisionError::OutputLength { expected, found: out.len() });
        }
        let normalization = self.family.normalization();
        let PixelTensor { resampler, layers, .. } = &plan.pixels;
        let mut write = |elements| {
            Job { kernels: self.kernels, image, resampler: *resampler, elements, parallelism }
                .write(layers, out);
        };
        match format {
            PixelFormat::RawU8 => write(Elements::Raw),
            PixelFormat::Normalized(Dtype::F16) => {
                write(Elements::Two(
                    &normalization.table(|value| f16::from_f32(value).to_le_bytes()),
                ));
            }
            PixelFormat::Normalized(Dtype::BF16) => {
                write(Elements::Two(
                    &normalization.table(|value| bf16::from_f32(value).to_le_bytes()),
                ));
            }
            PixelFormat::Normalized(Dtype::F32) => {
                write(Elements::Four(&normalization.table(f32::to_le_bytes)));
            }
            PixelFormat::Normalized(dtype) => return Err(VisionError::NotAFloat(dtype)),
        }
        Ok(())
    }
}

/// Encodes the family and its settings.
fn fingerprint(entry: &FamilyEntry, family: &dyn Family) -> Vec<u8> {
    let mut fingerprint = Fingerprint::for_family(entry.model_type);
    family.fingerprint(&mut fingerprint);
    fingerprint.into_bytes()
}
