//! The crate's front door: one model's images, from size to tensor.

use std::path::Path;

use chiasm_types::{Dtype, TokenId};
use half::{bf16, f16};
use serde_json::{Map, Value};

use crate::family::{self, Family, FamilyEntry};
use crate::kernels::{self, Elements, Implementation};
use crate::model_dir::ModelDir;
use crate::{ImageKwargs, ImagePlan, ImageSize, PixelFormat, RgbView, VisionError};

/// One model's image family and settings. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct VisionModel {
    entry: &'static FamilyEntry,
    family: Box<dyn Family>,
    kernels: Implementation,
}

impl VisionModel {
    /// Reads `config.json` and the image processor's settings (`processor_config.json`, else
    /// `preprocessor_config.json`). `Ok(None)` for a text-only model: one without a `vision_config`.
    ///
    /// # Errors
    /// All of [`crate::Fault::Model`]: an unreadable file, a family or processor that is not supported, a setting
    /// that cannot be honoured exactly, or `CHIASM_KERNELS` naming no available [`Implementation`].
    pub fn from_model_dir(dir: &Path) -> Result<Option<Self>, VisionError> {
        let Some(dir) = ModelDir::read(dir)? else {
            return Ok(None);
        };
        let entry = family::find(&dir)?;
        let kernels = Implementation::chosen().map_err(|name| VisionError::UnknownKernels {
            name: name.into(),
            available: Implementation::available().map(Implementation::name).collect(),
        })?;
        Ok(Some(Self { entry, family: (entry.build)(&dir)?, kernels }))
    }

    /// The same model on another implementation of the pixel loops: the bits stay, the time changes.
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

    /// The one token that stands for an image in the rendered prompt, and of which its placeholder consists.
    pub fn placeholder_token(&self) -> TokenId {
        self.family.placeholder_token()
    }

    /// What stands for one image in a chat template whose message content is a string.
    pub fn prompt_text(&self) -> &'static str {
        self.entry.prompt_text
    }

    /// Whether vLLM normalises this family's pixels in the engine unless told not to. It then wants
    /// [`PixelFormat::RawU8`]; floats would be normalised twice.
    pub fn engine_normalizes(&self) -> bool {
        self.entry.engine_normalizes
    }

    /// Parses a request's `mm_processor_kwargs`.
    ///
    /// Qwen-VL: `min_pixels`, `max_pixels`, `size.shortest_edge` and `size.longest_edge` (areas in pixels, despite the
    /// names). `min_pixels` and `max_pixels` win over `size`; what remains open is the model's, except that Qwen2-VL
    /// and Qwen2.5-VL refuse a `size` that leaves an edge open, as vLLM 0.32 does.
    ///
    /// # Errors
    /// [`VisionError::UnknownKwarg`] names a key that is not implemented, [`VisionError::InvalidKwarg`] a bad value.
    pub fn parse_kwargs(&self, kwargs: &Map<String, Value>) -> Result<ImageKwargs, VisionError> {
        self.family.parse_kwargs(kwargs)
    }

    /// The layout of an image of this size: arithmetic only, in constant time and memory.
    ///
    /// `size` is the size after the EXIF orientation. The number of tokens is not bounded by what the model can
    /// take; compare [`ImagePlan::tokens`] before expanding the prompt or allocating the tensor.
    ///
    /// # Errors
    /// All of [`crate::Fault::Request`]: empty, too stretched, too large.
    pub fn plan(&self, size: ImageSize, kwargs: &ImageKwargs) -> Result<ImagePlan, VisionError> {
        self.family.plan(size, kwargs)
    }

    /// Canonical bytes of everything but the image that changes its tensors: the family and the settings in effect.
    /// Kwargs that ask for what the model does anyway have the fingerprint of no kwargs.
    pub fn fingerprint(&self, kwargs: &ImageKwargs) -> Vec<u8> {
        let mut bytes = self.entry.model_type.as_bytes().to_vec();
        bytes.push(0);
        self.family.fingerprint(kwargs, &mut bytes);
        bytes
    }

    /// Writes the pixel tensor: resized, cut into patches, and normalised if `format` says so. CPU-bound: from a few
    /// to tens of milliseconds. `out` is `plan.pixel_bytes(format)` long and is overwritten completely.
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
        if image.size() != plan.original {
            return Err(VisionError::OtherImage { planned: plan.original, found: image.size() });
        }
        let expected = plan.pixel_bytes(format);
        if out.len() != expected {
            return Err(VisionError::OutputLength { expected, found: out.len() });
        }
        let normalization = self.family.normalization();
        let mut write = |elements| kernels::write(self.kernels, image, &plan.patches, elements, out);
        match format {
            PixelFormat::RawU8 => write(Elements::Raw),
            PixelFormat::Normalized(Dtype::F16) => {
                write(Elements::Two(&normalization.table(|value| f16::from_f32(value).to_le_bytes())));
            }
            PixelFormat::Normalized(Dtype::BF16) => {
                write(Elements::Two(&normalization.table(|value| bf16::from_f32(value).to_le_bytes())));
            }
            PixelFormat::Normalized(Dtype::F32) => write(Elements::Four(&normalization.table(f32::to_le_bytes))),
            PixelFormat::Normalized(dtype) => return Err(VisionError::NotAFloat(dtype)),
        }
        Ok(())
    }
}
