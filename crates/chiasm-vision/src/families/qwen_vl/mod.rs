//! Qwen2-VL, Qwen2.5-VL and Qwen3-VL: `Qwen2VLImageProcessor` of `transformers` 5.19, called as vLLM 0.32 calls it.
//!
//! An image is resized so that both sides are multiples of `patch_size * merge_size` and its area lies within bounds.
//! Each patch becomes a row of `pixel_values`; each square of `merge_size²` patches becomes one token.

mod kwargs;
mod settings;
mod smart_resize;

use chiasm_types::{TokenId, TokenRun};
use serde_json::{Map, Value};

use crate::family::{Family, ImageKwargs};
use crate::kernels::{Normalization, PatchGrid};
use crate::model_dir::ModelDir;
use crate::{ImagePlan, ImageSize, VisionError};
use settings::Settings;

/// `image_token_id` of the three config classes, for a config.json without it.
const IMAGE_TOKEN: u64 = 151_655;

/// What differs between the members of the family beyond their settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    Two,
    TwoFive,
    Three,
}

impl Generation {
    /// `patch_size` of the vision config's class, for a config.json without it.
    const fn vision_patch_size(self) -> u64 {
        match self {
            Self::Two | Self::TwoFive => 14,
            Self::Three => 16,
        }
    }

    /// vLLM completes a half-given `size` for Qwen3-VL only (`Qwen3VLMultiModalProcessor._apply_hf_processor_main`).
    const fn completes_size(self) -> bool {
        matches!(self, Self::Three)
    }
}

/// One Qwen-VL model.
#[derive(Debug)]
pub(crate) struct QwenVl {
    generation: Generation,
    settings: Settings,
    image_token: TokenId,
}

impl QwenVl {
    pub(crate) fn read(dir: &ModelDir, generation: Generation) -> Result<Box<dyn Family>, VisionError> {
        let settings = Settings::read(&dir.image_processor)?;
        // The engine builds its vision tower from config.json: patches of another shape would kill it.
        for (key, in_config, default, used) in [
            ("patch_size", "patch_size", generation.vision_patch_size(), settings.patch),
            ("merge_size", "spatial_merge_size", 2, settings.merge),
            ("temporal_patch_size", "temporal_patch_size", 2, settings.temporal),
        ] {
            let expected = dir.vision.positive(in_config)?.unwrap_or(default);
            if u64::from(used) != expected {
                return Err(dir
                    .image_processor
                    .problem(key, format!("is {used}, but vision_config.{in_config} in config.json is {expected}")));
            }
        }
        let image_token = dir.config.positive("image_token_id")?.unwrap_or(IMAGE_TOKEN);
        let image_token =
            u32::try_from(image_token).map_err(|_| dir.config.problem("image_token_id", "must be below 2^32"))?;
        Ok(Box::new(Self { generation, settings, image_token: TokenId(image_token) }))
    }

    fn bounds(&self, kwargs: &ImageKwargs) -> (u64, u64) {
        (kwargs.min_pixels.unwrap_or(self.settings.min_pixels), kwargs.max_pixels.unwrap_or(self.settings.max_pixels))
    }
}

impl Family for QwenVl {
    fn parse_kwargs(&self, kwargs: &Map<String, Value>) -> Result<ImageKwargs, VisionError> {
        kwargs::parse(kwargs, self.generation.completes_size())
    }

    fn plan(&self, size: ImageSize, kwargs: &ImageKwargs) -> Result<ImagePlan, VisionError> {
        let Settings { patch, merge, temporal, .. } = self.settings;
        let factor = patch * merge;
        let resized = if self.settings.do_resize {
            let (min_pixels, max_pixels) = self.bounds(kwargs);
            smart_resize::smart_resize(size, factor, min_pixels, max_pixels)?
        } else {
            smart_resize::keep(size, factor)?
        };
        let patches = PatchGrid {
            height: resized.height as usize / patch as usize,
            width: resized.width as usize / patch as usize,
            patch: patch as usize,
            merge: merge as usize,
            temporal: temporal as usize,
        };
        let elements = (patches.rows() as u64).checked_mul(patches.row_len() as u64);
        if elements.is_none_or(|elements| elements > isize::MAX as u64 / 4) {
            let (width, height) = (resized.width.into(), resized.height.into());
            return Err(VisionError::TooLarge { size, width, height });
        }
        let tokens = patches.rows() / (merge * merge) as usize;
        Ok(ImagePlan {
            original: size,
            resized,
            grid: [1, resized.height / patch, resized.width / patch],
            tokens,
            placeholder: vec![TokenRun { token: self.image_token, count: tokens, embeds: true }],
            patches,
        })
    }

    fn fingerprint(&self, kwargs: &ImageKwargs, out: &mut Vec<u8>) {
        let settings = &self.settings;
        for number in [settings.patch, settings.merge, settings.temporal] {
            out.extend(number.to_le_bytes());
        }
        out.push(settings.do_resize.into());
        // Without resizing, the bounds change nothing.
        let bounds = if settings.do_resize { self.bounds(kwargs) } else { (0, 0) };
        out.extend(bounds.0.to_le_bytes());
        out.extend(bounds.1.to_le_bytes());
        settings.normalization.fingerprint(out);
    }

    fn placeholder_token(&self) -> TokenId {
        self.image_token
    }

    fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }
}

#[cfg(test)]
mod tests;
