//! Cutting an image into tiles and their channels into planes, in the layout of most other
//! families: one tensor `[tiles, 3, height, width]`. An image that is not cut is one tile.

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

/// A grid of tiles, from left to right and top to bottom; each has a plane per channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileGrid {
    /// Tiles from left to right.
    pub(crate) columns: usize,
    /// Tiles from top to bottom.
    pub(crate) rows: usize,
    /// Pixels per row of a tile.
    pub(crate) width: usize,
    /// Rows of a tile.
    pub(crate) height: usize,
}

impl TileGrid {
    /// One tile.
    pub(crate) const fn single(width: usize, height: usize) -> Self {
        Self { columns: 1, rows: 1, width, height }
    }

    /// Number of tiles.
    pub(crate) const fn len(&self) -> usize {
        self.columns * self.rows
    }

    /// Elements per tile.
    pub(crate) const fn tile_len(&self) -> usize {
        3 * self.width * self.height
    }

    /// Pixels per row of the image.
    pub(crate) const fn image_width(&self) -> usize {
        self.columns * self.width
    }

    /// Rows of the image.
    pub(crate) const fn image_height(&self) -> usize {
        self.rows * self.height
    }

    /// Yields where the image's row `y` begins in each tile that it crosses, from left to right:
    /// the index of its first element in the tile's first plane, counted from the first element of
    /// the tiles of that row.
    pub(super) fn line_starts(&self, y: usize) -> impl Iterator<Item = usize> {
        let (tile_len, first) = (self.tile_len(), y % self.height * self.width);
        (0..self.columns).map(move |column| column * tile_len + first)
    }
}

#[cfg(test)]
mod tests;
