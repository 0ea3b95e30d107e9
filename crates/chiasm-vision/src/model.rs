//! The crate's front door: one model's images, from size to tensor.

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

/// The kinds of media that an engine takes, of those that its model has: vLLM's
/// `--limit-mm-per-prompt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenKinds {
    /// Images.
    pub images: bool,
    /// Videos.
    pub videos: bool,
}

impl TakenKinds {
    /// Whatever the model has.
    pub const ALL: Self = Self { images: true, videos: true };
}

/// One model's image family and settings. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct VisionModel {
    entry: &'static FamilyEntry,
    /// The settings of the model directory.
    own: Arc<dyn Family>,
    engine_kwargs: Map<String, Value>,
    /// `own` with `engine_kwargs`.
    family: Arc<dyn Family>,
    /// What [`VisionModel::fingerprint`] says of no kwargs: asked for once per request.
    fingerprint: Vec<u8>,
    kernels: Implementation,
}

impl VisionModel {
    /// Reads `config.json` and the image processor's settings (`processor_config.json`, else
    /// `preprocessor_config.json`). `Ok(None)` for a text-only model: one without a
    /// `vision_config`. `vocabulary` is the model's tokenizer, for families whose placeholders have
    /// tokens that config.json does not name.
    ///
    /// # Errors
    /// All of [`crate::Fault::Model`]: an unreadable file, a family or processor that is not
    /// supported, a setting that cannot be honoured exactly, or `CHIASM_KERNELS` naming no
    /// available [`Implementation`].
    pub fn from_model_dir(
        dir: &Path,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Option<Self>, VisionError> {
        let Some(dir) = ModelDir::read(dir)? else {
            return Ok(None);
        };
        let entry = families::find(&dir)?;
        let kernels = Implementation::chosen().map_err(|unknown| VisionError::UnknownKernels {
            name: unknown.0.clone(),
            available: Implementation::available().map(Implementation::name).collect(),
        })?;
        let own = (entry.build)(&dir, vocabulary)?;
        let fingerprint = fingerprint(entry, own.as_ref());
        Ok(Some(Self {
            entry,
            family: own.clone(),
            own,
            engine_kwargs: Map::new(),
            fingerprint,
            kernels,
        }))
    }

    /// The same model with these settings in place of its directory's for all requests: vLLM's
    /// `--mm-processor-kwargs`. They take what [`VisionModel::parse_kwargs`] takes, and give way to
    /// the kwargs of a request key by key, within objects too.
    ///
    /// # Errors
    /// The same as those of [`VisionModel::parse_kwargs`].
    pub fn with_engine_kwargs(self, kwargs: Map<String, Value>) -> Result<Self, VisionError> {
        let family = self.own.with_kwargs(&kwargs)?;
        Ok(Self {
            fingerprint: fingerprint(self.entry, family.as_ref()),
            family,
            engine_kwargs: kwargs,
            ..self
        })
    }

    /// The same model on another implementation of the pixel loops: the bits stay, the time
    /// changes.
    #[must_use]
    pub fn with_implementation(self, kernels: Implementation) -> Self {
        Self { kernels, ..self }
    }

    /// The implementation of the pixel loops that [`VisionModel::process`] runs.
    pub fn implementation(&self) -> Implementation {
        self.kernels
    }

    /// The `model_type` that names the family, for instance `qwen2_vl`.
    pub fn family(&self) -> &'static str {
        self.entry.model_type
    }

    /// How an image is written in a prompt.
    pub fn prompt(&self) -> &ImagePrompt {
        self.family.prompt()
    }

