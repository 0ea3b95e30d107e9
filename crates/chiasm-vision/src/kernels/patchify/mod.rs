//! Cuts an image into rows of patches: the order of `pixel_values`.

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

/// Bytes by which vector code fetches lines ahead. Without it, images that come from memory take up
/// to twice the time (measured).
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 128;

/// An image cut into square patches, which are grouped in squares of `merge` by `merge`.
///
/// Rows run over groups from left to right and top to bottom, and within a group over its patches
/// likewise. A row holds, for each channel and each of the `temporal` frames (all equal for a still
/// image), the patch's pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchGrid {
    /// Patches from top to bottom, a multiple of `merge`.
    pub(crate) height: usize,
    /// Patches from left to right, a multiple of `merge`.
    pub(crate) width: usize,
    /// Side of a patch in pixels.
    pub(crate) patch: usize,
    /// Side of a group in patches.
    pub(crate) merge: usize,
    /// Frames per patch.
    pub(crate) temporal: usize,
}

impl PatchGrid {
    /// Number of patches.
    pub(crate) const fn rows(&self) -> usize {
        self.height * self.width
    }

    /// Elements per patch.
    pub(crate) const fn row_len(&self) -> usize {
        3 * self.temporal * self.patch * self.patch
    }

    /// The part of one row of groups: the smallest that is a grid itself.
    pub(crate) const fn band(&self) -> Self {
        Self { height: self.merge, ..*self }
    }

    /// Pixels per column of the image.
    pub(crate) const fn image_height(&self) -> usize {
        self.height * self.patch
    }

    /// Pixels per row of the image.
    pub(crate) const fn image_width(&self) -> usize {
        self.width * self.patch
    }

    /// Bytes per row of the image.
    const fn image_row(&self) -> usize {
        3 * self.width * self.patch
    }

    /// Yields the index in the image of each patch's first byte, in the order of the rows that
    /// patches become.
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
