//! LLaVA-NeXT (anyres).
//!
//! Follows `LlavaNextImageProcessor` of `transformers` 5.20, as vLLM 0.33 calls it. The first tile
//! is the whole image resized to one square. For the other tiles, the image is fitted into the best
//! of a list of resolutions, padded and cut. The token count excludes the padding and includes a
//! newline token per row.

use std::sync::Arc;

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use super::llava::{IMAGE_TOKEN, IMAGE_TOKEN_NAMES, PROMPT_TEXT};
use super::tower::Tower;
use crate::family::Family;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::image_prompt::ImagePrompt;
use crate::kernels::{Filter, Layer, Layout, Normalization, Resampler, TileGrid};
use crate::model_dir::{ModelDir, Section};
use crate::settings::{self, CLIP, ResizeTarget};
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError};

/// The default `image_grid_pinpoints` of both `LlavaNextConfig` and `LlavaNextImageProcessor`, as
/// `(height, width)`.
const DEFAULT_PINPOINTS: [(u32, u32); 5] =
    [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)];
/// The maximum side of a resolution in pixels. Far larger than in any model; keeps products of
/// sides within bounds.
const MAX_SIDE_PIXELS: u64 = 1 << 14;

/// A LLaVA-NeXT model.
#[derive(Clone, Debug)]
pub(crate) struct LlavaNext {
    /// The candidate resolutions. The order decides ties.
    pinpoints: Vec<ImageSize>,
    filter: Filter,
    normalization: Normalization,
    tower: Tower,
    image_token: TokenId,
    prompt: ImagePrompt,
}

impl LlavaNext {
    /// Reads the settings of a model directory.
    pub(crate) fn read(dir: &ModelDir) -> Result<Arc<dyn Family>, VisionError> {
        let file = dir.image_processor()?;
        let tower = Tower::read(dir)?;
        check_tiles(file, tower)?;
        let pinpoints = read_pinpoints(file, tower)?;
        // The engine selects among the pinpoints of config.json.
        if pinpoints != read_pinpoints(&dir.config, tower)? {
            return Err(file.problem("image_grid_pinpoints", "differ from those in config.json"));
        }
        let image_token = dir.token(IMAGE_TOKEN_NAMES, IMAGE_TOKEN)?;
        Ok(Arc::new(Self {
            pinpoints,
            filter: settings::resample(file, Filter::Bicubic)?,
            normalization: settings::normalization(file, CLIP)?,
            tower,
            image_token,
            prompt: ImagePrompt::token(PROMPT_TEXT, image_token),
        }))
    }

    /// Returns the resolution that keeps the most pixels of the image and, among those, wastes the
    /// fewest (`select_best_resolution`).
    fn best_resolution(&self, size: ImageSize) -> Option<ImageSize> {
        let width = f64::from(size.width);
        let height = f64::from(size.height);
        let mut best: Option<(u64, u64, ImageSize)> = None;
        for &resolution in &self.pinpoints {
            let scale =
                (f64::from(resolution.width) / width).min(f64::from(resolution.height) / height);
            let fitted = (width * scale) as u64 * ((height * scale) as u64);
            let effective = fitted.min(size.area());
            let wasted = resolution.area() - effective;
            if best.is_none_or(|(best_effective, least_wasted, _)| {
                effective > best_effective || (effective == best_effective && wasted < least_wasted)
            }) {
                best = Some((effective, wasted, resolution));
            }
        }
        best.map(|(_, _, resolution)| resolution)
    }

    /// Returns the number of tokens of the tiles: without the padding, with one token per row end
    /// (`_get_num_unpadded_features` in vLLM's `llava_next.py`).
    fn tile_tokens(&self, size: ImageSize, tiles: TileGrid) -> usize {
        let width = f64::from(size.width);
        let height = f64::from(size.height);
        let mut columns = u64::from(self.tower.grid) * tiles.columns as u64;
        let mut rows = u64::from(self.tower.grid) * tiles.rows as u64;
        // int(round(length * (extent / other), 7)) in Python.
        let scaled = |length: f64, extent: u64, other: f64| {
            round_to_7_digits(length * (extent as f64 / other)) as u64
        };
        if width / height > columns as f64 / rows as f64 {
            let padding = (rows - scaled(height, columns, width).min(rows)) / 2;
            rows -= 2 * padding;
        } else {
            let padding = (columns - scaled(width, rows, height).min(columns)) / 2;
            columns -= 2 * padding;
        }
        (columns * rows + rows) as usize
    }
}

/// Rounds like Python's `round(x, 7)`, which rounds the exact value of the number, and halves to
/// even. Rust's formatting rounds in the same way.
fn round_to_7_digits(number: f64) -> f64 {
    format!("{number:.7}").parse().unwrap_or(number)
}

/// Checks that the second resize and crop, which the processor applies to each tile, change
/// nothing.
fn check_tiles(file: &Section, tower: Tower) -> Result<(), VisionError> {
    let side = tower.side;
    let keeps_tile = |target| {
        target == ResizeTarget::ShortestEdge(side) || target == ResizeTarget::Exact(tower.size())
    };
    let default = ResizeTarget::ShortestEdge(224);
    if !keeps_tile(settings::resize_target(file, default, false)?) {
        return Err(file.problem("size", format!("must be that of the vision tower, {side}")));
    }
    if settings::exact_size(file, "crop_size", ImageSize::square(224))? != tower.size() {
        return Err(file.problem("crop_size", format!("must be that of the vision tower, {side}")));
    }
    Ok(())
}

