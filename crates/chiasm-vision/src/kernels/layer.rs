//! The geometry of one output layer: source region, resize, placement on a canvas, and the order
//! of elements.

use std::ops::Range;

use super::{PatchGrid, TileGrid};

/// A rectangle of pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) left: usize,
    pub(crate) top: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// A region of the image that is resized, placed on a canvas and written in the canvas's layout.
///
/// Pixels of the resized region outside the canvas are cropped and never computed. Uncovered pixels
/// of the canvas have the fill colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// The source region, which lies within the image.
    pub(crate) source: Region,
    /// The width of the resized region.
    pub(crate) width: usize,
    /// The height of the resized region.
    pub(crate) height: usize,
    /// The first canvas column of the resized region; negative if it is cropped on the left.
    pub(crate) left: isize,
    /// The first canvas row of the resized region; negative if it is cropped at the top.
    pub(crate) top: isize,
    /// The red, green and blue of uncovered canvas.
    pub(crate) fill: [u8; 3],
    /// The canvas.
    pub(crate) layout: Layout,
}

impl Layer {
    /// Creates a layer of a whole image of this size, resized to fill the canvas.
    pub(crate) const fn whole(width: usize, height: usize, layout: Layout) -> Self {
        Self {
            source: Region { left: 0, top: 0, width, height },
            width: layout.width(),
            height: layout.height(),
            left: 0,
            top: 0,
            fill: [0; 3],
            layout,
        }
    }

    /// Returns the columns of the resized region that lie on the canvas.
    pub(super) fn columns(&self) -> Range<usize> {
        visible(self.width, self.left, self.layout.width())
    }

    /// Returns the rows of the resized region that lie on the canvas.
    pub(super) fn rows(&self) -> Range<usize> {
        visible(self.height, self.top, self.layout.height())
    }
}

/// Returns the indices of `length` pixels placed from `start` on that lie within `0..end`.
fn visible(length: usize, start: isize, end: usize) -> Range<usize> {
    let first = start.min(0).unsigned_abs().min(length);
    let last = end.saturating_add_signed(start.saturating_neg()).clamp(first, length);
    first..last
}

/// The layout of a canvas: the order of its elements.
///
/// A canvas is divided into horizontal strips of equal height. Each strip is written to a
/// contiguous range of elements, which follows that of the strip above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One row of elements per patch.
    Patches(PatchGrid),
    /// Three colour planes per tile.
    Tiles(TileGrid),
}

impl Layout {
    /// Returns the number of pixels per row of the canvas.
    pub(crate) const fn width(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.image_width(),
            Self::Tiles(grid) => grid.image_width(),
        }
    }

    /// Returns the number of rows of the canvas.
    pub(crate) const fn height(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.image_height(),
            Self::Tiles(grid) => grid.image_height(),
        }
    }

    /// Returns the number of tiles; 0 for patches.
    pub(crate) const fn tile_count(&self) -> usize {
        match self {
            Self::Patches(_) => 0,
            Self::Tiles(grid) => grid.len(),
        }
    }

    /// Returns the number of elements, or `None` if they exceed the address space.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        let frames = match self {
            Self::Patches(grid) => grid.temporal,
            Self::Tiles(_) => 1,
        };
        [self.width(), self.height(), frames]
            .into_iter()
            .try_fold(3_usize, |product, factor| product.checked_mul(factor))
            .filter(|&elements| elements <= isize::MAX as usize / 4)
    }

    /// Returns the number of elements.
    #[cfg(test)]
    pub(super) const fn elements(&self) -> usize {
        self.strip_count() * self.strip_elements()
    }

    /// Returns the number of strips.
    pub(super) const fn strip_count(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.height / grid.merge,
            Self::Tiles(grid) => grid.rows,
        }
    }

    /// Returns the number of elements per strip.
    pub(super) const fn strip_elements(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.group_row().rows() * grid.row_len(),
            Self::Tiles(grid) => grid.columns * grid.tile_len(),
        }
    }

    /// Returns the number of canvas rows per strip.
    pub(super) const fn strip_height(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.merge * grid.patch,
            Self::Tiles(grid) => grid.height,
        }
    }

    /// Returns the best number of canvas rows to write at a time. The last band of a strip may have
    /// fewer.
    pub(super) fn band_height(&self) -> usize {
        /// About half the size of the smallest second-level caches of current CPUs, and a tenth of
        /// the largest.
        const BAND_BYTES: usize = 96 << 10;
        match self {
            Self::Patches(_) => self.strip_height(),
            Self::Tiles(grid) => (BAND_BYTES / (3 * self.width()).max(1)).clamp(1, grid.height),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_range_is_clipped_to_the_canvas() {
        for (length, start, end, expected) in [
            (10, 0, 10, 0..10),
            (10, 3, 20, 0..10),
            (10, -3, 5, 3..8),
            (10, -3, 20, 3..10),
            (10, 8, 10, 0..2),
            (10, 12, 10, 0..0),
            (10, -12, 10, 10..10),
        ] {
            assert_eq!(visible(length, start, end), expected, "{length} {start} {end}");
        }
    }
}
