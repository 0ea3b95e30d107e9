//! The table of image families, keyed by the exact names that model directories use.

use std::sync::Arc;

use chiasm_types::VllmVersion;

use super::qwen_vl::{self, QwenVl};
use super::{gemma3, internvl, internvl_chat, llama4, llava, llava_next, pixtral};
use crate::family::Family;
use crate::model_dir::ModelDir;
use crate::{VisionError, Vocabulary};

/// A row of the table.
#[derive(Debug)]
pub(crate) struct FamilyEntry {
    /// The `model_type` of config.json, which names the family.
    pub(crate) model_type: &'static str,
    /// The vision towers of this row: several families share the `model_type` `llava`.
    pub(crate) vision: VisionTower,
    /// The values of `image_processor_type` that mean this family's processor. A missing value
    /// means it too. Empty if the family reads no file of an image processor.
    pub(crate) image_processors: &'static [&'static str],
    /// The first version of vLLM that normalises on the device by default
    /// (`supports_mm_device_do_normalize` of the model class); `None` if no version does.
    pub(crate) engine_normalizes_since: Option<VllmVersion>,
    /// The constructor of the family.
    pub(crate) build: Build,
}

/// A function that reads a family from a model directory.
type Build = fn(&ModelDir, &dyn Vocabulary) -> Result<Arc<dyn Family>, VisionError>;

/// The values of `vision_config.model_type` that a row of the table accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VisionTower {
    /// Any value.
    Any,
    /// Only this value.
    Only(&'static str),
    /// Any value except this one.
    Not(&'static str),
}

impl VisionTower {
    /// Returns `true` if a tower with this `model_type` is accepted.
    fn accepts(self, model_type: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(name) => model_type == name,
            Self::Not(name) => model_type != name,
        }
    }
}

