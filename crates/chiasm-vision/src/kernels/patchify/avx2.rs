//! Cutting patches with AVX2: each step splits up to 16 pixels of two lines into channels.

use std::arch::x86_64::*;

use super::{PREFETCH_BYTES, PatchGrid, scalar};

/// The maximum number of pixels per line and step; smaller patches have smaller steps.
const STEP_PIXELS: usize = 16;
/// The minimum side of a patch: in a shorter line, three loads would exceed the line.
const MIN_SIDE: usize = 11;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "avx2")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    if grid.patch < MIN_SIDE {
        return scalar::copy(pixels, grid, out);
    }
    let cutter = Cutter::new(grid, pixels);
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(grid.row_len())) {
        cutter.cut(origin, grid.temporal, row);
    }
}

/// The state for cutting patches of one grid.
struct Cutter<'a> {
    pixels: &'a [u8],
    /// The number of bytes per row of the image.
    image_row: usize,
    patch: usize,
    /// The number of pixels per step: at most [`STEP_PIXELS`].
    step: usize,
    /// The shuffle masks of each channel, which select its bytes from each of three loads. Both
    /// halves are the same.
    masks: [[__m256i; 3]; 3],
    /// The shuffle mask that moves the last 8 of `step` bytes to the front.
    tail: __m128i,
}

impl<'a> Cutter<'a> {
    /// Creates a cutter for the patches of a grid.
    #[target_feature(enable = "avx2")]
    fn new(grid: &PatchGrid, pixels: &'a [u8]) -> Self {
        let step = grid.patch.min(STEP_PIXELS);
        // The third load ends at the end of the line.
        let loads = [0, 16, 3 * step - 16];
        let masks = std::array::from_fn(|channel| {
            std::array::from_fn(|load| {
                let mask: [u8; 16] = std::array::from_fn(|pixel| {
                    let byte = 3 * pixel + channel;
                    let owner = (byte / 16).min(2);
                    if pixel < step && owner == load { (byte - loads[load]) as u8 } else { 0x80 }
                });
                // SAFETY: reads the 16 bytes of the array.
                _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) })
            })
        });
        let tail: [u8; 16] =
            std::array::from_fn(|byte| if byte < 8 { (step - 8 + byte) as u8 } else { 0x80 });
        // SAFETY: reads the 16 bytes of the array.
        let tail = unsafe { _mm_loadu_si128(tail.as_ptr().cast()) };
        Self { pixels, image_row: grid.image_row(), patch: grid.patch, step, masks, tail }
    }

    /// Writes the patch whose first byte is at `origin` to its row, once per frame.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn cut(&self, origin: usize, frames: usize, row: &mut [u8]) {
        let Self { pixels, image_row, patch, .. } = *self;
        assert!(origin + (patch - 1) * image_row + 3 * patch <= pixels.len());
        assert!(row.len() >= 3 * frames * patch * patch);
        // SAFETY: both are in bounds (asserted above).
        unsafe {
            let pixels = pixels.as_ptr().add(origin);
            let row = row.as_mut_ptr();
            match (self.step == STEP_PIXELS, frames) {
                (true, 1) => self.cut_from::<true, 1>(pixels, frames, row),
                (true, 2) => self.cut_from::<true, 2>(pixels, frames, row),
                (true, _) => self.cut_from::<true, 0>(pixels, frames, row),
                (false, 1) => self.cut_from::<false, 1>(pixels, frames, row),
                (false, 2) => self.cut_from::<false, 2>(pixels, frames, row),
                (false, _) => self.cut_from::<false, 0>(pixels, frames, row),
            }
        }
    }

    /// Cuts one patch. `WHOLE` is true if a step has [`STEP_PIXELS`] pixels. `FRAMES` is the number
    /// of frames, or 0 if it is only known at run time.
    ///
    /// # Safety
    /// `pixels` must point to a patch of the image, and `row` to room for `frames` frames of it.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn cut_from<const WHOLE: bool, const FRAMES: usize>(
        &self,
        pixels: *const u8,
        frames: usize,
        row: *mut u8,
    ) {
        let patch = self.patch;
        let step = if WHOLE { STEP_PIXELS } else { self.step };
        let frames = if FRAMES == 0 { frames } else { FRAMES };
        let plane = patch * patch;
        for y in (0..patch).step_by(2) {
            // With an odd number of lines, the last line is processed twice.
            let next = (y + 1).min(patch - 1);
            for x in (0..patch).step_by(STEP_PIXELS) {
                let x = x.min(patch - step);
                // SAFETY: every load ends at most 3 * step bytes after pixel x of its line, and
                // x + step <= patch.
                let (a, b, c) = unsafe {
                    let low = pixels.add(y * self.image_row + 3 * x);
                    let high = pixels.add(next * self.image_row + 3 * x);
                    let last = 3 * step - 16;
                    _mm_prefetch::<_MM_HINT_T0>(low.wrapping_add(PREFETCH_BYTES).cast());
                    _mm_prefetch::<_MM_HINT_T0>(high.wrapping_add(PREFETCH_BYTES).cast());
                    (
                        load(low, high),
                        load(low.add(16), high.add(16)),
                        load(low.add(last), high.add(last)),
                    )
                };
                for (channel, masks) in self.masks.iter().enumerate() {
                    let bytes = _mm256_or_si256(
                        _mm256_or_si256(
                            _mm256_shuffle_epi8(a, masks[0]),
                            _mm256_shuffle_epi8(b, masks[1]),
                        ),
                        _mm256_shuffle_epi8(c, masks[2]),
                    );
                    let low = _mm256_castsi256_si128(bytes);
                    let high = _mm256_extracti128_si256::<1>(bytes);
                    for frame in 0..frames {
                        // SAFETY: x + step <= patch. Bytes beyond the end of a line are in the next
                        // line of the same frame, which is written later. The last line is written
                        // exactly.
                        unsafe {
                            let at = row.add((channel * frames + frame) * plane + x);
                            self.store::<WHOLE>(at.add(y * patch), low, y + 1 == patch);
                            self.store::<WHOLE>(at.add(next * patch), high, next + 1 == patch);
                        }
                    }
                }
            }
        }
    }

    /// Stores `step` bytes if `exact`, otherwise 16 bytes. Both are the same if `WHOLE`.
    ///
    /// # Safety
    /// `at` must have room for that many bytes.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn store<const WHOLE: bool>(&self, at: *mut u8, bytes: __m128i, exact: bool) {
        // SAFETY: the caller guarantees the room; step is at least MIN_SIDE, which is above 8.
        unsafe {
            if !WHOLE && exact {
                _mm_storel_epi64(at.cast(), bytes);
                _mm_storel_epi64(at.add(self.step - 8).cast(), _mm_shuffle_epi8(bytes, self.tail));
            } else {
                _mm_storeu_si128(at.cast(), bytes);
            }
        }
    }
}

/// Loads 16 bytes from each of two addresses.
///
/// # Safety
/// 16 bytes must be readable at both addresses.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: guaranteed by the caller.
    unsafe { _mm256_set_m128i(_mm_loadu_si128(high.cast()), _mm_loadu_si128(low.cast())) }
}
