//! Cutting an image into rows of patches, in the order of `pixel_values`.

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

/// The distance in bytes by which vector code prefetches lines. Without prefetching, images that
/// are not in the cache take up to twice the time (measured).
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 128;

/// A grid of square patches, grouped in squares of `merge` by `merge` patches.
///
/// Each patch becomes one row of elements. Rows are ordered by group, from left to right and top to
/// bottom, and in the same way within a group. A row contains the patch's pixels for each channel
/// and each of the `temporal` frames, which are all equal for a still image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchGrid {
    /// The number of patches from top to bottom, a multiple of `merge`.
    pub(crate) height: usize,
    /// The number of patches from left to right, a multiple of `merge`.
    pub(crate) width: usize,
    /// The side of a patch in pixels.
    pub(crate) patch: usize,
    /// The side of a group in patches.
    pub(crate) merge: usize,
    /// The number of frames per patch.
    pub(crate) temporal: usize,
}

impl PatchGrid {
    /// Returns the number of patches, which is the number of rows of elements.
    pub(crate) const fn rows(&self) -> usize {
        self.height * self.width
    }

    /// Returns the number of elements per patch.
    pub(crate) const fn row_len(&self) -> usize {
        3 * self.temporal * self.patch * self.patch
    }

    /// Returns the grid of one row of groups, the smallest horizontal part that is itself a grid.
    pub(crate) const fn group_row(&self) -> Self {
        Self { height: self.merge, ..*self }
    }

    /// Returns the height of the image in pixels.
    pub(crate) const fn image_height(&self) -> usize {
        self.height * self.patch
    }

    /// Returns the width of the image in pixels.
    pub(crate) const fn image_width(&self) -> usize {
        self.width * self.patch
    }

    /// Returns the number of bytes per row of the image.
    const fn image_row(&self) -> usize {
        3 * self.width * self.patch
    }

    /// Returns the index of each patch's first byte in the image, in the order of the rows of
    /// elements.
    fn origins(&self) -> impl Iterator<Item = usize> {
        let Self { height, width, patch, merge, .. } = *self;
        let image_row = self.image_row();
        (0..height).step_by(merge).flat_map(move |group_y| {
            (0..width).step_by(merge).flat_map(move |group_x| {
                (group_y..group_y + merge).flat_map(move |y| {
                    (group_x..group_x + merge).map(move |x| y * patch * image_row + x * patch * 3)
                })
            })
        })
    }
}

#[cfg(test)]
mod tests;