/// Reads `image_grid_pinpoints`: a list of `[height, width]`, multiples of the tower's side.
fn read_pinpoints(file: &Section, tower: Tower) -> Result<Vec<ImageSize>, VisionError> {
    const KEY: &str = "image_grid_pinpoints";
    let sizes = match file.get(KEY) {
        None | Some(Value::Null) => {
            DEFAULT_PINPOINTS.map(|(height, width)| ImageSize { width, height }).to_vec()
        }
        Some(value) => {
            let size = |pair: &Value| {
                let [height, width] = pair.as_array()?.as_slice() else { return None };
                let side = |value: &Value| {
                    value.as_u64().filter(|side| (1..=MAX_SIDE_PIXELS).contains(side))
                };
                Some(ImageSize { width: side(width)? as u32, height: side(height)? as u32 })
            };
            let sizes = value
                .as_array()
                .and_then(|pairs| pairs.iter().map(size).collect::<Option<Vec<_>>>());
            sizes
                .filter(|sizes| !sizes.is_empty())
                .ok_or_else(|| file.problem(KEY, "must be a list of [height, width]"))?
        }
    };
    let has_whole_tiles = |size: &ImageSize| {
        size.width.is_multiple_of(tower.side) && size.height.is_multiple_of(tower.side)
    };
    if !sizes.iter().all(has_whole_tiles) {
        return Err(file.problem(
            KEY,
            format!("must be multiples of the vision tower's side, {}", tower.side),
        ));
    }
    Ok(sizes)
}

impl Family for LlavaNext {
    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Arc<dyn Family>, VisionError> {
        // vLLM counts tokens with the model's own settings, so its engine would refuse an image
        // with other settings.
        match kwargs.keys().next() {
            Some(key) => Err(VisionError::UnknownKwarg { key: key.clone(), known: &[] }),
            None => Ok(Arc::new(self.clone())),
        }
    }

    fn plan(&self, size: ImageSize) -> Result<ImagePlan, VisionError> {
        let Some(resolution) = self.best_resolution(size) else {
            return Err(VisionError::EmptyImage { size });
        };
        let side = self.tower.side as usize;
        let tiles = TileGrid {
            columns: resolution.width as usize / side,
            rows: resolution.height as usize / side,
            width: side,
            height: side,
        };
        let resized = fitted(size, resolution);
        let width = size.width as usize;
        let height = size.height as usize;
        let base = Layer::whole(width, height, Layout::Tiles(TileGrid::single(side, side)));
        let cut = Layer {
            width: resized.width as usize,
            height: resized.height as usize,
            left: ((resolution.width - resized.width) / 2) as isize,
            top: ((resolution.height - resized.height) / 2) as isize,
            ..Layer::whole(width, height, Layout::Tiles(tiles))
        };
        let pixels = PixelTensor {
            name: "pixel_values",
            shape: vec![1 + tiles.len(), 3, side, side],
            field: TensorField::Batched { keep_on_cpu: false },
            resampler: Resampler::Torch(self.filter),
            layers: vec![base, cut],
        };
        let image_sizes = TensorSpec::integers(
            "image_sizes",
            vec![2],
            TensorField::Batched { keep_on_cpu: true },
            &[size.height.into(), size.width.into()],
        );
        let count = self.tower.tokens + self.tile_tokens(size, tiles);
        let placeholder = vec![TokenRun { token: self.image_token, count, embeds: true }];
        let grid = [1, tiles.rows as u32, tiles.columns as u32];
        ImagePlan::new(size, resized, grid, placeholder, pixels, vec![image_sizes])
    }

    fn largest_image(&self) -> ImageSize {
        let tokens = |size: &ImageSize| self.plan(*size).map_or(0, |plan| plan.tokens);
        self.pinpoints.iter().copied().max_by_key(tokens).unwrap_or(self.tower.size())
    }

    fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { pinpoints, filter, normalization, tower, image_token, prompt: _ } = self;
        out.integers(
            "resolutions",
            pinpoints.iter().flat_map(|size| [size.width.into(), size.height.into()]),
        );
        out.filter("resample", *filter);
        normalization.fingerprint(out);
        tower.fingerprint(out);
        out.tokens("image_token", &[*image_token]);
    }

    fn normalization(&self) -> &Normalization {
        &self.normalization
    }

    fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }
}

/// Returns the largest size with the image's aspect ratio within `resolution`
/// (`get_patch_output_size`).
fn fitted(size: ImageSize, resolution: ImageSize) -> ImageSize {
    let scale_width = f64::from(resolution.width) / f64::from(size.width);
    let scale_height = f64::from(resolution.height) / f64::from(size.height);
    if scale_width < scale_height {
        let height = (f64::from(size.height) * scale_width).ceil() as u32;
        ImageSize { width: resolution.width, height: height.min(resolution.height) }
    } else {
        let width = (f64::from(size.width) * scale_height).ceil() as u32;
        ImageSize { width: width.min(resolution.width), height: resolution.height }
    }
}
