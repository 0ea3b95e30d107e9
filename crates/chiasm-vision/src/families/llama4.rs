//! Llama 4.
//!
//! Follows `Llama4ImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it. The image is
//! fitted into a canvas of tiles, padded and cut. If there are several tiles, one tile of the whole
//! image follows. Pixels are normalised in bfloat16.

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, Resampler, TileGrid};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, STANDARD};
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError, Vocabulary};

/// The text of an image in a prompt (`get_placeholder_str` in vLLM's `mllama4.py`).
const PROMPT_TEXT: &str = "<|image|>";
/// The settings that a request may override. The engine would not apply others.
const KWARGS: &[&str] = &["resize_to_max_canvas"];
/// The maximum number of tiles. It exceeds that of every model and keeps lists of canvases short.
const MAX_TILES: u64 = 256;
/// The maximum side in pixels. It exceeds that of every model by far and keeps products within
/// bounds.
const MAX_SIDE_PIXELS: u64 = 1 << 14;

/// A Llama 4 model.
#[derive(Clone, Debug)]
pub(crate) struct Llama4 {
    file: Section,
    settings: Settings,
    /// The candidate canvases as columns and rows of tiles, in the order in which they are tried.
    canvases: Vec<(u32, u32)>,
    /// The number of embeddings per tile.
    tile_tokens: usize,
    tokens: Tokens,
    prompt: ImagePrompt,
}

/// The settings of a model's image processor.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    /// The side of a tile in pixels.
    side: u32,
    max_tiles: u32,
    to_max_canvas: bool,
    filter: Filter,
    normalization: Normalization,
}

/// The tokens of an image.
#[derive(Clone, Copy, Debug)]
struct Tokens {
    start: TokenId,
    patch: TokenId,
    tile_break: TokenId,
    row_break: TokenId,
    image: TokenId,
    end: TokenId,
}

impl Settings {
    fn read(file: &Section) -> Result<Self, VisionError> {
        let size = settings::exact_size(file, "size", ImageSize::square(336))?;
        if size.width != size.height {
            return Err(file.problem("size", "must be square"));
        }
        let max_tiles = match file.nullable_positive("max_patches")?.unwrap_or(16) {
            tiles @ 1..=MAX_TILES => tiles as u32,
            _ => return Err(file.problem("max_patches", format!("must be at most {MAX_TILES}"))),
        };
        if !file.flag("do_resize", true)? {
            return Err(file.problem("do_resize", "must be true"));
        }
        let normalization = match settings::rescale_and_normalize(file, STANDARD)? {
            (Some(factor), Some(mean_std)) => Normalization::bfloat16(factor, mean_std),
            (Some(_), None) => return Err(file.problem("do_normalize", "must be true")),
            (None, _) => return Err(file.problem("do_rescale", "must be true")),
        };
        Ok(Self {
            side: size.width,
            max_tiles,
            to_max_canvas: file.flag("resize_to_max_canvas", false)?,
            filter: settings::resample(file, Filter::Bilinear)?,
            normalization,
        })
    }
}

impl Llama4 {
    /// Reads the settings of a model directory.
    pub(crate) fn read(
        dir: &ModelDir,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?.clone();
        let settings = Settings::read(&file)?;
        let tower = |key, default| match dir.vision.positive(key)?.unwrap_or(default) {
            side @ 1..=MAX_SIDE_PIXELS => Ok(side),
            _ => Err(dir.vision.problem(key, format!("must be at most {MAX_SIDE_PIXELS}"))),
        };
        let side = tower("image_size", 448)?;
        let patch = tower("patch_size", 14)?;
        if u64::from(settings.side) != side {
            return Err(file.problem("size", format!("must be that of the vision tower, {side}")));
        }
        let ratio = settings::downsample_ratio(&dir.vision, "pixel_shuffle_ratio")?;
        // `get_patch_per_chunk` in vLLM's `mllama4.py`. Python's round() rounds halves to even.
        let shuffled = (1.0 / (ratio * ratio)).round_ties_even() as u64;
        let tile_tokens = (side / patch) * (side / patch) / shuffled.max(1);
        if tile_tokens == 0 || !side.is_multiple_of(patch) {
            return Err(dir
                .vision
                .problem("patch_size", "must divide image_size and leave an embedding of a tile"));
        }
        let id = |token| {
            vocabulary.id(token).ok_or(VisionError::MissingToken { token, model_type: "llama4" })
        };
        let tokens = Tokens {
            start: id("<|image_start|>")?,
            patch: id("<|patch|>")?,
            tile_break: id("<|tile_x_separator|>")?,
            row_break: id("<|tile_y_separator|>")?,
            image: id("<|image|>")?,
            end: id("<|image_end|>")?,
        };
        Ok(Arc::new(Self {
            canvases: canvases(settings.max_tiles),
            tile_tokens: tile_tokens as usize,
            prompt: ImagePrompt::token(PROMPT_TEXT, tokens.image),
            file,
            settings,
            tokens,
        }))
    }

