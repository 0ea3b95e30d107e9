//! Cutting tiles with AVX2: each step splits 32 pixels into channels.

use std::arch::x86_64::*;

use super::{TileGrid, scalar};

/// The number of pixels per step: 16 in each half of a vector.
const STEP_PIXELS: usize = 32;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "avx2")]
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    let width = grid.width;
    let plane = grid.width * grid.height;
    if width < STEP_PIXELS {
        return scalar::copy(lines, y, grid, out);
    }
    let masks = masks();
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * width)) {
            assert!(out.len() >= start + 2 * plane + width);
            for x in (0..width).step_by(STEP_PIXELS) {
                // The last step may repeat some pixels.
                let x = x.min(width - STEP_PIXELS);
                // SAFETY: x + 32 <= width, the number of pixels.
                let (a, b, c) = unsafe {
                    let pixels = pixels.as_ptr().add(3 * x);
                    (load(pixels), load(pixels.add(16)), load(pixels.add(32)))
                };
                for (channel, masks) in masks.iter().enumerate() {
                    let bytes = _mm256_or_si256(
                        _mm256_or_si256(
                            _mm256_shuffle_epi8(a, masks[0]),
                            _mm256_shuffle_epi8(b, masks[1]),
                        ),
                        _mm256_shuffle_epi8(c, masks[2]),
                    );
                    // SAFETY: channel < 3 and x + 32 <= width; the assertion above.
                    unsafe {
                        _mm256_storeu_si256(
                            out.as_mut_ptr().add(start + channel * plane + x).cast(),
                            bytes,
                        )
                    };
                }
            }
        }
    }
}

/// Returns the shuffle masks of each channel, which select its bytes from each of three vectors.
/// Both halves are the same.
#[target_feature(enable = "avx2")]
fn masks() -> [[__m256i; 3]; 3] {
    std::array::from_fn(|channel| {
        std::array::from_fn(|vector| {
            let mask: [u8; 16] = std::array::from_fn(|pixel| {
                let byte = 3 * pixel + channel;
                if byte / 16 == vector { (byte % 16) as u8 } else { 0x80 }
            });
            // SAFETY: reads the 16 bytes of the array.
            _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) })
        })
    })
}

/// Loads 16 bytes, and the 16 bytes that are 16 pixels further.
///
/// # Safety
/// The range `low..low + 64` must be readable.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(low: *const u8) -> __m256i {
    // SAFETY: guaranteed by the caller.
    unsafe { _mm256_set_m128i(_mm_loadu_si128(low.add(48).cast()), _mm_loadu_si128(low.cast())) }
}
