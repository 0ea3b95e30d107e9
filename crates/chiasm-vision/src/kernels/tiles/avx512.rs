//! Cutting tiles with AVX-512 VBMI: each step splits 64 pixels into channels. Lookup tables are in
//! registers.

use std::arch::x86_64::*;

use super::{TileGrid, scalar};
use crate::kernels::ChannelTable;
use crate::kernels::normalize::avx512::Registers;

/// The number of pixels per step.
const STEP_PIXELS: usize = 64;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    if grid.width < STEP_PIXELS {
        return scalar::copy(lines, y, grid, out);
    }
    cut(lines, y, grid, out, |_, values| [values]);
}

/// Vector version of [`scalar::map`], for elements of 2 or 4 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    if grid.width < STEP_PIXELS {
        return scalar::map(lines, y, grid, table, out);
    }
    let registers =
        [Registers::new(&table[0]), Registers::new(&table[1]), Registers::new(&table[2])];
    cut(lines, y, grid, out, |channel, values| registers[channel].encode(values));
}

/// Cuts tiles that are at least 64 pixels wide. `encode` converts 64 values of a channel to
/// elements of `N` bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
#[inline]
fn cut<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    out: &mut [u8],
    encode: impl Fn(usize, __m512i) -> [__m512i; N],
) {
    let width = grid.width;
    let plane = grid.width * grid.height;
    assert!(width >= STEP_PIXELS);
    let splitter = ChannelSplitter::new();
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * width)) {
            assert!(out.len() >= N * (start + 2 * plane + width));
            for x in (0..width).step_by(STEP_PIXELS) {
                // The last step may repeat some pixels.
                let x = x.min(width - STEP_PIXELS);
                // SAFETY: x + 64 <= width, the number of pixels.
                let values = unsafe { splitter.split(pixels.as_ptr().add(3 * x)) };
                for (channel, values) in values.into_iter().enumerate() {
                    for (part, bytes) in encode(channel, values).into_iter().enumerate() {
                        let at = N * (start + channel * plane + x) + 64 * part;
                        // SAFETY: part < N, channel < 3 and x + 64 <= width; the assertion above.
                        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(at).cast(), bytes) };
                    }
                }
            }
        }
    }
}

/// Splits 64 pixels into channels.
struct ChannelSplitter {
    /// Each channel's byte indices in three vectors, and the mask of the lanes whose bytes are in
    /// the third vector. (The instructions ignore the upper bits of an index.)
    indices: [(__m512i, __mmask64); 3],
}

impl ChannelSplitter {
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        let indices = std::array::from_fn(|channel| {
            let bytes: [usize; STEP_PIXELS] = std::array::from_fn(|pixel| 3 * pixel + channel);
            let vector = bytes.map(|byte| byte as u8);
            let third =
                bytes.iter().rev().fold(0, |mask, &byte| mask << 1 | u64::from(byte >= 128));
            // SAFETY: reads the 64 bytes of the array.
            (unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) }, third)
        });
        Self { indices }
    }

    /// Returns the red, green and blue values of 64 pixels.
    ///
    /// # Safety
    /// 192 bytes must be readable at `pixels`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn split(&self, pixels: *const u8) -> [__m512i; 3] {
        // SAFETY: guaranteed by the caller.
        let (a, b, c) = unsafe {
            (
                _mm512_loadu_si512(pixels.cast()),
                _mm512_loadu_si512(pixels.add(64).cast()),
                _mm512_loadu_si512(pixels.add(128).cast()),
            )
        };
        let mut channels = [a; 3];
        for (channel, (indices, third)) in channels.iter_mut().zip(self.indices) {
            *channel = _mm512_mask_permutexvar_epi8(
                _mm512_permutex2var_epi8(a, indices, b),
                third,
                indices,
                c,
            );
        }
        channels
    }
}
