//! Pixtral and Mistral 3: `PixtralImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it for
//! the checkpoints in the form of `transformers` (`model_type` llava with a pixtral vision tower,
//! and mistral3).
//!
//! The image keeps its shape, is shrunk if it is too large, and is stretched to whole patches. A
//! token follows each row of patches, another the last.

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

/// What stands for an image in a prompt: the token that embeds.
const PROMPT_TEXT: &str = "[IMG]";
/// Far above any model's; keeps products within bounds.
const LARGEST_SIDE: u64 = 1 << 14;

/// The two families that share this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    /// A token per patch of the tower; the tower's size bounds the image.
    Pixtral,
    /// A token per square of patches; the image processor's size bounds the image, which a request
    /// may replace.
    Mistral3,
}

/// One model.
#[derive(Clone, Debug)]
pub(crate) struct Pixtral {
    generation: Generation,
    file: Section,
    /// Longest side of a resized image.
    longest: u32,
    /// Side of the square of pixels that becomes a token.
    step: u32,
    filter: Filter,
    normalization: Normalization,
    image: TokenId,
    row_break: TokenId,
    end: TokenId,
    prompt: ImagePrompt,
}

impl Pixtral {
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
        let longest = longest_edge(&file)?;
        if generation == Generation::Pixtral {
            // vLLM counts tokens by the tower's size.
            let expected = dir.vision.positive("image_size")?.unwrap_or(1024);
            if u64::from(longest) != expected {
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
            longest,
            step: step(dir, generation)?,
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

/// `size.longest_edge`.
fn longest_edge(file: &Section) -> Result<u32, VisionError> {
    let Some(size) = file.section("size")? else {
        return Ok(1024);
    };
    let edge = size.get("longest_edge").and_then(Value::as_u64);
    match edge.filter(|edge| size.values.len() == 1 && (1..=LARGEST_SIDE).contains(edge)) {
        Some(edge) => Ok(edge as u32),
        None => {
            Err(file
                .problem("size", format!("must have longest_edge alone, from 1 to {LARGEST_SIDE}")))
        }
    }
}

/// The processor's patch times merge size, which must be the engine's.
fn step(dir: &ModelDir, generation: Generation) -> Result<u32, VisionError> {
    let number = |section: &Section, key, default| match section.positive(key)?.unwrap_or(default) {
        side @ 1..=LARGEST_SIDE => Ok(side),
        _ => Err(section.problem(key, format!("must be at most {LARGEST_SIDE}"))),
    };
    let merge = match generation {
        Generation::Pixtral => 1,
        Generation::Mistral3 => number(&dir.config, "spatial_merge_size", 2)?,
    };
    let expected = number(&dir.vision, "patch_size", 16)? * merge;
    let patch = number(&dir.processor, "patch_size", 16)?;
    let found = patch * number(&dir.processor, "spatial_merge_size", 1)?;
    if found != expected || found > LARGEST_SIDE {
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
        let file = settings::overridden(&self.file, kwargs, known)?;
        let longest = longest_edge(&file).map_err(settings::as_kwarg)?;
        Ok(Arc::new(Self { file, longest, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let longest = f64::from(self.longest);
        let ratio = (f64::from(size.height) / longest).max(f64::from(size.width) / longest);
        let shrunk =
            |side: u32| if ratio > 1.0 { (f64::from(side) / ratio).floor() as u32 } else { side };
        let (width, height) = (shrunk(size.width), shrunk(size.height));
        if width == 0 || height == 0 {
            // Python goes on with (0 - 1) // patch + 1 = 0 patches, and fails.
            return Err(VisionError::AspectRatio { size, limit: self.longest });
        }
        let (columns, rows) = (width.div_ceil(self.step), height.div_ceil(self.step));
        let resized = ImageSize { width: columns * self.step, height: rows * self.step };
        let (width, height) = (resized.width as usize, resized.height as usize);
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
        ImageSize::square(self.longest)
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        // The generation changes which settings there are, not what they do.
        let Self {
            generation: _,
            file: _,
            longest,
            step,
            filter,
            normalization,
            image,
            row_break,
            end,
            prompt: _,
        } = self;
        out.integer("longest_edge", *longest);
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
