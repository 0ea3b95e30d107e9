//! LLaVA-1.5: one square per image, `CLIPImageProcessor` and its like of `transformers` 5.20, as
//! vLLM 0.33 calls them.
//!
//! The shorter side is resized to the tower's side, the middle is cut out; every image has the same
//! number of tokens.

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
use crate::settings::{self, CLIP, STANDARD, Target};
use crate::{ImagePlan, ImageSize, VisionError};

/// `image_token_index` of `LlavaConfig`, for a config.json without it.
pub(super) const IMAGE_TOKEN: u32 = 32_000;
/// The names under which config.json may have it.
pub(super) const IMAGE_TOKEN_NAMES: &[&str] = &["image_token_index", "image_token_id"];
/// What stands for an image in a prompt (`get_placeholder_str` in vLLM's `llava.py`).
pub(super) const PROMPT_TEXT: &str = "<image>";
/// Settings that a request may replace.
const KWARGS: &[&str] = &["size", "crop_size", "do_resize", "do_center_crop", "resample"];

/// One LLaVA-1.5 model.
#[derive(Clone, Debug)]
pub(crate) struct Llava {
    file: Section,
    settings: Settings,
    tower: Tower,
    image_token: TokenId,
    prompt: ImagePrompt,
}

/// Settings of one model's image processor.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    /// `None` if resizing is off.
    target: Option<Target>,
    /// `None` if cropping is off.
    crop: Option<ImageSize>,
    filter: Filter,
    normalization: Normalization,
}

impl Settings {
    fn read(file: &Section) -> Result<Self, VisionError> {
        let siglip =
            file.text("image_processor_type")?.is_some_and(|name| name.starts_with("Siglip"));
        let side = ImageSize::square(224);
        let (target, mean_std) = if siglip {
            (Target::Exact(side), STANDARD)
        } else {
            (Target::ShortestEdge(224), CLIP)
        };
        if file.flag("do_pad", false)? {
            return Err(file.problem(
                "do_pad",
                "must not be true: padding to a square before resizing is not supported",
            ));
        }
        let target = file
            .flag("do_resize", true)?
            .then(|| settings::target(file, target, false))
            .transpose()?;
        let crop = file
            .flag("do_center_crop", !siglip)?
            .then(|| settings::exact_size(file, "crop_size", side));
        Ok(Self {
            target,
            crop: crop.transpose()?,
            filter: settings::resample(file, Filter::Bicubic)?,
            normalization: settings::normalization(file, mean_std)?,
        })
    }
}

impl Llava {
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
        let file = settings::overridden(&self.file, kwargs, KWARGS)?;
        let settings = Settings::read(&file).map_err(settings::as_kwarg)?;
        Ok(Arc::new(Self { file, settings, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let Settings { target, crop, filter, .. } = self.settings;
        let resized = target.map_or(size, |target| target.of(size));
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
        let Settings { target, crop, filter, ref normalization } = *settings;
        match target {
            Some(Target::ShortestEdge(edge)) => out.integer("shortest_edge", edge),
            Some(Target::Exact(size)) => out.size("size", size),
            None => {}
        }
        // Without resizing there is nothing to filter.
        if target.is_some() {
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

/// The start of something `length` long in the middle of a canvas of `side`
/// (`TorchvisionBackend.center_crop`).
fn centered(length: u32, side: u32) -> isize {
    let (length, side) = (length as isize, side as isize);
    if length >= side { -((length - side) / 2) } else { (side - length) / 2 }
}