    /// Pairs of tensors that belong together: the first has as many rows as the product of the
    /// second's three extents. Engines die of an item where the two differ.
    pub fn counted_rows(&self) -> &'static [(&'static str, &'static str)] {
        self.family.counted_rows()
    }

    /// The first version of vLLM that normalises this family's pixels in the engine unless told not
    /// to; `None` if none does. From that version on the engine wants [`PixelFormat::RawU8`], as
    /// floats would be normalised twice; older engines want floats.
    pub fn engine_normalizes_since(&self) -> Option<VllmVersion> {
        self.entry.engine_normalizes_since
    }

    /// Parses a request's `mm_processor_kwargs`, which replace the model's own settings and those
    /// of [`VisionModel::with_engine_kwargs`]. `docs/images.md` lists what each family takes.
    ///
    /// # Errors
    /// [`VisionError::UnknownKwarg`] names a key that is not implemented,
    /// [`VisionError::InvalidKwarg`] a bad value.
    pub fn parse_kwargs(&self, kwargs: &Map<String, Value>) -> Result<ImageKwargs, VisionError> {
        if kwargs.is_empty() {
            return Ok(ImageKwargs::default());
        }
        let mut request = kwargs.clone();
        if !self.engine_kwargs.is_empty() {
            self.own.add_other_names(&mut request);
            request = engine_kwargs::merged(&self.engine_kwargs, request);
        }
        Ok(ImageKwargs(Some(self.own.with_kwargs(&request)?)))
    }

    /// The layout of an image of this size: arithmetic only, in constant time and memory.
    ///
    /// `size` is the size after the EXIF orientation. The number of tokens is not bounded by what
    /// the model can take; compare [`ImagePlan::tokens`] before expanding the prompt or allocating
    /// the tensor.
    ///
    /// # Errors
    /// All of [`crate::Fault::Request`]: empty, too stretched, too large.
    pub fn plan(&self, size: ImageSize, kwargs: &ImageKwargs) -> Result<ImagePlan, VisionError> {
        if size.area() == 0 {
            return Err(VisionError::EmptyImage { size });
        }
        self.with(kwargs).plan(size)
    }

    /// Embeddings of the largest item that vLLM takes the model to be given, where a context has so
    /// many tokens: its encoder cache holds at least as many (`compute_mm_encoder_budget` in vLLM's
    /// `encoder_cache_manager.py`). An item may have more by a request's kwargs. 0 if no item is
    /// taken.
    pub fn largest_item(&self, context: usize, taken: TakenKinds) -> usize {
        let image = match taken.images {
            // A size that is refused is one of settings with which vLLM does not start either.
            true => self.family.plan(self.family.largest_image()).map_or(0, |plan| plan.tokens),
            false => 0,
        };
        let video = if taken.videos { self.family.largest_video(context, image) } else { 0 };
        image.max(video)
    }

    fn with<'a>(&'a self, kwargs: &'a ImageKwargs) -> &'a dyn Family {
        kwargs.0.as_ref().unwrap_or(&self.family).as_ref()
    }

    /// Canonical bytes of everything but the image that changes its tensors or its placeholder: the
    /// family and the settings in effect. Kwargs that ask for what the model does anyway have the
    /// fingerprint of no kwargs. The bytes are the same in every version of Chiasm that makes the
    /// same tensors, as engines keep items under hashes of them.
    pub fn fingerprint(&self, kwargs: &ImageKwargs) -> Vec<u8> {
        match &kwargs.0 {
            None => self.fingerprint.clone(),
            Some(family) => fingerprint(self.entry, family.as_ref()),
        }
    }

    /// The fingerprint of a request without kwargs. It changes if and only if the family, or a
    /// setting that changes such a request's placeholders or tensors, does.
    pub fn processor(&self) -> &[u8] {
        &self.fingerprint
    }

    /// Writes the pixel tensor: resized, cut into patches, and normalised if `format` says so.
    /// CPU-bound: from a few to tens of milliseconds. `out` is `plan.pixel_bytes(format)` long and
    /// is overwritten completely.
    ///
    /// # Errors
    /// All of [`crate::Fault::Program`]: image, plan, format and buffer do not belong together.
    pub fn process(
        &self,
        image: RgbView<'_>,
        plan: &ImagePlan,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<(), VisionError> {
        self.process_with(image, plan, format, Parallelism::Single, out)
    }

    /// Writes what [`VisionModel::process`] writes, on the threads of the host's choice.
    ///
    /// # Errors
    /// The same as those of [`VisionModel::process`].
    pub fn process_with(
        &self,
        image: RgbView<'_>,
        plan: &ImagePlan,
        format: PixelFormat,
        parallelism: Parallelism<'_>,
        out: &mut [u8],
    ) -> Result<(), VisionError> {
        if image.size() != plan.original {
            return Err(VisionError::OtherImage { planned: plan.original, found: image.size() });
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
                write(Elements::Four(&normalization.table(f32::to_le_bytes)))
            }
            PixelFormat::Normalized(dtype) => return Err(VisionError::NotAFloat(dtype)),
        }
        Ok(())
    }
}

fn fingerprint(entry: &FamilyEntry, family: &dyn Family) -> Vec<u8> {
    let mut fingerprint = Fingerprint::of_family(entry.model_type);
    family.fingerprint(&mut fingerprint);
    fingerprint.into_bytes()
}
