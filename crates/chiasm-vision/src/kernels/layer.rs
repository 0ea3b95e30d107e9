//! What one pass over an image writes: which part of it, resized to what, placed where, in which
//! order of elements.

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

/// A part of the image, resized, laid onto a canvas and written in the order of the canvas's
/// layout.
///
/// What of the resized part lies outside the canvas is cropped, and not even computed; what of the
/// canvas is not covered has the fill colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// The part of the image. It lies within the image.
    pub(crate) source: Region,
    /// Width to which it is resized.
    pub(crate) width: usize,
    /// Height to which it is resized.
    pub(crate) height: usize,
    /// Column of the canvas in which the resized part begins; negative if it is cropped on the
    /// left.
    pub(crate) left: isize,
    /// Row of the canvas in which the resized part begins; negative if it is cropped at the top.
    pub(crate) top: isize,
    /// Red, green and blue of the uncovered canvas.
    pub(crate) fill: [u8; 3],
    /// The canvas.
    pub(crate) layout: Layout,
}

impl Layer {
    /// All of an image, resized to fill the canvas.
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

    /// Columns of the resized part that lie on the canvas.
    pub(super) fn columns(&self) -> Range<usize> {
        visible(self.width, self.left, self.layout.width())
    }

    /// Rows of the resized part that lie on the canvas.
    pub(super) fn rows(&self) -> Range<usize> {
        visible(self.height, self.top, self.layout.height())
    }
}

/// The part of `length` pixels, the first of them at `start`, that lies within `0..end`.
fn visible(length: usize, start: isize, end: usize) -> Range<usize> {
    let first = start.min(0).unsigned_abs().min(length);
    let last = end.saturating_add_signed(start.saturating_neg()).clamp(first, length);
    first..last
}

/// The order in which a canvas is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A row per patch.
    Patches(PatchGrid),
    /// Three planes per tile.
    Tiles(TileGrid),
}

impl Layout {
    /// Pixels per row of the canvas.
    pub(crate) const fn width(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.image_width(),
            Self::Tiles(grid) => grid.image_width(),
        }
    }

    /// Rows of the canvas.
    pub(crate) const fn height(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.image_height(),
            Self::Tiles(grid) => grid.image_height(),
        }
    }

    /// Tiles, of which patches are none.
    pub(crate) const fn tiles(&self) -> usize {
        match self {
            Self::Patches(_) => 0,
            Self::Tiles(grid) => grid.len(),
        }
    }

    /// Elements that are written, `None` if no memory holds so many.
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

    /// Elements that are written.
    #[cfg(test)]
    pub(super) const fn elements(&self) -> usize {
        self.parts() * self.part_elements()
    }

    /// The canvas falls into parts from top to bottom, each as high as the others; each is written
    /// to elements of its own that follow those of the one above.
    pub(super) const fn parts(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.height / grid.merge,
            Self::Tiles(grid) => grid.rows,
        }
    }

    /// Elements of a part.
    pub(super) const fn part_elements(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.band().rows() * grid.row_len(),
            Self::Tiles(grid) => grid.columns * grid.tile_len(),
        }
    }

    /// Rows of the canvas in a part.
    pub(super) const fn part_height(&self) -> usize {
        match self {
            Self::Patches(grid) => grid.merge * grid.patch,
            Self::Tiles(grid) => grid.height,
        }
    }

    /// Rows of the canvas that are best written at a time; the last band of a part may have fewer.
    pub(super) fn band_height(&self) -> usize {
        /// About half of what the second-level cache of today's CPUs holds at least, and a tenth of
        /// what it may hold.
        const BAND_BYTES: usize = 96 << 10;
        match self {
            Self::Patches(_) => self.part_height(),
            Self::Tiles(grid) => (BAND_BYTES / (3 * self.width()).max(1)).clamp(1, grid.height),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_on_the_canvas_is_visible() {
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
