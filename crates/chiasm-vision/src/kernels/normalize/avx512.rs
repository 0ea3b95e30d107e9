//! Table lookups with AVX-512 VBMI: the table is in registers, 64 lookups at a time.

use std::arch::x86_64::*;

/// The number of values per step.
const STEP_VALUES: usize = 64;

/// The lookup table of one channel in registers, for elements of 2 or 4 bytes.
///
/// Entry `i` holds byte `i` of all 256 elements.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Registers<const N: usize>([[__m512i; 4]; N]);

impl<const N: usize> Registers<N> {
    /// Loads a table into registers.
    #[target_feature(enable = "avx512f")]
    pub(in crate::kernels) fn new(table: &[[u8; N]; 256]) -> Self {
        const { assert!(N == 2 || N == 4) };
        Self(std::array::from_fn(|byte| {
            std::array::from_fn(|quarter| {
                let bytes: [u8; 64] =
                    std::array::from_fn(|index| table[64 * quarter + index][byte]);
                // SAFETY: reads the 64 bytes of the array.
                unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
            })
        }))
    }

    /// Looks up at least 64 values and fills `out` with copies of their elements.
    ///
    /// # Panics
    /// If `values` is shorter than 64 or `out` has no room for a whole number of copies.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    pub(in crate::kernels) fn map(&self, values: &[u8], out: &mut [u8]) {
        let length = N * values.len();
        assert!(values.len() >= STEP_VALUES && out.len().is_multiple_of(length));
        for at in (0..values.len()).step_by(STEP_VALUES) {
            // The last step may repeat some values.
            let at = at.min(values.len() - STEP_VALUES);
            // SAFETY: at + 64 <= values.len().
            let elements =
                self.encode(unsafe { _mm512_loadu_si512(values.as_ptr().add(at).cast()) });
            for start in (0..out.len()).step_by(length) {
                // SAFETY: N * (at + 64) <= length, and start + length <= out.len().
                unsafe { Self::store(elements, out.as_mut_ptr().add(start + N * at)) };
            }
        }
    }

    /// Stores the elements of 64 values.
    ///
    /// # Safety
    /// `64 * N` bytes must be writable at `at`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(in crate::kernels) unsafe fn store(elements: [__m512i; N], at: *mut u8) {
        for (index, bytes) in elements.into_iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_storeu_si512(at.add(64 * index).cast(), bytes) };
        }
    }

    /// Returns the elements of 64 values, in their order.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi")]
    #[inline]
    pub(in crate::kernels) fn encode(&self, values: __m512i) -> [__m512i; N] {
        let mut elements = [values; N];
        // Unpacking interleaves within lanes of 16 bytes. The values are permuted first, so that
        // the unpacked elements are in order.
        if N == 2 {
            let values =
                _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), values);
            let a = look_up(&self.0[0], values);
            let b = look_up(&self.0[1], values);
            elements[0] = _mm512_unpacklo_epi8(a, b);
            elements[1] = _mm512_unpackhi_epi8(a, b);
        } else {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let values = _mm512_permutexvar_epi32(order, values);
            let a = look_up(&self.0[0], values);
            let b = look_up(&self.0[1], values);
            let c = look_up(&self.0[2], values);
            let d = look_up(&self.0[3], values);
            let ab = _mm512_unpacklo_epi8(a, b);
            let cd = _mm512_unpacklo_epi8(c, d);
            elements[0] = _mm512_unpacklo_epi16(ab, cd);
            elements[1] = _mm512_unpackhi_epi16(ab, cd);
            let ab = _mm512_unpackhi_epi8(a, b);
            let cd = _mm512_unpackhi_epi8(c, d);
            elements[2] = _mm512_unpacklo_epi16(ab, cd);
            elements[3] = _mm512_unpackhi_epi16(ab, cd);
        }
        elements
    }
}

/// Replaces each byte of `values` by the table byte with that index.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up(bytes: &[__m512i; 4], values: __m512i) -> __m512i {
    // A permutation of two vectors ignores the highest bit of an index, which selects between the
    // two permutations here.
    let below_128 = _mm512_permutex2var_epi8(bytes[0], values, bytes[1]);
    let from_128 = _mm512_permutex2var_epi8(bytes[2], values, bytes[3]);
    _mm512_mask_blend_epi8(_mm512_movepi8_mask(values), below_128, from_128)
}
