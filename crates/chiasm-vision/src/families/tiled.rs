//! The tiling of the InternVL models: the arrangement of square tiles whose aspect ratio is closest
//! to the image's.

use chiasm_types::{TensorField, TokenId, TokenRun};

use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::kernels::{Layer, Layout, Resampler, TileGrid};
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError, Vocabulary};

/// The maximum number of tiles. It exceeds that of every model and keeps lists of arrangements
/// short.
pub(super) const MAX_TILES: u64 = 256;

/// The columns and rows of tiles.
pub(super) type Arrangement = (u32, u32);

/// Returns all arrangements of `min..=max` tiles, sorted by the number of tiles, then by width.
///
/// Follows `get_all_supported_aspect_ratios` in `image_processing_got_ocr2.py` of `transformers`.
pub(super) fn arrangements(min: u32, max: u32) -> Vec<Arrangement> {
    let all = (1..=max).flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)));
    let mut all: Vec<_> = all.filter(|(columns, rows)| columns * rows >= min).collect();
    all.sort_by_key(|(columns, rows)| columns * rows);
    all
}

/// Returns the arrangement whose aspect ratio is closest to the image's; one tile if `arrangements`
/// is empty.
///
/// The order matters: a later, equally close arrangement wins if the image has more than half of
/// its pixels. Follows `get_optimal_tiled_canvas`, and `find_closest_aspect_ratio` in vLLM's
/// `internvl.py`.
pub(super) fn closest(
    arrangements: &[Arrangement],
    size: ImageSize,
    tile: ImageSize,
) -> Arrangement {
    let ratio = f64::from(size.width) / f64::from(size.height);
    let mut best = (1, 1);
    let mut smallest_difference = f64::INFINITY;
    for &(columns, rows) in arrangements {
        let difference = (ratio - f64::from(columns) / f64::from(rows)).abs();
        let is_large = || size.area() as f64 > 0.5 * tile.area() as f64 * f64::from(columns * rows);
        if difference < smallest_difference || (difference == smallest_difference && is_large()) {
            best = (columns, rows);
            smallest_difference = difference;
        }
    }
    best
}

/// Returns the size of an image that is cut into a row of `tiles` tiles.
pub(super) fn row_size(tiles: u32, tile: ImageSize) -> ImageSize {
    ImageSize { width: tiles.max(1) * tile.width, ..tile }
}

/// Returns the number of embeddings of the longest video that fits into a context beside an image,
/// with one tile per frame.
///
/// Follows `get_num_frames_with_most_features` in vLLM's `internvl.py` and `interns1.py`.
pub(super) fn longest_video(
    context_tokens: usize,
    image_tokens: usize,
    tile_tokens: usize,
) -> usize {
    let frames = context_tokens.saturating_sub(image_tokens) / tile_tokens.max(1);
    frames.max(1) * tile_tokens
}

/// Returns the size of all tiles together and the layers of an image.
///
/// The first layer is the image resized to all tiles. If there are several tiles and `thumbnail` is
/// set, the second layer is the image resized to one tile.
fn layers(
    size: ImageSize,
    (columns, rows): Arrangement,
    tile: ImageSize,
    thumbnail: bool,
) -> (ImageSize, Vec<Layer>) {
    let width = tile.width as usize;
    let height = tile.height as usize;
    let grid = TileGrid { columns: columns as usize, rows: rows as usize, width, height };
    let whole_image =
        |grid| Layer::whole(size.width as usize, size.height as usize, Layout::Tiles(grid));
    let mut layers = vec![whole_image(grid)];
    if thumbnail && grid.len() > 1 {
        layers.push(whole_image(TileGrid::single(width, height)));
    }
    (ImageSize { width: grid.image_width() as u32, height: grid.image_height() as u32 }, layers)
}

/// The tiling of one image, common to both InternVL families.
pub(super) struct Tiles {
    pub(super) arrangement: Arrangement,
    pub(super) tile: ImageSize,
    /// `true` if several tiles are followed by a tile of the whole image.
    pub(super) thumbnail: bool,
    /// The number of embeddings per tile.
    pub(super) tile_tokens: usize,
    pub(super) tokens: ImageTokens,
}

impl Tiles {
    /// Returns the plan of an image of this size. `name` is the name of the pixel tensor.
    pub(super) fn plan(
        self,
        size: ImageSize,
        name: &'static str,
        resampler: Resampler,
    ) -> Result<ImagePlan, VisionError> {
        let Self { arrangement, tile, thumbnail, tile_tokens, tokens } = self;
        let (resized, layers) = layers(size, arrangement, tile, thumbnail);
        let tiles = layers.iter().map(|layer| layer.layout.tile_count()).sum::<usize>();
        let pixels = PixelTensor {
            name,
            shape: vec![tiles, 3, tile.height as usize, tile.width as usize],
            field: TensorField::rows(tiles),
            resampler,
            layers,
        };
        let batched = TensorField::Batched { keep_on_cpu: true };
        let shared = TensorField::Shared { keep_on_cpu: true };
        let small_tensors = vec![
            TensorSpec::integers("image_num_patches", vec![], batched, &[tiles as i64]),
            TensorSpec::integers("image_token_id", vec![], shared, &[i64::from(tokens.context.0)]),
        ];
        let placeholder = tokens.placeholder(tiles * tile_tokens);
        let grid = [1, arrangement.1, arrangement.0];
        ImagePlan::new(size, resized, grid, placeholder, pixels, small_tensors)
    }
}

/// The tokens of an InternVL image.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageTokens {
    pub(super) start: TokenId,
    pub(super) context: TokenId,
    pub(super) end: TokenId,
}

impl ImageTokens {
    /// Looks up the tokens in the vocabulary.
    pub(super) fn read(
        vocabulary: &dyn Vocabulary,
        model_type: &'static str,
    ) -> Result<Self, VisionError> {
        let id =
            |token| vocabulary.id(token).ok_or(VisionError::MissingToken { token, model_type });
        Ok(Self { start: id("<img>")?, context: id("<IMG_CONTEXT>")?, end: id("</img>")? })
    }

    /// Writes the tokens to a fingerprint.
    pub(super) fn fingerprint(self, out: &mut Fingerprint) {
        let Self { start, context, end } = self;
        out.tokens("start, context, end", &[start, context, end]);
    }

    /// Returns the placeholder of an image with `count` embeddings.
    fn placeholder(self, count: usize) -> Vec<TokenRun> {
        vec![
            TokenRun { token: self.start, count: 1, embeds: false },
            TokenRun { token: self.context, count, embeds: true },
            TokenRun { token: self.end, count: 1, embeds: false },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrangements_are_sorted_by_tile_count() {
        assert_eq!(
            arrangements(1, 4),
            [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
        );
        assert_eq!(arrangements(3, 4), [(1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]);
        assert!(arrangements(2, 1).is_empty());
    }
}
