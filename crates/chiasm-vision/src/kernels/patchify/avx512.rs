//! Cutting patches with AVX-512 VBMI: each step splits four lines of a patch into channels.
//! Lookup tables are in registers, 64 lookups at a time.

use std::arch::x86_64::*;
use std::ops::RangeInclusive;

use super::{PREFETCH_BYTES, PatchGrid, avx2, scalar};
use crate::kernels::ChannelTable;
use crate::kernels::normalize::avx512::Registers;

/// The lines per step. With the largest patch that is cut here, one channel of them fills a vector.
const STEP_LINES: usize = 4;
/// The sides of patches that are cut here. Larger patches do not fit into vectors; no model has
/// smaller ones.
const SUPPORTED_SIDES: RangeInclusive<usize> = 12..=MAX_SIDE;
/// The largest of [`SUPPORTED_SIDES`].
const MAX_SIDE: usize = 16;

/// Vector version of [`scalar::copy`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn copy(pixels: &[u8], grid: &PatchGrid, out: &mut [u8]) {
    if !SUPPORTED_SIDES.contains(&grid.patch) {
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

/// Vector version of [`scalar::map`], for elements of 2 or 4 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map<const N: usize>(
    pixels: &[u8],
    grid: &PatchGrid,
    table: &ChannelTable<N>,
    out: &mut [u8],
) {
    if !SUPPORTED_SIDES.contains(&grid.patch) {
        return scalar::map(pixels, grid, table, out);
    }
    let plane = grid.patch * grid.patch;
    let registers =
        [Registers::new(&table[0]), Registers::new(&table[1]), Registers::new(&table[2])];
    let cutter = Cutter::new(grid, pixels);
    let mut planes = [0; 3 * MAX_SIDE * MAX_SIDE];
    let planes = &mut planes[..3 * plane];
    // Rows of 4-byte elements whose stores cross cache lines are assembled in the first-level
    // cache, then copied. Measured with patches of 14: this takes a third less time, but elements
    // of 2 bytes take longer that way.
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

/// The state for cutting patches of one grid.
struct Cutter<'a> {
    pixels: &'a [u8],
    grid: &'a PatchGrid,
    /// The mask of the bytes of a patch's line.
    line: __mmask64,
    /// The mask of the lanes of a channel that the first two of four lines fill.
    first: __mmask64,
    /// The indices of each channel's bytes in two lines. They are the same for the first two and
    /// the last two lines.
    indices: [__m512i; 3],
}

impl<'a> Cutter<'a> {
    /// Creates a cutter for the patches of a grid.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    fn new(grid: &'a PatchGrid, pixels: &'a [u8]) -> Self {
        let patch = grid.patch;
        let indices = std::array::from_fn(|channel| {
            let indices: [u8; 64] = std::array::from_fn(|byte| {
                let line = byte / patch % 2;
                let pixel = byte % patch;
                // The lines are 64 bytes apart in two vectors.
                (64 * line + 3 * pixel + channel) as u8
            });
            // SAFETY: reads the 64 bytes of the array.
            unsafe { _mm512_loadu_si512(indices.as_ptr().cast()) }
        });
        Self { pixels, grid, line: (1 << (3 * patch)) - 1, first: (1 << (2 * patch)) - 1, indices }
    }

    /// Writes the patch whose first byte is at `origin` to its row, once per frame. `FRAMES` is the
    /// number of frames, or 0 if it is only known at run time.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    fn cut<const FRAMES: usize>(&self, origin: usize, row: &mut [u8]) {
        let Self { pixels, grid, .. } = *self;
        let patch = grid.patch;
        let image_row = grid.image_row();
        let frames = if FRAMES == 0 { grid.temporal } else { FRAMES };
        let plane = patch * patch;
        assert!(origin + (patch - 1) * image_row + 3 * patch <= pixels.len());
        assert!(row.len() == 3 * frames * plane && SUPPORTED_SIDES.contains(&patch));
        for y in (0..patch).step_by(STEP_LINES) {
            let y = y.min(patch - STEP_LINES);
            // SAFETY: only reads the line of the patch, which is within the pixels.
            let load = |line: usize| unsafe {
                let at = pixels.as_ptr().add(origin + (y + line) * image_row);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES).cast());
                _mm512_maskz_loadu_epi8(self.line, at.cast())
            };
            let [a, b, c, d] = [load(0), load(1), load(2), load(3)];
            for (channel, &indices) in self.indices.iter().enumerate() {
                let first = _mm512_permutex2var_epi8(a, indices, b);
                let last = _mm512_permutex2var_epi8(c, indices, d);
                let bytes = _mm512_mask_blend_epi8(self.first, last, first);
                for frame in 0..frames {
                    let at = (channel * frames + frame) * plane + y * patch;
                    // SAFETY: writes four lines from line y of a plane of the row. Bytes beyond
                    // them are in the same plane and written later. The last four lines are
                    // written exactly.
                    unsafe {
                        store(
                            row.as_mut_ptr().add(at),
                            bytes,
                            if y + STEP_LINES == patch { STEP_LINES * patch } else { 64 },
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
/// `length` bytes must be writable at `at`.
#[target_feature(enable = "avx2,avx512f,avx512bw")]
#[inline]
unsafe fn store(at: *mut u8, bytes: __m512i, length: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if length == 64 {
            _mm512_storeu_si512(at.cast(), bytes);
        } else {
            _mm512_mask_storeu_epi8(at.cast(), (1 << length) - 1, bytes);
        }
    }
}
