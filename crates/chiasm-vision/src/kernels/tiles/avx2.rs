//! Cutting tiles with AVX2: 32 pixels at a time are taken apart into channels.

use std::arch::x86_64::*;

use super::{TileGrid, scalar};

/// Pixels per step: 16 in each half of a vector.
const PIXELS: usize = 32;

/// See [`scalar::copy`].
#[target_feature(enable = "avx2")]
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    let (width, plane) = (grid.width, grid.width * grid.height);
    if width < PIXELS {
        return scalar::copy(lines, y, grid, out);
    }
    let masks = masks();
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * width)) {
            assert!(out.len() >= start + 2 * plane + width);
            for x in (0..width).step_by(PIXELS) {
                // The last step may repeat some pixels.
                let x = x.min(width - PIXELS);
                // SAFETY: x + 32 <= width, which is how many pixels there are.
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

/// Shuffles by channel: the bytes that it takes of each of three vectors, the same in both halves.
#[target_feature(enable = "avx2")]
fn masks() -> [[__m256i; 3]; 3] {
    std::array::from_fn(|channel| {
        std::array::from_fn(|vector| {
            let mask: [u8; 16] = std::array::from_fn(|pixel| {
                let byte = 3 * pixel + channel;
                if byte / 16 == vector { (byte % 16) as u8 } else { 0x80 }
            });
            // SAFETY: 16 bytes of an array of that length.
            _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) })
        })
    })
}

/// 16 bytes, and the 16 bytes that lie 16 pixels further.
///
/// # Safety
/// They can be read.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(low: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_set_m128i(_mm_loadu_si128(low.add(48).cast()), _mm_loadu_si128(low.cast())) }
}
