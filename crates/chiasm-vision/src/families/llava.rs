//! LLaVA-1.5: one square per image.
//!
//! Follows `CLIPImageProcessor` and related classes of `transformers` 5.20, as vLLM 0.33 calls
//! them. The shorter side is resized to the tower's side and the middle is cropped. Every image has
//! the same number of tokens.

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use super::tower::Tower;
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, Resampler, TileGrid};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, CLIP, ResizeTarget, STANDARD};
use crate::{ImagePlan, ImageSize, VisionError};

/// The default `image_token_index` of `LlavaConfig`.
pub(super) const IMAGE_TOKEN: u32 = 32_000;
/// The names of the image token id in config.json, in order of precedence.
pub(super) const IMAGE_TOKEN_NAMES: &[&str] = &["image_token_index", "image_token_id"];
/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `llava.py`).
pub(super) const PROMPT_TEXT: &str = "<image>";
/// The settings that a request may override.
const KWARGS: &[&str] = &["size", "crop_size", "do_resize", "do_center_crop", "resample"];

/// A LLaVA-1.5 model.
#[derive(Clone, Debug)]
pub(crate) struct Llava {
    file: Section,
    settings: Settings,
    tower: Tower,
    image_token: TokenId,
    prompt: ImagePrompt,
}

/// The settings of a model's image processor.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    /// The resize; `None` if resizing is off.
    resize: Option<ResizeTarget>,
    /// The size of the centre crop; `None` if cropping is off.
    crop: Option<ImageSize>,
    filter: Filter,
    normalization: Normalization,
}

impl Settings {
    fn read(file: &Section) -> Result<Self, VisionError> {
        let siglip =
            file.text("image_processor_type")?.is_some_and(|name| name.starts_with("Siglip"));
        let side = ImageSize::square(224);
        let (default_target, mean_std) = if siglip {
            (ResizeTarget::Exact(side), STANDARD)
        } else {
            (ResizeTarget::ShortestEdge(224), CLIP)
        };
        if file.flag("do_pad", false)? {
            return Err(file.problem(
                "do_pad",
                "must not be true: padding to a square before resizing is not supported",
            ));
        }
        let resize = file
            .flag("do_resize", true)?
            .then(|| settings::resize_target(file, default_target, false))
            .transpose()?;
        let crop = file
            .flag("do_center_crop", !siglip)?
            .then(|| settings::exact_size(file, "crop_size", side));
        Ok(Self {
            resize,
            crop: crop.transpose()?,
            filter: settings::resample(file, Filter::Bicubic)?,
            normalization: settings::normalization(file, mean_std)?,
        })
    }
}

impl Llava {
    /// Reads the settings of a model directory.
    pub(crate) fn read(dir: &ModelDir) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?.clone();
        let settings = Settings::read(&file)?;
        let image_token = dir.token(IMAGE_TOKEN_NAMES, IMAGE_TOKEN)?;
        let prompt = ImagePrompt::token(PROMPT_TEXT, image_token);
        Ok(Arc::new(Self { file, settings, tower: Tower::read(dir)?, image_token, prompt }))
    }
}

impl Family for Llava {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let file = settings::with_overrides(&self.file, kwargs, KWARGS)?;
        let settings = Settings::read(&file).map_err(settings::as_kwarg_error)?;
        Ok(Arc::new(Self { file, settings, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let Settings { resize, crop, filter, .. } = self.settings;
        let resized = resize.map_or(size, |target| target.resized(size));
        let found = crop.unwrap_or(resized);
        let expected = self.tower.size();
        if found != expected {
            return Err(VisionError::TowerSize { size, found, expected });
        }
        let side = self.tower.side as usize;
        let grid = TileGrid::single(side, side);
        let layer = Layer {
            width: resized.width as usize,
            height: resized.height as usize,
            left: centered(resized.width, self.tower.side),
            top: centered(resized.height, self.tower.side),
            ..Layer::whole(size.width as usize, size.height as usize, Layout::Tiles(grid))
        };
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![3, side, side],
            field: TensorField::Batched { keep_on_cpu: false },
            resampler: Resampler::Torch(filter),
            layers: vec![layer],
        };
        let placeholder =
            vec![TokenRun { token: self.image_token, count: self.tower.tokens, embeds: true }];
        ImagePlan::new(size, resized, [1; 3], placeholder, pixels, Vec::new())
    }

    fn largest_image(&self) -> ImageSize {
        self.tower.size()
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { file: _, settings, tower, image_token, prompt: _ } = self;
        let Settings { resize, crop, filter, ref normalization } = *settings;
        match resize {
            Some(ResizeTarget::ShortestEdge(edge)) => out.integer("shortest_edge", edge),
            Some(ResizeTarget::Exact(size)) => out.size("size", size),
            None => {}
        }
        // Without a resize, the filter has no effect.
        if resize.is_some() {
            out.filter("resample", filter);
        }
        if let Some(size) = crop {
            out.size("crop", size);
        }
        normalization.fingerprint(out);
        tower.fingerprint(out);
        out.tokens("image_token", &[*image_token]);
    }

    fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}

/// Returns the start of a range of `length` centred on a canvas of `side`; negative if it is
/// longer.
///
/// Follows `TorchvisionBackend.center_crop`.
pub(crate) fn centered(length: u32, side: u32) -> isize {
    let length = length as isize;
    let side = side as isize;
    if length >= side { -((length - side) / 2) } else { (side - length) / 2 }
}