    /// Returns the columns and rows of the canvas into which the image fits best.
    ///
    /// Follows `get_best_fit`, whose scales are all f32.
    fn best_canvas(&self, size: ImageSize) -> (u32, u32) {
        let scale = |tiles: u32, length: u32| (tiles * self.settings.side) as f32 / length as f32;
        let scales = self.canvases.iter().map(|&(columns, rows)| {
            let width = scale(columns, size.width);
            let height = scale(rows, size.height);
            if height > width { width } else { height }
        });
        let scales: Vec<f32> = scales.collect();
        let up = scales.iter().copied().filter(|&scale| scale >= 1.0);
        let up =
            if self.settings.to_max_canvas { up.reduce(f32::max) } else { up.reduce(f32::min) };
        let chosen = up.or_else(|| scales.iter().copied().reduce(f32::max));
        let fitting =
            self.canvases.iter().zip(&scales).filter(|(_, scale)| Some(**scale) == chosen);
        let smallest =
            fitting.map(|(canvas, _)| *canvas).min_by_key(|(columns, rows)| columns * rows);
        smallest.unwrap_or((1, 1))
    }

    /// Returns the placeholder of an image with this canvas (`_prompt_split_image`).
    fn placeholder(&self, columns: u32, rows: u32) -> Vec<TokenRun> {
        let tokens = self.tokens;
        let single = |token| TokenRun { token, count: 1, embeds: false };
        let tile = TokenRun { token: tokens.patch, count: self.tile_tokens, embeds: true };
        let mut runs = vec![single(tokens.start)];
        if columns * rows > 1 {
            for _ in 0..rows {
                for column in 1..=columns {
                    runs.push(tile);
                    runs.push(single(if column < columns {
                        tokens.tile_break
                    } else {
                        tokens.row_break
                    }));
                }
            }
        }
        runs.extend([single(tokens.image), tile, single(tokens.end)]);
        runs
    }
}

/// Returns all canvases of at most `max_tiles` tiles, grouped by aspect ratio, larger first
/// (`find_supported_resolutions`).
fn canvases(max_tiles: u32) -> Vec<(u32, u32)> {
    let mut by_ratio: Vec<(f64, Vec<(u32, u32)>)> = Vec::new();
    for tiles in (1..=max_tiles).rev() {
        for rows in (1..=tiles).filter(|&rows| tiles.is_multiple_of(rows)) {
            let columns = tiles / rows;
            let ratio = f64::from(rows) / f64::from(columns);
            match by_ratio.iter_mut().find(|(known, _)| *known == ratio) {
                Some((_, canvases)) => canvases.push((columns, rows)),
                None => by_ratio.push((ratio, vec![(columns, rows)])),
            }
        }
    }
    by_ratio.into_iter().flat_map(|(_, canvases)| canvases).collect()
}

