//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.
//!
//! Follows `Qwen2VLImageProcessor` of `transformers` 5.19, as vLLM 0.32 calls it. An image is
//! resized so that both sides are multiples of `patch_size * merge_size` and its area is within
//! bounds. Each patch becomes a row of `pixel_values`; each square of `merge_size²` patches becomes
//! one token. `chiasm_prompt::expand` puts the tokens into the prompt.

pub(crate) mod kwargs;
mod largest;
pub(crate) mod settings;
pub(crate) mod smart_resize;

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, PatchGrid, Resampler};
use crate::model_dir::ModelDir;
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError};
use kwargs::Kwargs;
use settings::Settings;

/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `qwen2_vl.py` and
/// `qwen3_vl.py`).
const PROMPT_TEXT: &str = "<|vision_start|><|image_pad|><|vision_end|>";

/// The default `image_token_id` of the three config classes.
const DEFAULT_IMAGE_TOKEN: u32 = 151_655;

/// The generation of a Qwen-VL model, which determines behaviour beyond its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    Two,
    TwoFive,
    Three,
    ThreeFive,
}

impl Generation {
    /// Returns the default `patch_size` of the vision config's class.
    const fn default_vision_patch_size(self) -> u64 {
        match self {
            Self::Two | Self::TwoFive => 14,
            Self::Three | Self::ThreeFive => 16,
        }
    }

    /// Returns `true` if videos have their own bounds (`Qwen3VLVideoProcessor`).
    const fn has_video_processor(self) -> bool {
        matches!(self, Self::Three | Self::ThreeFive)
    }

    /// Returns `true` if vLLM adds the missing edge to a `size` that has one, which it does for
    /// Qwen3-VL only (`Qwen3VLMultiModalProcessor._apply_hf_processor_main`).
    const fn completes_size(self) -> bool {
        matches!(self, Self::Three | Self::ThreeFive)
    }

    /// Returns `true` if a request's `size` overrides an engine's `min_pixels` and `max_pixels`.
    ///
    /// Only Qwen3-VL's class in vLLM adds these aliases to what the processor gets
    /// (`Qwen3VLMultiModalProcessor._apply_hf_processor_main`). For the others `call_hf_processor`
    /// merges the kwargs as they are, so an engine's `max_pixels` wins over a request's `size`.
    const fn adds_aliases(self) -> bool {
        matches!(self, Self::Three | Self::ThreeFive)
    }
}

/// A Qwen-VL model.
#[derive(Clone, Debug)]
pub(crate) struct QwenVl {
    generation: Generation,
    settings: Settings,
    /// The maximum number of pixels, over all frames, of a video that is one temporal patch long;
    /// `None` if a frame has the same bounds as an image.
    video_pixels: Option<u64>,
    image_token: TokenId,
    prompt: ImagePrompt,
}

impl QwenVl {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        generation: Generation,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?;
        let settings = Settings::read(file)?;
        // The engine builds its vision tower from config.json and would crash on patches of another
        // shape.
        for (key, in_config, default, used) in [
            ("patch_size", "patch_size", generation.default_vision_patch_size(), settings.patch),
            ("merge_size", "spatial_merge_size", 2, settings.merge),
            ("temporal_patch_size", "temporal_patch_size", 2, settings.temporal),
        ] {
            let expected = dir.vision.positive(in_config)?.unwrap_or(default);
            if u64::from(used) != expected {
                return Err(file.problem(
                    key,
                    format!(
                        "is {used}, but vision_config.{in_config} in config.json is {expected}"
                    ),
                ));
            }
        }
        let image_token = dir.token(&["image_token_id"], DEFAULT_IMAGE_TOKEN)?;
        let prompt = ImagePrompt::token(PROMPT_TEXT, image_token);
        let video_pixels = generation.has_video_processor().then(|| largest::video_pixels(dir));
        Ok(Arc::new(Self { generation, settings, video_pixels, image_token, prompt }))
    }
}

