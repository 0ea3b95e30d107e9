//! The video processor's settings in a model directory, read as `transformers` 5.19 does.

use serde_json::Value;

use super::{VideoLoader, VideoPlanError};
use crate::VisionError;
use crate::families::qwen_vl::settings::{MAX_PATCH_SIZE, read_bounds};
use crate::kernels::{Filter, Normalization};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, CLIP, STANDARD};

/// The largest `max_video_tokens`; keeps products exact.
const MAX_VIDEO_TOKENS: u64 = 1 << 24;

/// A class of `transformers` that processes videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessorClass {
    Qwen2Vl,
    Qwen3Vl,
    LlavaOnevision,
    LlavaNextVideo,
}

impl ProcessorClass {
    const ALL: [Self; 4] =
        [Self::Qwen2Vl, Self::Qwen3Vl, Self::LlavaOnevision, Self::LlavaNextVideo];

    /// Returns the name of the class.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Qwen2Vl => "Qwen2VLVideoProcessor",
            Self::Qwen3Vl => "Qwen3VLVideoProcessor",
            Self::LlavaOnevision => "LlavaOnevisionVideoProcessor",
            Self::LlavaNextVideo => "LlavaNextVideoVideoProcessor",
        }
    }

    /// Returns the loader that vLLM registers for the class; `None` means the engine's default.
    const fn loader(self) -> Option<VideoLoader> {
        match self {
            Self::Qwen2Vl => Some(VideoLoader::Qwen2Vl),
            Self::Qwen3Vl => Some(VideoLoader::Qwen3Vl),
            Self::LlavaOnevision | Self::LlavaNextVideo => None,
        }
    }
}

/// Returns the settings of the video processor after checking that its class is `class`.
///
/// Follows `AutoVideoProcessor.from_pretrained`: without a `video_processor_type`, the class is
/// derived from `image_processor_type` if there is one of that name, else from `model_type`.
pub(super) fn read_file(dir: &ModelDir, class: ProcessorClass) -> Result<Section, VideoPlanError> {
    let file = dir.video_processor.clone().ok_or_else(|| VideoPlanError::Setting {
        key: "video_preprocessor_config.json",
        problem: "is missing or invalid, and no other file has the video processor's settings"
            .into(),
    })?;
    let found = file.text("video_processor_type")?;
    let image_class = file.text("image_processor_type")?;
    let is_known = match (found, image_class) {
        (Some(found), _) => found == class.name(),
        (None, Some(image_class)) => {
            // No video class has one of these suffixes.
            image_class.ends_with("Fast")
                || image_class.ends_with("Pil")
                || image_class.replace("ImageProcessor", "VideoProcessor") == class.name()
        }
        (None, None) => true,
    };
    if !is_known {
        return Err(VideoPlanError::Setting {
            key: "video_processor_type",
            problem: format!("does not mean {}", class.name()),
        });
    }
    for key in ["auto_map", "input_data_format", "device"] {
        if file.get(key).is_some_and(|value| !value.is_null()) {
            return Err(file.problem(key, "is not supported for videos").into());
        }
    }
    Ok(file)
}

/// Returns the loader that vLLM chooses by the model directory, or `default`.
///
/// Follows `get_video_processor_cls_name_from_config` in vLLM's `transformers_utils/processor.py`,
/// which does not read `processor_config.json`.
pub(super) fn loader(
    dir: &ModelDir,
    class: ProcessorClass,
    default: &str,
) -> Result<VideoLoader, VideoPlanError> {
    let mut class = class;
    for file in ["video_preprocessor_config.json", "preprocessor_config.json"] {
        let Some(section) = dir.read_other(file)? else { continue };
        let Some(name) = section.text("video_processor_type")? else { continue };
        class = ProcessorClass::ALL.into_iter().find(|class| class.name() == name).ok_or_else(
            || section.problem("video_processor_type", "has a loader that is not supported"),
        )?;
        break;
    }
    class.loader().or_else(|| VideoLoader::from_name(default)).ok_or_else(|| {
        VideoPlanError::Setting {
            key: "VLLM_VIDEO_LOADER_BACKEND",
            problem: "must be opencv, qwen2_vl or qwen3_vl".into(),
        }
    })
}