impl Family for Llama4 {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        let file = settings::with_overrides(&self.file, kwargs, KWARGS)?;
        let settings = Settings::read(&file).map_err(settings::as_kwarg_error)?;
        Ok(Arc::new(Self { file, settings, ..self.clone() }))
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let side = self.settings.side;
        let (columns, rows) = self.best_canvas(size);
        let canvas = ImageSize { width: columns * side, height: rows * side };
        let resized = fitted(size, canvas, (!self.settings.to_max_canvas).then_some(side));
        let width = size.width as usize;
        let height = size.height as usize;
        let tile = TileGrid::single(side as usize, side as usize);
        let tiles = TileGrid { columns: columns as usize, rows: rows as usize, ..tile };
        let mut layers = vec![Layer {
            width: resized.width as usize,
            height: resized.height as usize,
            ..Layer::whole(width, height, Layout::Tiles(tiles))
        }];
        if tiles.len() > 1 {
            layers.push(Layer::whole(width, height, Layout::Tiles(tile)));
        }
        let count: usize = layers.iter().map(|layer| layer.layout.tile_count()).sum();
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![count, 3, side as usize, side as usize],
            field: TensorField::rows(count),
            resampler: Resampler::Torch(self.settings.filter),
            layers,
        };
        let field = TensorField::Batched { keep_on_cpu: true };
        let small_tensors = vec![
            TensorSpec::integers("patches_per_image", vec![], field, &[count as i64]),
            TensorSpec::integers("aspect_ratios", vec![2], field, &[rows.into(), columns.into()]),
        ];
        ImagePlan::new(
            size,
            resized,
            [1, rows, columns],
            self.placeholder(columns, rows),
            pixels,
            small_tensors,
        )
    }

    fn largest_image(&self) -> ImageSize {
        let Settings { side, max_tiles, .. } = self.settings;
        ImageSize { width: side, height: max_tiles * side }
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        // The canvases are determined by the number of tiles.
        let Self { file: _, settings, canvases: _, tile_tokens, tokens, prompt: _ } = self;
        let Settings { side, max_tiles, to_max_canvas, filter, ref normalization } = *settings;
        let Tokens { start, patch, tile_break, row_break, image, end } = *tokens;
        out.integer("tile_side", side);
        out.integer("max_tiles", max_tiles);
        out.flag("resize_to_max_canvas", to_max_canvas);
        out.filter("resample", filter);
        normalization.fingerprint(out);
        out.count("tile_tokens", *tile_tokens);
        out.tokens(
            "start, patch, tile break, row break, image, end",
            &[start, patch, tile_break, row_break, image, end],
        );
    }

    fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}

/// Returns the largest size with the image's aspect ratio on the canvas.
///
/// With a `tile_side`, each side is also bounded by the larger of the image's side and `tile_side`,
/// if that is within the canvas. Follows `Llama4ImageProcessor._preprocess` and
/// `get_max_res_without_distortion`.
///
/// In Python, a bound from the canvas is a torch tensor with f32 arithmetic. A bound from the image
/// is a Python number with f64 arithmetic.
fn fitted(size: ImageSize, canvas: ImageSize, tile_side: Option<u32>) -> ImageSize {
    let target = |length: u32, canvas: u32| match tile_side {
        Some(side) if length.max(side) <= canvas => (length.max(side), false),
        _ => (canvas, true),
    };
    let (width, width_is_tensor) = target(size.width, canvas.width);
    let (height, height_is_tensor) = target(size.height, canvas.height);
    let scale_width = Scale::new(width, size.width, width_is_tensor);
    let scale_height = Scale::new(height, size.height, height_is_tensor);
    let (width, height) = if scale_width.is_less_than(scale_height) {
        (width, scale_width.apply(size.height).min(height))
    } else {
        (scale_height.apply(size.width).min(width), height)
    };
    ImageSize { width: width.max(1), height: height.max(1) }
}

/// A quotient with the precision that it has in Python.
#[derive(Clone, Copy)]
enum Scale {
    /// The quotient of a torch tensor.
    Tensor(f32),
    /// The quotient of Python numbers.
    Number(f64),
}

impl Scale {
    fn new(target: u32, length: u32, is_tensor: bool) -> Self {
        if is_tensor {
            Self::Tensor(target as f32 / length as f32)
        } else {
            Self::Number(f64::from(target) / f64::from(length))
        }
    }

    /// Returns `true` if `self` is less than `other`. A number is rounded to f32 when it is
    /// compared with a tensor.
    fn is_less_than(self, other: Self) -> bool {
        match (self, other) {
            (Self::Number(one), Self::Number(other)) => one < other,
            (Self::Tensor(one), Self::Tensor(other)) => one < other,
            (Self::Tensor(one), Self::Number(other)) => one < other as f32,
            (Self::Number(one), Self::Tensor(other)) => (one as f32) < other,
        }
    }

    /// Returns `floor(length * scale)`.
    fn apply(self, length: u32) -> u32 {
        match self {
            Self::Tensor(scale) => (length as f32 * scale).floor() as u32,
            Self::Number(scale) => (f64::from(length) * scale).floor() as u32,
        }
    }
}
