//! Cutting an image into tiles with one plane per channel: a tensor `[tiles, 3, height, width]`.
//!
//! Every family except Qwen-VL uses this layout. An image that is not cut is one tile.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod neon;
pub(super) mod scalar;

/// A grid of tiles, ordered from left to right and top to bottom. Each tile has one plane per
/// channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileGrid {
    /// The number of tiles from left to right.
    pub(crate) columns: usize,
    /// The number of tiles from top to bottom.
    pub(crate) rows: usize,
    /// The number of pixels per row of a tile.
    pub(crate) width: usize,
    /// The number of rows of a tile.
    pub(crate) height: usize,
}

impl TileGrid {
    /// Creates a grid of one tile.
    pub(crate) const fn single(width: usize, height: usize) -> Self {
        Self { columns: 1, rows: 1, width, height }
    }

    /// Returns the number of tiles.
    pub(crate) const fn len(&self) -> usize {
        self.columns * self.rows
    }

    /// Returns the number of elements per tile.
    pub(crate) const fn tile_len(&self) -> usize {
        3 * self.width * self.height
    }

    /// Returns the width of the image in pixels.
    pub(crate) const fn image_width(&self) -> usize {
        self.columns * self.width
    }

    /// Returns the height of the image in pixels.
    pub(crate) const fn image_height(&self) -> usize {
        self.rows * self.height
    }

    /// Returns the position of the image's row `y` in each tile that it crosses, from left to
    /// right.
    ///
    /// A position is the index of the row's first element in the tile's first plane, counted from
    /// the first element of that row of tiles.
    pub(super) fn line_starts(&self, y: usize) -> impl Iterator<Item = usize> {
        let tile_len = self.tile_len();
        let first = y % self.height * self.width;
        (0..self.columns).map(move |column| column * tile_len + first)
    }
}

#[cfg(test)]
mod tests;
