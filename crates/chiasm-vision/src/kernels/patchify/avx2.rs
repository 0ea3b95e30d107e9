//! Cutting patches with AVX2: up to 16 pixels of two lines at a time are taken apart into channels.

use std::arch::x86_64::*;

use super::{AHEAD, PatchGrid, scalar};

/// Pixels per line and step, unless the patch is smaller.
const PIXELS: usize = 16;
/// Below this side, three loads do not lie within the patch's line.
const SMALLEST: usize = 11;

/// See [`scalar::copy`].
#[target_feature(enable = "avx2")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    if grid.patch < SMALLEST {
        return scalar::copy(pixels, grid, out);
    }
    let cutter = Cutter::new(grid, pixels);
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(grid.row_len())) {
        cutter.cut(origin, grid.temporal, row);
    }
}

/// What cutting one patch needs to know.
struct Cutter<'a> {
    pixels: &'a [u8],
    /// Bytes per row of the image.
    image_row: usize,
    patch: usize,
    /// Pixels per step: at most [`PIXELS`].
    step: usize,
    /// Shuffles by channel: the bytes that it takes of each of three loads, the same in both
    /// halves.
    masks: [[__m256i; 3]; 3],
    /// Moves the last 8 of `step` bytes to the front.
    tail: __m128i,
}

impl<'a> Cutter<'a> {
    #[target_feature(enable = "avx2")]
    fn new(grid: &PatchGrid, pixels: &'a [u8]) -> Self {
        let step = grid.patch.min(PIXELS);
        // The third load ends with the line.
        let loads = [0, 16, 3 * step - 16];
        let masks = std::array::from_fn(|channel| {
            std::array::from_fn(|load| {
                let mask: [u8; 16] = std::array::from_fn(|pixel| {
                    let byte = 3 * pixel + channel;
                    let owner = (byte / 16).min(2);
                    if pixel < step && owner == load { (byte - loads[load]) as u8 } else { 0x80 }
                });
                // SAFETY: 16 bytes of an array of that length.
                _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) })
            })
        });
        let tail: [u8; 16] =
            std::array::from_fn(|byte| if byte < 8 { (step - 8 + byte) as u8 } else { 0x80 });
        // SAFETY: 16 bytes of an array of that length.
        let tail = unsafe { _mm_loadu_si128(tail.as_ptr().cast()) };
        Self { pixels, image_row: grid.image_row(), patch: grid.patch, step, masks, tail }
    }

    /// The patch whose first byte is at `origin`, as it lies in a row of patches with this many
    /// frames.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn cut(&self, origin: usize, frames: usize, row: &mut [u8]) {
        let Self { pixels, image_row, patch, .. } = *self;
        assert!(origin + (patch - 1) * image_row + 3 * patch <= pixels.len());
        assert!(row.len() >= 3 * frames * patch * patch);
        // SAFETY: both lie within bounds (above).
        unsafe {
            let (pixels, row) = (pixels.as_ptr().add(origin), row.as_mut_ptr());
            match (self.step == PIXELS, frames) {
                (true, 1) => self.cut_from::<true, 1>(pixels, frames, row),
                (true, 2) => self.cut_from::<true, 2>(pixels, frames, row),
                (true, _) => self.cut_from::<true, 0>(pixels, frames, row),
                (false, 1) => self.cut_from::<false, 1>(pixels, frames, row),
                (false, 2) => self.cut_from::<false, 2>(pixels, frames, row),
                (false, _) => self.cut_from::<false, 0>(pixels, frames, row),
            }
        }
    }

    /// `WHOLE`: whether a step is [`PIXELS`] long. `FRAMES`: 0, or the number of frames.
    ///
    /// # Safety
    /// `pixels` points to a patch of the image, `row` to room for it in `frames` frames.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn cut_from<const WHOLE: bool, const FRAMES: usize>(
        &self,
        pixels: *const u8,
        frames: usize,
        row: *mut u8,
    ) {
        let (patch, step) = (self.patch, if WHOLE { PIXELS } else { self.step });
        let frames = if FRAMES == 0 { frames } else { FRAMES };
        let plane = patch * patch;
        for y in (0..patch).step_by(2) {
            // The last line may stand in for a missing one: it is then written twice.
            let next = (y + 1).min(patch - 1);
            for x in (0..patch).step_by(PIXELS) {
                let x = x.min(patch - step);
                // SAFETY: every load ends at most 3 * step bytes from pixel x of its line, and x +
                // step <= patch.
                let (a, b, c) = unsafe {
                    let low = pixels.add(y * self.image_row + 3 * x);
                    let high = pixels.add(next * self.image_row + 3 * x);
                    let last = 3 * step - 16;
                    _mm_prefetch::<_MM_HINT_T0>(low.wrapping_add(AHEAD).cast());
                    _mm_prefetch::<_MM_HINT_T0>(high.wrapping_add(AHEAD).cast());
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
                    let (low, high) =
                        (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
                    for frame in 0..frames {
                        // SAFETY: x + step <= patch. What is written beyond a line is in the next
                        // line of the same frame, which is written later; the last line is written
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

    /// Stores `step` bytes; 16 if `WHOLE` or not `exact`.
    ///
    /// # Safety
    /// `at` must have room for that many bytes.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn store<const WHOLE: bool>(&self, at: *mut u8, bytes: __m128i, exact: bool) {
        // SAFETY: the caller's; step is at least SMALLEST, thus above 8.
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

/// 16 bytes from each of two places.
///
/// # Safety
/// They can be read.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_set_m128i(_mm_loadu_si128(high.cast()), _mm_loadu_si128(low.cast())) }
}