/// The names of `Qwen2VLImageProcessor` (torchvision).
///
/// `transformers` loads it for the two other names as well. `…Fast` was its name up to 4.x. For
/// `…Pil`, `transformers` prefers the torchvision class if torchvision is installed, which vLLM
/// requires.
const QWEN_VL_PROCESSORS: &[&str] =
    &["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];

const CLIP_PROCESSORS: &[&str] = &[
    "CLIPImageProcessor",
    "CLIPImageProcessorFast",
    "CLIPImageProcessorPil",
    "LlavaImageProcessor",
    "LlavaImageProcessorFast",
    "LlavaImageProcessorPil",
    "SiglipImageProcessor",
    "SiglipImageProcessorFast",
    "SiglipImageProcessorPil",
];
const LLAVA_NEXT_PROCESSORS: &[&str] =
    &["LlavaNextImageProcessor", "LlavaNextImageProcessorFast", "LlavaNextImageProcessorPil"];
const PIXTRAL_PROCESSORS: &[&str] =
    &["PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil"];
const GEMMA3_PROCESSORS: &[&str] =
    &["Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"];
const LLAMA4_PROCESSORS: &[&str] = &["Llama4ImageProcessor", "Llama4ImageProcessorFast"];
const GOT_OCR2_PROCESSORS: &[&str] =
    &["GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"];

/// The table of families. A new family needs a row here and a file in `families/`.
pub(crate) static FAMILIES: &[FamilyEntry] = &[
    qwen_vl("qwen2_vl", ALL_SUPPORTED, |dir, _| QwenVl::read(dir, qwen_vl::Generation::Two)),
    qwen_vl("qwen2_5_vl", ALL_SUPPORTED, |dir, _| QwenVl::read(dir, qwen_vl::Generation::TwoFive)),
    qwen_vl("qwen3_vl", V0_32, |dir, _| QwenVl::read(dir, qwen_vl::Generation::Three)),
    qwen_vl("qwen3_vl_moe", V0_32, |dir, _| QwenVl::read(dir, qwen_vl::Generation::Three)),
    qwen_vl("qwen3_5", V0_32, |dir, _| QwenVl::read(dir, qwen_vl::Generation::ThreeFive)),
    qwen_vl("qwen3_5_moe", V0_32, |dir, _| QwenVl::read(dir, qwen_vl::Generation::ThreeFive)),
    FamilyEntry {
        model_type: "llava",
        vision: VisionTower::Not("pixtral"),
        image_processors: CLIP_PROCESSORS,
        engine_normalizes_since: None,
        build: |dir, _| llava::Llava::read(dir),
    },
    FamilyEntry {
        model_type: "llava",
        vision: VisionTower::Only("pixtral"),
        image_processors: PIXTRAL_PROCESSORS,
        engine_normalizes_since: None,
        build: |dir, vocabulary| {
            pixtral::Pixtral::read(dir, vocabulary, pixtral::Generation::Pixtral)
        },
    },
    FamilyEntry {
        model_type: "llava_next",
        vision: VisionTower::Any,
        image_processors: LLAVA_NEXT_PROCESSORS,
        engine_normalizes_since: None,
        build: |dir, _| llava_next::LlavaNext::read(dir),
    },
    FamilyEntry {
        model_type: "llama4",
        vision: VisionTower::Any,
        image_processors: LLAMA4_PROCESSORS,
        engine_normalizes_since: None,
        build: llama4::Llama4::read,
    },
    FamilyEntry {
        model_type: "gemma3",
        vision: VisionTower::Any,
        image_processors: GEMMA3_PROCESSORS,
        engine_normalizes_since: None,
        build: gemma3::Gemma3::read,
    },
    FamilyEntry {
        model_type: "internvl",
        vision: VisionTower::Any,
        image_processors: GOT_OCR2_PROCESSORS,
        engine_normalizes_since: None,
        build: internvl::InternVl::read,
    },
    FamilyEntry {
        model_type: "internvl_chat",
        vision: VisionTower::Any,
        image_processors: &[],
        engine_normalizes_since: None,
        build: internvl_chat::InternVlChat::read,
    },
    FamilyEntry {
        model_type: "mistral3",
        vision: VisionTower::Only("pixtral"),
        image_processors: PIXTRAL_PROCESSORS,
        engine_normalizes_since: Some(V0_32),
        build: |dir, vocabulary| {
            pixtral::Pixtral::read(dir, vocabulary, pixtral::Generation::Mistral3)
        },
    },
];

const V0_32: VllmVersion = VllmVersion::minor(0, 32);
/// A version older than any supported one.
const ALL_SUPPORTED: VllmVersion = VllmVersion::minor(0, 0);

/// Creates a row of a Qwen-VL family.
const fn qwen_vl(
    model_type: &'static str,
    engine_normalizes_since: VllmVersion,
    build: Build,
) -> FamilyEntry {
    FamilyEntry {
        model_type,
        vision: VisionTower::Any,
        image_processors: QWEN_VL_PROCESSORS,
        engine_normalizes_since: Some(engine_normalizes_since),
        build,
    }
}

/// Returns the row for a model directory.
///
/// # Errors
/// [`VisionError::UnknownFamily`] and [`VisionError::UnknownImageProcessor`], among others.
pub(crate) fn find(dir: &ModelDir) -> Result<&'static FamilyEntry, VisionError> {
    let model_type = dir.config.text("model_type")?.unwrap_or_default();
    let tower = dir.vision.text("model_type")?.unwrap_or_default();
    let entry = FAMILIES
        .iter()
        .find(|entry| entry.model_type == model_type && entry.vision.accepts(tower))
        .ok_or_else(|| VisionError::UnknownFamily {
            model_type: model_type.into(),
            known: known(),
        })?;
    if entry.image_processors.is_empty() {
        return Ok(entry);
    }
    match dir.image_processor()?.text("image_processor_type")? {
        Some(found) if !entry.image_processors.contains(&found) => {
            Err(VisionError::UnknownImageProcessor {
                found: found.into(),
                model_type: entry.model_type,
                known: entry.image_processors,
            })
        }
        _ => Ok(entry),
    }
}

/// Returns the model types in the table, each once. Rows with the same model type are adjacent.
fn known() -> Vec<&'static str> {
    let mut names: Vec<_> = FAMILIES.iter().map(|entry| entry.model_type).collect();
    names.dedup();
    names
}
