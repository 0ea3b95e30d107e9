//! Arrangements of square tiles as the InternVL models choose them: the one whose shape is closest
//! to the image's.

use chiasm_types::{TensorField, TokenId, TokenRun};

use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::kernels::{Layer, Layout, Resampler, TileGrid};
use crate::{ImagePlan, ImageSize, TensorSpec, VisionError, Vocabulary};

/// More tiles than any model is trained for; keeps lists of arrangements short.
pub(super) const MOST_TILES: u64 = 256;

/// Columns and rows of tiles.
pub(super) type Arrangement = (u32, u32);

/// All arrangements of `min..=max` tiles, few tiles first, and among as many, narrow ones first
/// (`get_all_supported_aspect_ratios` in `transformers`' `image_processing_got_ocr2.py`).
pub(super) fn arrangements(min: u32, max: u32) -> Vec<Arrangement> {
    let all = (1..=max).flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)));
    let mut all: Vec<_> = all.filter(|(columns, rows)| columns * rows >= min).collect();
    all.sort_by_key(|(columns, rows)| columns * rows);
    all
}

/// The arrangement, tried in this order, that is closest in shape; among equally close ones a later
/// one if the image has more than half of its pixels (`get_optimal_tiled_canvas`, and
/// `find_closest_aspect_ratio` in vLLM's `internvl.py`). One tile if there is none to try.
pub(super) fn closest(
    arrangements: &[Arrangement],
    size: ImageSize,
    tile: ImageSize,
) -> Arrangement {
    let shape = f64::from(size.width) / f64::from(size.height);
    let (mut best, mut least) = ((1, 1), f64::INFINITY);
    for &(columns, rows) in arrangements {
        let difference = (shape - f64::from(columns) / f64::from(rows)).abs();
        let is_large = || size.area() as f64 > 0.5 * tile.area() as f64 * f64::from(columns * rows);
        if difference < least || (difference == least && is_large()) {
            (best, least) = ((columns, rows), difference);
        }
    }
    best
}

/// An image of so many tiles.
pub(super) fn row_of(tiles: u32, tile: ImageSize) -> ImageSize {
    ImageSize { width: tiles.max(1) * tile.width, ..tile }
}

/// Embeddings of the video that fills a context beside an image of so many, with a tile per frame
/// (`get_num_frames_with_most_features` in vLLM's `internvl.py` and `interns1.py`).
pub(super) fn longest_video(context: usize, image: usize, tile_tokens: usize) -> usize {
    let frames = context.saturating_sub(image) / tile_tokens.max(1);
    frames.max(1) * tile_tokens
}

/// The image resized to all tiles, then, if there are several and `thumbnail` is on, to one.
fn layers(
    size: ImageSize,
    (columns, rows): Arrangement,
    tile: ImageSize,
    thumbnail: bool,
) -> (ImageSize, Vec<Layer>) {
    let (width, height) = (tile.width as usize, tile.height as usize);
    let grid = TileGrid { columns: columns as usize, rows: rows as usize, width, height };
    let whole = |grid| Layer::whole(size.width as usize, size.height as usize, Layout::Tiles(grid));
    let mut layers = vec![whole(grid)];
    if thumbnail && grid.len() > 1 {
        layers.push(whole(TileGrid::single(width, height)));
    }
    (ImageSize { width: grid.image_width() as u32, height: grid.image_height() as u32 }, layers)
}

/// What both InternVL families hand over, beside their pixels' name and arithmetic.
pub(super) struct Tiles {
    pub(super) arrangement: Arrangement,
    pub(super) tile: ImageSize,
    /// Whether several tiles are followed by the whole image in one.
    pub(super) thumbnail: bool,
    /// Embeddings per tile.
    pub(super) tile_tokens: usize,
    pub(super) tokens: ImageTokens,
}

impl Tiles {
    /// The layout of an image of this size.
    pub(super) fn plan(
        self,
        size: ImageSize,
        name: &'static str,
        resampler: Resampler,
    ) -> Result<ImagePlan, VisionError> {
        let Self { arrangement, tile, thumbnail, tile_tokens, tokens } = self;
        let (resized, layers) = layers(size, arrangement, tile, thumbnail);
        let tiles = layers.iter().map(|layer| layer.layout.tiles()).sum::<usize>();
        let pixels = PixelTensor {
            name,
            shape: vec![tiles, 3, tile.height as usize, tile.width as usize],
            field: TensorField::rows(tiles),
            resampler,
            layers,
        };
        let (batched, shared) =
            (TensorField::Batched { keep_on_cpu: true }, TensorField::Shared { keep_on_cpu: true });
        let small = vec![
            TensorSpec::integers("image_num_patches", vec![], batched, &[tiles as i64]),
            TensorSpec::integers("image_token_id", vec![], shared, &[i64::from(tokens.context.0)]),
        ];
        let placeholder = tokens.placeholder(tiles * tile_tokens);
        ImagePlan::new(size, resized, [1, arrangement.1, arrangement.0], placeholder, pixels, small)
    }
}

/// The tokens around and in an InternVL image.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageTokens {
    pub(super) start: TokenId,
    pub(super) context: TokenId,
    pub(super) end: TokenId,
}

impl ImageTokens {
    pub(super) fn read(
        vocabulary: &dyn Vocabulary,
        model_type: &'static str,
    ) -> Result<Self, VisionError> {
        let id =
            |token| vocabulary.id(token).ok_or(VisionError::MissingToken { token, model_type });
        Ok(Self { start: id("<img>")?, context: id("<IMG_CONTEXT>")?, end: id("</img>")? })
    }

    pub(super) fn fingerprint(self, out: &mut Fingerprint) {
        let Self { start, context, end } = self;
        out.tokens("start, context, end", &[start, context, end]);
    }

    /// What stands for an image of so many embeddings.
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
    fn arrangements_come_in_order() {
        assert_eq!(
            arrangements(1, 4),
            [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]
        );
        assert_eq!(arrangements(3, 4), [(1, 3), (3, 1), (1, 4), (2, 2), (4, 1)]);
        assert!(arrangements(2, 1).is_empty());
    }
}
