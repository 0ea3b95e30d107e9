//! Cutting patches with AVX-512 VBMI: four lines of a patch at a time are taken apart into
//! channels. Tables lie in registers, where 64 values are looked up at a time.

use std::arch::x86_64::*;
use std::ops::RangeInclusive;

use super::{AHEAD, PatchGrid, avx2, scalar};
use crate::kernels::ChannelTable;
use crate::kernels::normalize::avx512::Registers;

/// Lines per step: those of the largest patch that is cut here fill a vector with one channel.
const LINES: usize = 4;
/// Sides of patches that are cut here. Larger ones do not fit into vectors; smaller ones no model
/// has.
const SIDES: RangeInclusive<usize> = 12..=LARGEST;
/// The last of [`SIDES`].
const LARGEST: usize = 16;

/// See [`scalar::copy`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    if !SIDES.contains(&grid.patch) {
        return avx2::copy(pixels, grid, out);
    }
    let cutter = Cutter::new(grid, pixels);
    for (origin, row) in grid.origins().zip(out.chunks_exact_mut(grid.row_len())) {
        match grid.temporal {
            1 => cutter.cut::<1>(origin, row),
            2 => cutter.cut::<2>(origin, row),
            _ => cutter.cut::<0>(origin, row),
        }
    }
}

/// See [`scalar::map`], for elements of 2 or 4 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    if !SIDES.contains(&grid.patch) {
        return scalar::map(pixels, grid, table, out);
    }
    let plane = grid.patch * grid.patch;
    let registers =
        [Registers::new(&table[0]), Registers::new(&table[1]), Registers::new(&table[2])];
    let cutter = Cutter::new(grid, pixels);
    let mut planes = [0; 3 * LARGEST * LARGEST];
    let planes = &mut planes[..3 * plane];
    // Rows of 4-byte elements whose stores cross cache lines are made in the first-level cache,
    // then moved. (A third less time. Elements of 2 bytes take longer that way. Both measured with
    // patches of 14.)
    let stage = N == 4 && !(N * plane).is_multiple_of(64);
    let mut staged = if stage { vec![0; N * grid.row_len()] } else { Vec::new() };
    for (origin, out) in grid.origins().zip(out.chunks_exact_mut(N * grid.row_len())) {
        cutter.cut::<1>(origin, planes);
        let row = if stage { &mut staged } else { &mut *out };
        let frames = row.chunks_exact_mut(N * plane * grid.temporal);
        for ((values, registers), frames) in planes.chunks_exact(plane).zip(&registers).zip(frames)
        {
            registers.map(values, frames);
        }
        if stage {
            out.copy_from_slice(&staged);
        }
    }
}

/// What cutting one patch needs to know.
struct Cutter<'a> {
    pixels: &'a [u8],
    grid: &'a PatchGrid,
    /// The bytes of a patch's line.
    line: __mmask64,
    /// The lanes of a channel that the first two of four lines fill.
    first: __mmask64,
    /// Indices of a channel's bytes in two lines, by channel; the same for the first two and the
    /// last two.
    indices: [__m512i; 3],
}

impl<'a> Cutter<'a> {
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    fn new(grid: &'a PatchGrid, pixels: &'a [u8]) -> Self {
        let patch = grid.patch;
        let indices = std::array::from_fn(|channel| {
            let indices: [u8; 64] = std::array::from_fn(|byte| {
                let (line, pixel) = (byte / patch % 2, byte % patch);
                // The lines are 64 bytes apart in two vectors.
                (64 * line + 3 * pixel + channel) as u8
            });
            // SAFETY: 64 bytes of an array of that length.
            unsafe { _mm512_loadu_si512(indices.as_ptr().cast()) }
        });
        Self { pixels, grid, line: (1 << (3 * patch)) - 1, first: (1 << (2 * patch)) - 1, indices }
    }

    /// The patch whose first byte is at `origin`. `FRAMES`: 0, or the number of frames.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    fn cut<const FRAMES: usize>(&self, origin: usize, row: &mut [u8]) {
        let Self { pixels, grid, .. } = *self;
        let (patch, image_row) = (grid.patch, grid.image_row());
        let frames = if FRAMES == 0 { grid.temporal } else { FRAMES };
        let plane = patch * patch;
        assert!(origin + (patch - 1) * image_row + 3 * patch <= pixels.len());
        assert!(row.len() == 3 * frames * plane && SIDES.contains(&patch));
        for y in (0..patch).step_by(LINES) {
            let y = y.min(patch - LINES);
            // SAFETY: lines of the patch, which lie within the pixels; nothing else is touched.
            let load = |line: usize| unsafe {
                let at = pixels.as_ptr().add(origin + (y + line) * image_row);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
                _mm512_maskz_loadu_epi8(self.line, at.cast())
            };
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            for (channel, &indices) in self.indices.iter().enumerate() {
                let first = _mm512_permutex2var_epi8(a, indices, b);
                let last = _mm512_permutex2var_epi8(c, indices, d);
                let bytes = _mm512_mask_blend_epi8(self.first, last, first);
                for frame in 0..frames {
                    let at = (channel * frames + frame) * plane + y * patch;
                    // SAFETY: four lines from line y of a plane of the row. What is written beyond
                    // them is in the same plane and written later; the last four lines are written
                    // exactly.
                    unsafe {
                        store(
                            row.as_mut_ptr().add(at),
                            bytes,
                            if y + LINES == patch { LINES * patch } else { 64 },
                        )
                    };
                }
            }
        }
    }
}

/// Stores the first `length` bytes, at least 48.
///
/// # Safety
/// They can be written at `at`.
#[target_feature(enable = "avx2,avx512f,avx512bw")]
#[inline]
unsafe fn store(at: *mut u8, bytes: __m512i, length: usize) {
    // SAFETY: the caller's.
    unsafe {
        if length == 64 {
            _mm512_storeu_si512(at.cast(), bytes);
        } else {
            _mm512_mask_storeu_epi8(at.cast(), (1 << length) - 1, bytes);
        }
    }
}
