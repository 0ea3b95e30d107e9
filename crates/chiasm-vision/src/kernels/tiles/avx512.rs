//! Cutting tiles with AVX-512 VBMI: 64 pixels at a time are taken apart into channels. Tables lie
//! in registers.

use std::arch::x86_64::*;

use super::{TileGrid, scalar};
use crate::kernels::ChannelTable;
use crate::kernels::normalize::avx512::Registers;

/// Pixels per step.
const PIXELS: usize = 64;

/// See [`scalar::copy`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn copy(lines: &[u8], y: usize, grid: &TileGrid, out: &mut [u8]) {
    if grid.width < PIXELS {
        return scalar::copy(lines, y, grid, out);
    }
    cut(lines, y, grid, out, |_, values| [values]);
}

/// See [`scalar::map`], for elements of 2 or 4 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    if grid.width < PIXELS {
        return scalar::map(lines, y, grid, table, out);
    }
    let registers =
        [Registers::new(&table[0]), Registers::new(&table[1]), Registers::new(&table[2])];
    cut(lines, y, grid, out, |channel, values| registers[channel].encode(values));
}

/// `encode` turns 64 values of a channel into as many elements of `N` bytes. Tiles are at least
/// that wide.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
#[inline]
fn cut<const N: usize>(
    lines: &[u8],
    y: usize,
    grid: &TileGrid,
    out: &mut [u8],
    encode: impl Fn(usize, __m512i) -> [__m512i; N],
) {
    let (width, plane) = (grid.width, grid.width * grid.height);
    assert!(width >= PIXELS);
    let channels = Channels::new();
    for (index, line) in lines.chunks_exact(3 * grid.image_width()).enumerate() {
        for (start, pixels) in grid.line_starts(y + index).zip(line.chunks_exact(3 * width)) {
            assert!(out.len() >= N * (start + 2 * plane + width));
            for x in (0..width).step_by(PIXELS) {
                // The last step may repeat some pixels.
                let x = x.min(width - PIXELS);
                // SAFETY: x + 64 <= width, which is how many pixels there are.
                let values = unsafe { channels.of(pixels.as_ptr().add(3 * x)) };
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

/// Takes 64 pixels apart.
struct Channels {
    /// The bytes that each channel takes of three vectors, and its lanes that take them from the
    /// third. (The instructions ignore the upper bits of an index.)
    indices: [(__m512i, __mmask64); 3],
}

impl Channels {
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        let indices = std::array::from_fn(|channel| {
            let bytes: [usize; PIXELS] = std::array::from_fn(|pixel| 3 * pixel + channel);
            let vector = bytes.map(|byte| byte as u8);
            let third =
                bytes.iter().rev().fold(0, |mask, &byte| mask << 1 | u64::from(byte >= 128));
            // SAFETY: 64 bytes of an array of that length.
            (unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) }, third)
        });
        Self { indices }
    }

    /// Red, green and blue of 64 pixels.
    ///
    /// # Safety
    /// They can be read at `pixels`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn of(&self, pixels: *const u8) -> [__m512i; 3] {
        // SAFETY: the caller's.
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