/// The settings of `Qwen2VLVideoProcessor` or `Qwen3VLVideoProcessor`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct QwenSettings {
    /// The side of a patch in pixels.
    pub(super) patch: u32,
    /// The side in patches of the square that becomes one token.
    pub(super) merge: u32,
    /// The number of frames per patch.
    pub(super) temporal: u32,
    /// `size.shortest_edge`, an area.
    pub(super) min_pixels: u64,
    /// `size.longest_edge`, an area.
    pub(super) max_pixels: u64,
    /// `cap_pixels_per_frame`. A missing value means false; from `transformers` 5.22 on, true.
    pub(super) caps_frames: bool,
    pub(super) max_video_tokens: u64,
    pub(super) do_sample_frames: bool,
    /// The frame rate of the processor's own sampling.
    pub(super) fps: Option<f64>,
    /// `true` if the file sets `num_frames`, which conflicts with `fps`.
    pub(super) has_num_frames: bool,
    pub(super) min_frames: u64,
    pub(super) max_frames: u64,
    pub(super) normalization: Normalization,
}

impl QwenSettings {
    /// Reads the settings and compares the shape of patches with `config.json` and the image
    /// processor, which vLLM uses as well.
    pub(super) fn read(
        dir: &ModelDir,
        file: &Section,
        class: ProcessorClass,
    ) -> Result<Self, VideoPlanError> {
        let is_three = class == ProcessorClass::Qwen3Vl;
        let default_patch = if is_three { 16 } else { 14 };
        let patch = shared_side(dir, file, ["patch_size", "patch_size"], default_patch)?;
        let merge = shared_side(dir, file, ["merge_size", "spatial_merge_size"], 2)?;
        let temporal = shared_side(dir, file, ["temporal_patch_size", "temporal_patch_size"], 2)?;
        let image_merge = dir.image_processor()?.positive("merge_size")?.unwrap_or(2);
        if image_merge != u64::from(merge) {
            return Err(file.problem("merge_size", "differs from the image processor's").into());
        }
        if !file.flag("do_resize", true)? {
            return Err(file.problem("do_resize", "must not be false for videos").into());
        }
        if settings::resample(file, Filter::Bicubic)? != Filter::Bicubic {
            return Err(file.problem("resample", "must be 3 (bicubic)").into());
        }
        let (min_pixels, max_pixels) = if is_three {
            let mut without_legacy = file.clone();
            without_legacy.values.remove("min_pixels");
            without_legacy.values.remove("max_pixels");
            read_bounds(&without_legacy, (128 * 32 * 32, 768 * 32 * 32))?
        } else {
            read_bounds(file, (128 * 28 * 28, 768 * 28 * 28))?
        };
        let default_tokens = if is_three { 768 } else { 128_000 };
        let max_video_tokens = file.positive("max_video_tokens")?.unwrap_or(default_tokens);
        if max_video_tokens > MAX_VIDEO_TOKENS {
            return Err(file.problem("max_video_tokens", "is too large").into());
        }
        let fps = match file.get("fps") {
            None => is_three.then_some(2.0),
            Some(Value::Null) => None,
            Some(value) => Some(
                value
                    .as_f64()
                    .filter(|fps| *fps > 0.0)
                    .ok_or_else(|| file.problem("fps", "must be a number above 0"))?,
            ),
        };
        Ok(Self {
            patch,
            merge,
            temporal,
            min_pixels,
            max_pixels,
            caps_frames: file.flag("cap_pixels_per_frame", false)?,
            max_video_tokens,
            do_sample_frames: file.flag("do_sample_frames", is_three)?,
            fps,
            has_num_frames: file.get("num_frames").is_some_and(|value| !value.is_null()),
            min_frames: file.positive("min_frames")?.unwrap_or(4),
            max_frames: file.positive("max_frames")?.unwrap_or(768),
            normalization: settings::normalization(file, if is_three { STANDARD } else { CLIP })?,
        })
    }
}

/// Returns a side in the file that must equal the one in the `vision_config`.
fn shared_side(
    dir: &ModelDir,
    file: &Section,
    [key, in_config]: [&'static str; 2],
    default: u64,
) -> Result<u32, VisionError> {
    let side = file.positive(key)?.unwrap_or(default);
    let expected = dir.vision.positive(in_config)?.unwrap_or(default);
    if side != expected || side > MAX_PATCH_SIZE {
        let problem = format!("is {side}, but vision_config.{in_config} is {expected}");
        return Err(file.problem(key, problem));
    }
    Ok(side as u32)
}
