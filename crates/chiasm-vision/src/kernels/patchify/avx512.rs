//! Patches through a table with AVX-512 VBMI: the table lies in registers, 64 values are looked up at a time.

use std::arch::x86_64::*;

use super::{PatchGrid, avx2, scalar};
use crate::kernels::ChannelTable;

/// Values per step.
const VALUES: usize = 64;

/// One byte of each of the table's 256 elements.
type BytePlane = [__m512i; 4];

/// See [`scalar::map`], for elements of 2 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map_2(pixels: &[u8], grid: &PatchGrid, table: &ChannelTable<2>, out: &mut [u8]) {
    let planes: [[BytePlane; 2]; 3] = byte_planes(table);
    // Unpacking works within 16 bytes; this order of the values makes its results lie in order.
    let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    avx2::map_with(pixels, grid, table, out, |values, channel, out| {
        let [low, high] = planes[channel];
        for_each_step(values, out, |values| {
            let values = _mm512_permutexvar_epi64(order, values);
            let (low, high) = (look_up(low, values), look_up(high, values));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        });
    });
}

/// See [`scalar::map`], for elements of 4 bytes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
pub(crate) fn map_4(pixels: &[u8], grid: &PatchGrid, table: &ChannelTable<4>, out: &mut [u8]) {
    // Stores across cache lines cost more than they gain (measured with patches of 14).
    if !(grid.patch * grid.patch).is_multiple_of(VALUES) {
        return scalar::map(pixels, grid, table, out);
    }
    let planes: [[BytePlane; 4]; 3] = byte_planes(table);
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    avx2::map_with(pixels, grid, table, out, |values, channel, out| {
        let planes = planes[channel];
        for_each_step(values, out, |values| {
            let values = _mm512_permutexvar_epi32(order, values);
            let [a, b, c, d] = planes.map(|plane| look_up(plane, values));
            let (low, high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            let (low_2, high_2) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            [
                _mm512_unpacklo_epi16(low, high),
                _mm512_unpackhi_epi16(low, high),
                _mm512_unpacklo_epi16(low_2, high_2),
                _mm512_unpackhi_epi16(low_2, high_2),
            ]
        });
    });
}

/// `encode` turns 64 values into as many elements of `N` bytes. There must be 64 values; the last step may repeat some.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
#[inline]
fn for_each_step<const N: usize>(values: &[u8], out: &mut [u8], encode: impl Fn(__m512i) -> [__m512i; N]) {
    assert!(values.len() >= VALUES && out.len() == N * values.len());
    for at in (0..values.len()).step_by(VALUES) {
        let at = at.min(values.len() - VALUES);
        // SAFETY: at + 64 <= values.len().
        let encoded = encode(unsafe { _mm512_loadu_si512(values.as_ptr().add(at).cast()) });
        for (index, bytes) in encoded.into_iter().enumerate() {
            // SAFETY: N * at + 64 * N <= out.len(), and index < N.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(N * at + 64 * index).cast(), bytes) };
        }
    }
}

/// For each channel and each byte of an element: that byte of all elements.
#[target_feature(enable = "avx512f")]
fn byte_planes<const N: usize>(table: &ChannelTable<N>) -> [[BytePlane; N]; 3] {
    std::array::from_fn(|channel| {
        std::array::from_fn(|byte| {
            std::array::from_fn(|quarter| {
                let bytes: [u8; 64] = std::array::from_fn(|index| table[channel][64 * quarter + index][byte]);
                // SAFETY: 64 bytes of an array of that length.
                unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
            })
        })
    })
}

/// Each byte of `values` replaced by the plane's byte at that index.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up(plane: BytePlane, values: __m512i) -> __m512i {
    // A permutation of two vectors ignores the index's highest bit: it chooses between the two.
    let below_128 = _mm512_permutex2var_epi8(plane[0], values, plane[1]);
    let from_128 = _mm512_permutex2var_epi8(plane[2], values, plane[3]);
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(values), below_128, from_128)
}
