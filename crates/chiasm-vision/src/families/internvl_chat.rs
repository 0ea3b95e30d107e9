//! InternVL 2.5 and 3 as published by OpenGVLab (`model_type` internvl_chat).
//!
//! Follows vLLM 0.33's own processor (`vllm/transformers_utils/processors/internvl.py`), which
//! resizes with Pillow. The image is resized to the arrangement of tiles with the closest aspect
//! ratio; a thumbnail follows. All settings are in config.json.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::tiled::{self, Arrangement, ImageTokens, MAX_TILES, Tiles};
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Normalization, Resampler};
use crate::model_dir::{ModelDir, Section};
use crate::settings;
use crate::{ImagePlan, ImageSize, VisionError, Vocabulary};

/// `IMAGENET_MEAN` and `IMAGENET_STD` of the processor.
const IMAGENET: ([f64; 3], [f64; 3]) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `internvl.py`). It is not a
/// single token.
const PROMPT_TEXT: &str = "<image>";
/// The text that is tokenized in place of [`PROMPT_TEXT`]: the placeholder of an image of one
/// token.
const PROMPT_TOKENS: &str = "<img><IMG_CONTEXT></img>";
/// The settings that a request may override.
const KWARGS: &[&str] =
    &["min_dynamic_patch", "max_dynamic_patch", "dynamic_image_size", "use_thumbnail"];
/// The maximum side of a tile in pixels. Far above that of any model; keeps products within bounds.
const MAX_SIDE_PIXELS: u64 = 1 << 14;

/// An InternVL model.
#[derive(Clone, Debug)]
pub(crate) struct InternVlChat {
    config: Section,
    settings: Settings,
    normalization: Normalization,
    tokens: ImageTokens,
    prompt: ImagePrompt,
    tile: ImageSize,
    /// The number of embeddings per tile.
    tile_tokens: usize,
    takes_videos: bool,
}

/// The settings of tiles in config.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    min_tiles: u32,
    max_tiles: u32,
    thumbnail: bool,
}

impl Settings {
    fn read(config: &Section) -> Result<Self, VisionError> {
        // These are the defaults of the model's own configuration class.
        let tiles = |key, default: u64| match config.get(key).map_or(Some(default), Value::as_u64) {
            Some(tiles @ 0..=MAX_TILES) => Ok(tiles as u32),
            _ => Err(config.problem(key, format!("must be an integer from 0 to {MAX_TILES}"))),
        };
        let min_tiles = tiles("min_dynamic_patch", 1)?;
        let max_tiles = tiles("max_dynamic_patch", 6)?;
        let dynamic = config.flag("dynamic_image_size", false)?;
        let (min_tiles, max_tiles) = if dynamic { (min_tiles, max_tiles) } else { (1, 1) };
        Ok(Self { min_tiles, max_tiles, thumbnail: config.flag("use_thumbnail", false)? })
    }

    /// Returns the arrangement of tiles for an image of this size.
    ///
    /// The processor sorts arrangements by their number of tiles only; those with the same number
    /// are in the order of a Python set.
    ///
    /// # Errors
    /// [`VisionError::AmbiguousTiles`] if the result depends on that order.
    fn arrangement(self, size: ImageSize, tile: ImageSize) -> Result<Arrangement, VisionError> {
        let mut arrangements = tiled::arrangements(self.min_tiles, self.max_tiles);
        let chosen = tiled::closest(&arrangements, size, tile);
        arrangements.reverse();
        arrangements.sort_by_key(|(columns, rows)| columns * rows);
        if tiled::closest(&arrangements, size, tile) != chosen {
            return Err(VisionError::AmbiguousTiles { size });
        }
        Ok(chosen)
    }
}

impl InternVlChat {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let side = |key, default| match dir.vision.positive(key)?.unwrap_or(default) {
            side @ 1..=MAX_SIDE_PIXELS => Ok(side),
            _ => Err(dir.vision.problem(key, format!("must be at most {MAX_SIDE_PIXELS}"))),
        };
        let image_side = side("image_size", 448)?;
        let patch_side = side("patch_size", 14)?;
        let ratio = settings::downsample_ratio(&dir.config, "downsample_ratio")?;
        let patches = image_side / patch_side;
        // int(patches² · ratio²) in Python.
        let tile_tokens = ((patches * patches) as f64 * (ratio * ratio)) as usize;
        if tile_tokens == 0 {
            return Err(dir.vision.problem("patch_size", "leaves no embedding of an image"));
        }
        let tokens = ImageTokens::read(vocabulary, "internvl_chat")?;
        let prompt = ImagePrompt {
            text: PROMPT_TEXT,
            marker: vec![tokens.start, tokens.context, tokens.end],
            rewrite: Some((PROMPT_TEXT, PROMPT_TOKENS)),
            joins: Vec::new(),
        };
        Ok(Arc::new(Self {
            config: dir.config.clone(),
            settings: Settings::read(&dir.config)?,
            normalization: Normalization::unit(IMAGENET),
            tokens,
            prompt,
            tile: ImageSize::square(image_side as u32),
            tile_tokens,
            takes_videos: takes_videos(dir, vocabulary),
        }))
    }
}

/// Returns `true` if vLLM passes videos to the model, which depends on the language model and its
/// tokens (`ctx_video_token` in vLLM's `internvl.py`).
fn takes_videos(dir: &ModelDir, vocabulary: &dyn Vocabulary) -> bool {
    let language_model = ["llm_config", "text_config"]
        .iter()
        .find_map(|part| dir.config.get(part)?.get("model_type")?.as_str());
    let token = match language_model {
        Some("qwen2" | "qwen3" | "qwen3_moe") => "<|video_pad|>",
        Some("gpt_oss") => "<|reserved_200000|>",
        _ => return false,
    };
    vocabulary.id(token).is_some()
}

impl Family for InternVlChat {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let config = settings::with_overrides(&self.config, kwargs, KWARGS)?;
        let settings = Settings::read(&config).map_err(settings::as_kwarg_error)?;
        Ok(Arc::new(Self { config, settings, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let arrangement = self.settings.arrangement(size, self.tile)?;
        let tiles = Tiles {
            arrangement,
            tile: self.tile,
            thumbnail: self.settings.thumbnail,
            tile_tokens: self.tile_tokens,
            tokens: self.tokens,
        };
        tiles.plan(size, "pixel_values_flat", Resampler::Pillow(Filter::Bicubic))
    }

    fn largest_image(&self) -> ImageSize {
        tiled::row_size(self.settings.max_tiles, self.tile)
    }

    fn largest_video(&self, context_tokens: usize, image_tokens: usize) -> usize {
        if !self.takes_videos {
            return 0;
        }
        tiled::longest_video(context_tokens, image_tokens, self.tile_tokens)
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        let Self {
            config: _,
            settings,
            normalization,
            tokens,
            prompt: _,
            tile,
            tile_tokens,
            takes_videos: _,
        } = self;
        let Settings { min_tiles, max_tiles, thumbnail } = *settings;
        out.size("tile", *tile);
        out.integer("min_tiles", min_tiles);
        out.integer("max_tiles", max_tiles);
        // One tile has no thumbnail.
        out.flag("thumbnail", thumbnail && max_tiles > 1);
        normalization.fingerprint(out);
        out.count("tile_tokens", *tile_tokens);
        tokens.fingerprint(out);
    }

    fn normalization(&self) -> &Normalization {
        &self.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}
