//! A table's look-ups with AVX-512 VBMI: the table lies in registers, where 64 values are looked up
//! at a time.

use std::arch::x86_64::*;

/// Values per step.
const VALUES: usize = 64;

/// The table of one channel, for elements of 2 or 4 bytes: of each byte of an element, that byte of
/// all 256.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Registers<const N: usize>([[__m512i; 4]; N]);

impl<const N: usize> Registers<N> {
    #[target_feature(enable = "avx512f")]
    pub(in crate::kernels) fn new(table: &[[u8; N]; 256]) -> Self {
        const { assert!(N == 2 || N == 4) };
        Self(std::array::from_fn(|byte| {
            std::array::from_fn(|quarter| {
                let bytes: [u8; 64] =
                    std::array::from_fn(|index| table[64 * quarter + index][byte]);
                // SAFETY: 64 bytes of an array of that length.
                unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
            })
        }))
    }

    /// Looks up at least 64 values and writes their elements to `out`, as often as there is room
    /// for all.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    pub(in crate::kernels) fn map(&self, values: &[u8], out: &mut [u8]) {
        let length = N * values.len();
        assert!(values.len() >= VALUES && out.len().is_multiple_of(length));
        for at in (0..values.len()).step_by(VALUES) {
            // The last step may repeat some values.
            let at = at.min(values.len() - VALUES);
            // SAFETY: at + 64 <= values.len().
            let elements =
                self.encode(unsafe { _mm512_loadu_si512(values.as_ptr().add(at).cast()) });
            for start in (0..out.len()).step_by(length) {
                // SAFETY: N * (at + 64) <= length, and start + length <= out.len().
                unsafe { Self::store(elements, out.as_mut_ptr().add(start + N * at)) };
            }
        }
    }

    /// # Safety
    /// `64 * N` bytes can be written at `at`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(in crate::kernels) unsafe fn store(elements: [__m512i; N], at: *mut u8) {
        for (index, bytes) in elements.into_iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { _mm512_storeu_si512(at.add(64 * index).cast(), bytes) };
        }
    }

    /// The elements of 64 values, in their order.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    pub(in crate::kernels) fn encode(&self, values: __m512i) -> [__m512i; N] {
        let mut elements = [values; N];
        // Unpacking works within 16 bytes; these orders of the values make its results lie in
        // order.
        if N == 2 {
            let values =
                _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), values);
            let (a, b) = (look_up(&self.0[0], values), look_up(&self.0[1], values));
            elements[0] = _mm512_unpacklo_epi8(a, b);
            elements[1] = _mm512_unpackhi_epi8(a, b);
        } else {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let values = _mm512_permutexvar_epi32(order, values);
            let (a, b) = (look_up(&self.0[0], values), look_up(&self.0[1], values));
            let (c, d) = (look_up(&self.0[2], values), look_up(&self.0[3], values));
            let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
            elements[0] = _mm512_unpacklo_epi16(ab, cd);
            elements[1] = _mm512_unpackhi_epi16(ab, cd);
            let (ab, cd) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
            elements[2] = _mm512_unpacklo_epi16(ab, cd);
            elements[3] = _mm512_unpackhi_epi16(ab, cd);
        }
        elements
    }
}

/// Each byte of `values` replaced by the byte of that index.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up(bytes: &[__m512i; 4], values: __m512i) -> __m512i {
    // A permutation of two vectors ignores the index's highest bit: it chooses between the two.
    let below_128 = _mm512_permutex2var_epi8(bytes[0], values, bytes[1]);
    let from_128 = _mm512_permutex2var_epi8(bytes[2], values, bytes[3]);
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(values), below_128, from_128)
}