impl Family for QwenVl {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let Kwargs { min_pixels, max_pixels } =
            kwargs::parse(kwargs, self.generation.completes_size())?;
        let mut changed = self.clone();
        changed.settings.min_pixels = min_pixels.unwrap_or(changed.settings.min_pixels);
        changed.settings.max_pixels = max_pixels.unwrap_or(changed.settings.max_pixels);
        changed.video_pixels = changed.video_pixels.map(|default| max_pixels.unwrap_or(default));
        Ok(Arc::new(changed))
    }

    fn add_aliases(&self, request: &mut Map<String, Value>) {
        if self.generation.adds_aliases() {
            kwargs::add_size_aliases(request);
        }
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let Settings { patch, merge, temporal, min_pixels, max_pixels, .. } = self.settings;
        let factor = patch * merge;
        let resized = if self.settings.do_resize {
            smart_resize::smart_resize(size, factor, min_pixels, max_pixels)?
        } else {
            smart_resize::without_resize(size, factor)?
        };
        let patches = PatchGrid {
            height: resized.height as usize / patch as usize,
            width: resized.width as usize / patch as usize,
            patch: patch as usize,
            merge: merge as usize,
            temporal: temporal as usize,
        };
        let grid = [1, resized.height / patch, resized.width / patch];
        let rows = patches.rows();
        let tokens = rows / (merge * merge) as usize;
        let placeholder = vec![TokenRun { token: self.image_token, count: tokens, embeds: true }];
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![rows, patches.row_len()],
            field: TensorField::rows(rows),
            resampler: Resampler::Torch(Filter::Bicubic),
            layers: vec![Layer::whole(
                size.width as usize,
                size.height as usize,
                Layout::Patches(patches),
            )],
        };
        let extents = grid.map(i64::from);
        let grid_thw = TensorSpec::integers(
            "image_grid_thw",
            vec![3],
            TensorField::Batched { keep_on_cpu: true },
            &extents,
        );
        ImagePlan::new(size, resized, grid, placeholder, pixels, vec![grid_thw])
    }

    fn largest_image(&self) -> ImageSize {
        let Settings { patch, merge, max_pixels, .. } = self.settings;
        largest::largest_image(patch * merge, max_pixels)
    }

    fn largest_video(&self, context_tokens: usize, _image_tokens: usize) -> usize {
        let Settings { patch, merge, temporal, min_pixels, max_pixels, .. } = self.settings;
        let factor = patch * merge;
        match self.video_pixels {
            Some(pixels) => {
                let frame = largest::largest_image(factor, pixels / u64::from(temporal));
                largest::embeddings(frame, factor)
            }
            None => {
                let frame = largest::largest_image(factor, max_pixels);
                let frame = smart_resize::smart_resize(frame, factor, min_pixels, max_pixels);
                frame.map_or(0, |frame| {
                    let frame_tokens = largest::embeddings(frame, factor);
                    largest::longest_video(context_tokens, frame_tokens, temporal as usize)
                })
            }
        }
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        // The generation decides which settings exist, but not their effect. Videos are not
        // processed here.
        let Self { generation: _, settings, video_pixels: _, image_token, prompt: _ } = self;
        let Settings {
            patch,
            merge,
            temporal,
            do_resize,
            min_pixels,
            max_pixels,
            ref normalization,
        } = *settings;
        out.integer("patch_size", patch);
        out.integer("merge_size", merge);
        out.integer("temporal_patch_size", temporal);
        // A fingerprint without bounds means that images are not resized.
        if do_resize {
            out.integer("min_pixels", min_pixels);
            out.integer("max_pixels", max_pixels);
        }
        normalization.fingerprint(out);
        out.tokens("image_token", &[*image_token]);
    }

    fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }

    fn counted_rows(&self) -> &'static [(&'static str, &'static str)] {
        &[("pixel_values", "image_grid_thw")]
    }
}

#[cfg(test)]
mod tests;
