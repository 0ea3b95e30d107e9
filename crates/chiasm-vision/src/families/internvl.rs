//! InternVL in the `transformers` format (`model_type` internvl).
//!
//! Follows `GotOcr2ImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it for
//! `InternVLForConditionalGeneration`. The image is resized to the arrangement of tiles with the
//! closest aspect ratio; a thumbnail follows.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::tiled::{self, ImageTokens, MAX_TILES, Tiles};
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Normalization, Resampler};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, CLIP};
use crate::{ImagePlan, ImageSize, VisionError, Vocabulary};

/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `interns1.py`).
const PROMPT_TEXT: &str = "<IMG_CONTEXT>";
/// The settings that a request may override.
const KWARGS: &[&str] = &["crop_to_patches", "min_patches", "max_patches"];

/// An InternVL model.
#[derive(Clone, Debug)]
pub(crate) struct InternVl {
    file: Section,
    settings: Settings,
    tokens: ImageTokens,
    prompt: ImagePrompt,
    /// The number of embeddings per tile.
    tile_tokens: usize,
}

/// The settings of a model's image processor.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    tile: ImageSize,
    crop: bool,
    min_tiles: u32,
    max_tiles: u32,
    filter: Filter,
    normalization: Normalization,
}

impl Settings {
    /// Reads the settings. `crop` is `true` if the image is cut into tiles.
    fn read(file: &Section, crop: bool) -> Result<Self, VisionError> {
        let tiles = |key, default| match file.nullable_positive(key)?.unwrap_or(default) {
            tiles @ 1..=MAX_TILES => Ok(tiles as u32),
            _ => Err(file.problem(key, format!("must be at most {MAX_TILES}"))),
        };
        if !file.flag("do_resize", true)? {
            return Err(file.problem("do_resize", "must be true"));
        }
        Ok(Self {
            tile: settings::exact_size(file, "size", ImageSize::square(384))?,
            crop,
            min_tiles: tiles("min_patches", 1)?,
            max_tiles: tiles("max_patches", 12)?,
            filter: settings::resample(file, Filter::Bicubic)?,
            normalization: settings::normalization(file, CLIP)?,
        })
    }
}

impl InternVl {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?.clone();
        // The processor of text and images (`InternVLProcessorKwargs`) always cuts tiles, whatever
        // the file has.
        let settings = Settings::read(&file, true)?;
        let tokens = ImageTokens::read(vocabulary, "internvl")?;
        let prompt = ImagePrompt::token(PROMPT_TEXT, tokens.context);
        let tile_tokens = tile_tokens(dir, settings.tile)?;
        Ok(Arc::new(Self { file, settings, tokens, prompt, tile_tokens }))
    }
}

/// Returns the number of embeddings per tile.
///
/// # Errors
/// Fails if the processor's number differs from the number that the engine computes.
fn tile_tokens(dir: &ModelDir, tile: ImageSize) -> Result<usize, VisionError> {
    let expected = settings::exact_size(&dir.vision, "image_size", ImageSize::square(448))?;
    let patch = settings::exact_size(&dir.vision, "patch_size", ImageSize::square(14))?;
    if tile != expected {
        return Err(dir
            .image_processor()?
            .problem("size", format!("must be that of the vision tower, {expected}")));
    }
    let ratio = settings::downsample_ratio(&dir.config, "downsample_ratio")?;
    let side = |length: u32, patch: u32| (f64::from(length / patch) * ratio) as u64;
    let expected = side(tile.width, patch.width) * side(tile.height, patch.height);
    let found = dir.processor.positive("image_seq_length")?.unwrap_or(256);
    if found != expected {
        let problem = format!("is {found}, but the model makes {expected} embeddings of a tile");
        return Err(dir.processor.problem("image_seq_length", problem));
    }
    Ok(found as usize)
}

impl Family for InternVl {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let file = settings::with_overrides(&self.file, kwargs, KWARGS)?;
        let crop = match kwargs.get("crop_to_patches") {
            Some(_) => file.flag("crop_to_patches", true).map_err(settings::as_kwarg_error)?,
            None => self.settings.crop,
        };
        let settings = Settings::read(&file, crop).map_err(settings::as_kwarg_error)?;
        Ok(Arc::new(Self { file, settings, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let Settings { tile, crop, min_tiles, max_tiles, filter, .. } = self.settings;
        let arrangement = if crop {
            tiled::closest(&tiled::arrangements(min_tiles, max_tiles), size, tile)
        } else {
            (1, 1)
        };
        let tiles = Tiles {
            arrangement,
            tile,
            thumbnail: true,
            tile_tokens: self.tile_tokens,
            tokens: self.tokens,
        };
        tiles.plan(size, "pixel_values", Resampler::Torch(filter))
    }

    fn largest_image(&self) -> ImageSize {
        let Settings { tile, crop, min_tiles, max_tiles, .. } = self.settings;
        // vLLM searches for the largest image with the image processor's own `crop_to_patches`. If
        // that is off, all candidates have one tile and vLLM picks the first, which the processor
        // of text and images then cuts.
        let crop_in_file = self.file.flag("crop_to_patches", false).unwrap_or(false);
        let tiles = match (crop, crop_in_file) {
            (true, true) => max_tiles,
            (true, false) => min_tiles,
            (false, _) => 1,
        };
        tiled::row_size(tiles, tile)
    }

    fn largest_video(&self, context_tokens: usize, image_tokens: usize) -> usize {
        tiled::longest_video(context_tokens, image_tokens, self.tile_tokens)
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { file: _, settings, tokens, prompt: _, tile_tokens } = self;
        let Settings { tile, crop, min_tiles, max_tiles, filter, ref normalization } = *settings;
        // An image that is not cut is one tile.
        let (min_tiles, max_tiles) = if crop { (min_tiles, max_tiles) } else { (1, 1) };
        out.size("tile", tile);
        out.integer("min_tiles", min_tiles);
        out.integer("max_tiles", max_tiles);
        out.filter("resample", filter);
        normalization.fingerprint(out);
        out.count("tile_tokens", *tile_tokens);
        tokens.fingerprint(out);
    }

    fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}
