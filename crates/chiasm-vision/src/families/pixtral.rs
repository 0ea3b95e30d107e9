//! Pixtral and Mistral 3.
//!
//! Follows `PixtralImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it for checkpoints in
//! the `transformers` format: `model_type` llava with a pixtral vision tower, and mistral3. The
//! image is shrunk if it is too large, keeping its aspect ratio, and then stretched to whole
//! patches. A break token follows each row of patches except the last, which an end token follows.

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use super::llava::IMAGE_TOKEN_NAMES;
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, Resampler, TileGrid};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, CLIP};
use crate::{ImagePlan, ImageSize, VisionError, Vocabulary};

/// The text of an image in a prompt: that of the token that embeds.
const PROMPT_TEXT: &str = "[IMG]";
/// The maximum side in pixels. Far above that of any model; keeps products within bounds.
const MAX_SIDE_PIXELS: u64 = 1 << 14;

/// The two families that share this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    /// One token per patch of the tower. The tower's size bounds the image.
    Pixtral,
    /// One token per square of patches. The image processor's size bounds the image, and a request
    /// may override it.
    Mistral3,
}

/// A Pixtral or Mistral 3 model.
#[derive(Clone, Debug)]
pub(crate) struct Pixtral {
    generation: Generation,
    file: Section,
    /// The maximum side of a resized image in pixels.
    longest_edge: u32,
    /// The side in pixels of the square that becomes a token.
    step: u32,
    filter: Filter,
    normalization: Normalization,
    image: TokenId,
    row_break: TokenId,
    end: TokenId,
    prompt: ImagePrompt,
}

impl Pixtral {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        vocabulary: &dyn Vocabulary,
        generation: Generation,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?.clone();
        let model_type = match generation {
            Generation::Pixtral => "pixtral",
            Generation::Mistral3 => "mistral3",
        };
        let id =
            |token| vocabulary.id(token).ok_or(VisionError::MissingToken { token, model_type });
        let image = dir.token(
            IMAGE_TOKEN_NAMES,
            if generation == Generation::Pixtral { 32_000 } else { 10 },
        )?;
        let longest_edge = read_longest_edge(&file)?;
        if generation == Generation::Pixtral {
            // vLLM counts tokens based on the tower's size.
            let expected = dir.vision.positive("image_size")?.unwrap_or(1024);
            if u64::from(longest_edge) != expected {
                return Err(
                    file.problem("size", format!("must be that of the vision tower, {expected}"))
                );
            }
        }
        if !file.flag("do_resize", true)? {
            return Err(file.problem("do_resize", "must be true"));
        }
        Ok(Arc::new(Self {
            generation,
            longest_edge,
            step: read_step(dir, generation)?,
            filter: settings::resample(&file, Filter::Bicubic)?,
            normalization: settings::normalization(&file, CLIP)?,
            file,
            image,
            row_break: id("[IMG_BREAK]")?,
            end: id("[IMG_END]")?,
            prompt: ImagePrompt::token(PROMPT_TEXT, image),
        }))
    }
}

/// Reads `size.longest_edge`.
fn read_longest_edge(file: &Section) -> Result<u32, VisionError> {
    let Some(size) = file.section("size")? else {
        return Ok(1024);
    };
    let edge = size.get("longest_edge").and_then(Value::as_u64);
    match edge.filter(|edge| size.values.len() == 1 && (1..=MAX_SIDE_PIXELS).contains(edge)) {
        Some(edge) => Ok(edge as u32),
        None => Err(file
            .problem("size", format!("must have longest_edge alone, from 1 to {MAX_SIDE_PIXELS}"))),
    }
}

/// Reads the patch size times the merge size of the processor.
///
/// # Errors
/// Fails if it differs from that of the engine.
fn read_step(dir: &ModelDir, generation: Generation) -> Result<u32, VisionError> {
    let number = |section: &Section, key, default| match section.positive(key)?.unwrap_or(default) {
        side @ 1..=MAX_SIDE_PIXELS => Ok(side),
        _ => Err(section.problem(key, format!("must be at most {MAX_SIDE_PIXELS}"))),
    };
    let merge = match generation {
        Generation::Pixtral => 1,
        Generation::Mistral3 => number(&dir.config, "spatial_merge_size", 2)?,
    };
    let expected = number(&dir.vision, "patch_size", 16)? * merge;
    let patch = number(&dir.processor, "patch_size", 16)?;
    let found = patch * number(&dir.processor, "spatial_merge_size", 1)?;
    if found != expected || found > MAX_SIDE_PIXELS {
        let problem = format!(
            "times spatial_merge_size is {found}, but must be {expected} as in config.json"
        );
        return Err(dir.processor.problem("patch_size", problem));
    }
    Ok(found as u32)
}

impl Family for Pixtral {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let known: &[&str] = match self.generation {
            Generation::Pixtral => &[],
            Generation::Mistral3 => &["size"],
        };
        let file = settings::with_overrides(&self.file, kwargs, known)?;
        let longest_edge = read_longest_edge(&file).map_err(settings::as_kwarg_error)?;
        Ok(Arc::new(Self { file, longest_edge, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let longest_edge = f64::from(self.longest_edge);
        let height_ratio = f64::from(size.height) / longest_edge;
        let width_ratio = f64::from(size.width) / longest_edge;
        let ratio = height_ratio.max(width_ratio);
        let shrunk =
            |side: u32| if ratio > 1.0 { (f64::from(side) / ratio).floor() as u32 } else { side };
        let width = shrunk(size.width);
        let height = shrunk(size.height);
        if width == 0 || height == 0 {
            // Python continues with (0 - 1) // patch + 1 = 0 patches, and fails later.
            return Err(VisionError::AspectRatio { size, limit: self.longest_edge });
        }
        let columns = width.div_ceil(self.step);
        let rows = height.div_ceil(self.step);
        let resized = ImageSize { width: columns * self.step, height: rows * self.step };
        let width = resized.width as usize;
        let height = resized.height as usize;
        let layout = Layout::Tiles(TileGrid::single(width, height));
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![3, height, width],
            field: TensorField::Batched { keep_on_cpu: false },
            resampler: Resampler::Torch(self.filter),
            layers: vec![Layer::whole(size.width as usize, size.height as usize, layout)],
        };
        let mut placeholder = Vec::with_capacity(2 * rows as usize);
        for row in 1..=rows {
            let token = if row == rows { self.end } else { self.row_break };
            placeholder.push(TokenRun { token: self.image, count: columns as usize, embeds: true });
            placeholder.push(TokenRun { token, count: 1, embeds: false });
        }
        ImagePlan::new(size, resized, [1, rows, columns], placeholder, pixels, Vec::new())
    }

    fn largest_image(&self) -> ImageSize {
        ImageSize::square(self.longest_edge)
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        // The generation decides which settings exist, but not their effect.
        let Self {
            generation: _,
            file: _,
            longest_edge,
            step,
            filter,
            normalization,
            image,
            row_break,
            end,
            prompt: _,
        } = self;
        out.integer("longest_edge", *longest_edge);
        out.integer("token_side", *step);
        out.filter("resample", *filter);
        normalization.fingerprint(out);
        out.tokens("image, row break, end", &[*image, *row_break, *end]);
    }

    fn normalization(&self) -> &Normalization {
        &self.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}
