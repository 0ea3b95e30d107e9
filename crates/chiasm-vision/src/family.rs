//! The table of image families, by the exact names that model directories use.

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use crate::families::qwen_vl;
use crate::kernels::Normalization;
use crate::model_dir::ModelDir;
use crate::{ImagePlan, ImageSize, VisionError};

/// Settings of one request that override the model directory's: its `mm_processor_kwargs`, parsed by
/// [`crate::VisionModel::parse_kwargs`]. The default overrides nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ImageKwargs {
    pub(crate) min_pixels: Option<u64>,
    pub(crate) max_pixels: Option<u64>,
}

/// What a family does: the arithmetic of its layout. The pixel loops lie in `kernels`.
pub(crate) trait Family: Send + Sync + std::fmt::Debug {
    fn parse_kwargs(&self, kwargs: &Map<String, Value>) -> Result<ImageKwargs, VisionError>;
    fn plan(&self, size: ImageSize, kwargs: &ImageKwargs) -> Result<ImagePlan, VisionError>;
    /// Appends everything but the image and the family's name that changes the tensors.
    fn fingerprint(&self, kwargs: &ImageKwargs, out: &mut Vec<u8>);
    fn placeholder_token(&self) -> TokenId;
    fn normalization(&self) -> &Normalization;
}

/// One row of the table.
#[derive(Debug)]
pub(crate) struct FamilyEntry {
    /// `model_type` of config.json, which names the family.
    pub(crate) model_type: &'static str,
    /// Values of `image_processor_type` that mean this family's processor; so does none.
    pub(crate) image_processors: &'static [&'static str],
    /// What stands for one image in a template whose message content is a string
    /// (vLLM's `get_placeholder_str` of the model class).
    pub(crate) prompt_text: &'static str,
    /// Whether vLLM normalises on the device by default (`supports_mm_device_do_normalize` of the model class).
    pub(crate) engine_normalizes: bool,
    pub(crate) build: fn(&ModelDir) -> Result<Box<dyn Family>, VisionError>,
}

/// `Qwen2VLImageProcessor` (torchvision) serves all three. `transformers` reads the two other names as it:
/// `…Fast` was its name up to 4.x, and for `…Pil` it prefers the torchvision class where torchvision is installed,
/// which vLLM requires.
const QWEN_VL_PROCESSORS: &[&str] = &["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];
const QWEN_VL_PROMPT: &str = "<|vision_start|><|image_pad|><|vision_end|>";

pub(crate) static FAMILIES: [FamilyEntry; 3] = [
    FamilyEntry {
        model_type: "qwen2_vl",
        image_processors: QWEN_VL_PROCESSORS,
        prompt_text: QWEN_VL_PROMPT,
        engine_normalizes: true,
        build: |dir| qwen_vl::QwenVl::read(dir, qwen_vl::Generation::Two),
    },
    FamilyEntry {
        model_type: "qwen2_5_vl",
        image_processors: QWEN_VL_PROCESSORS,
        prompt_text: QWEN_VL_PROMPT,
        engine_normalizes: true,
        build: |dir| qwen_vl::QwenVl::read(dir, qwen_vl::Generation::TwoFive),
    },
    FamilyEntry {
        model_type: "qwen3_vl",
        image_processors: QWEN_VL_PROCESSORS,
        prompt_text: QWEN_VL_PROMPT,
        engine_normalizes: true,
        build: |dir| qwen_vl::QwenVl::read(dir, qwen_vl::Generation::Three),
    },
];

/// The row for a model directory.
pub(crate) fn find(dir: &ModelDir) -> Result<&'static FamilyEntry, VisionError> {
    let model_type = dir.config.text("model_type")?.unwrap_or_default();
    let entry =
        FAMILIES.iter().find(|entry| entry.model_type == model_type).ok_or_else(|| VisionError::UnknownFamily {
            model_type: model_type.into(),
            known: FAMILIES.iter().map(|entry| entry.model_type).collect(),
        })?;
    match dir.image_processor.text("image_processor_type")? {
        Some(found) if !entry.image_processors.contains(&found) => Err(VisionError::UnknownImageProcessor {
            found: found.into(),
            model_type: entry.model_type,
            known: entry.image_processors,
        }),
        _ => Ok(entry),
    }
}
