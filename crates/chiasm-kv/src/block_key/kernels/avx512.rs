//! Block keys with AVX-512 IFMA: eight consecutive blocks at a time, one per lane.
//!
//! Let s be the state before eight blocks, S₀ to S₇ their sums and r the point. The states after
//! the blocks are
//!
//! ```text
//! sᵢ = s · r^(i + 1) + Σ Sₖ · r^(i − k)   over k ≤ i
//! ```
//!
//! The coefficients of a lane are those of the words times r^(7 − lane), so lane k computes
//! Sₖ · r^(7 − k). The running sum over the lanes, plus s · r^8, gives sᵢ · r^(7 − i) in lane i.
//! Multiplied by r^(i − 7), this is the state. The last lane already holds its state; it is
//! multiplied by r^8 instead, which the next eight blocks need.
//!
//! Numbers of the field are split into limbs of 52, 52 and 23 bits. A number times a coefficient is
//! the sum of its limbs times 2^0, 2^52 and 2^104 times the coefficient, like a sum over three more
//! words. The instructions multiply 52 bits by 52 bits and add either half of the product. The
//! highest limb of a coefficient is stored shifted up by 29 bits. Then the upper half of its
//! products has the weight 2^127 = 1, and the lower half is a multiple of 2^29.

use std::arch::x86_64::*;

use chiasm_types::TokenId;

use super::{BlockKey, MAX_BLOCK_WORDS, Series, Tables};
use crate::block_key::field::{P, multiply_add, power, reduce};

/// The number of blocks per vector.
const LANES: usize = 8;
/// The number of words of each block that are read at a time.
const STEP_WORDS: usize = 8;
/// The number of tokens of each block that are read at a time.
const STEP_TOKENS: usize = 2 * STEP_WORDS;
/// The number of tokens to prefetch before they are read: 4 KiB.
const PREFETCH_TOKENS: usize = 1024;
/// The number of bits of the two lower limbs.
const LIMB_BITS: u32 = 52;
const LIMB_MASK: u64 = (1 << LIMB_BITS) - 1;
/// The number of bits of the highest limb.
const TOP_BITS: u32 = 127 - 2 * LIMB_BITS;
const TOP_MASK: u64 = (1 << TOP_BITS) - 1;
/// The number of bits by which a coefficient's highest limb is shifted up.
const TOP_SHIFT: u32 = 3 * LIMB_BITS - 127;

/// One number per lane.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([u64; LANES]);

/// One coefficient per lane, in limbs.
type Coefficient = [Lanes; 3];

/// The coefficients for the three limbs of a number.
type Factor = [Coefficient; 3];

/// The secret as this kernel uses it.
pub(super) struct Table {
    /// The coefficients of the words, times r^(7 − lane).
    words: [Coefficient; MAX_BLOCK_WORDS],
    /// r^(lane − 7), but r^8 in the last lane.
    state: Factor,
    /// r^(7 − lane).
    first: Factor,
    /// lane · r^(7 − lane).
    lane: Factor,
    /// 8 · r^(7 − lane).
    eight: Factor,
}

impl Table {
    pub(super) fn new(coefficients: &[u128; MAX_BLOCK_WORDS], point: u128) -> Self {
        let times = |one, other| multiply_add(one, other, 0);
        let inverse = power(point, P - 2);
        let weight = |lane: usize| power(point, (LANES - 1 - lane) as u128);
        let inverse_weight = |lane: usize| match LANES - 1 - lane {
            0 => power(point, LANES as u128),
            exponent => power(inverse, exponent as u128),
        };
        let coefficient = |number: &dyn Fn(usize) -> u128| {
            let lanes: [[u64; 3]; LANES] = std::array::from_fn(|lane| coefficient(number(lane)));
            std::array::from_fn(|limb| Lanes(lanes.map(|limbs| limbs[limb])))
        };
        let factor = |number: &dyn Fn(usize) -> u128| -> Factor {
            std::array::from_fn(|limb| {
                coefficient(&|lane| times(1 << (LIMB_BITS * limb as u32), number(lane)))
            })
        };
        Self {
            words: coefficients.map(|word| coefficient(&|lane| times(word, weight(lane)))),
            state: factor(&inverse_weight),
            first: factor(&weight),
            lane: factor(&|lane| times(weight(lane), lane as u128)),
            eight: factor(&|lane| times(weight(lane), LANES as u128)),
        }
    }
}

/// Splits a number into limbs.
fn limbs(number: u128) -> [u64; 3] {
    [
        number as u64 & LIMB_MASK,
        (number >> LIMB_BITS) as u64 & LIMB_MASK,
        (number >> (2 * LIMB_BITS)) as u64,
    ]
}

/// Splits a coefficient into limbs, the highest one shifted.
fn coefficient(number: u128) -> [u64; 3] {
    let [low, middle, top] = limbs(number);
    [low, middle, top << TOP_SHIFT]
}

/// Implements [`super::Kernel::extend`]. Accepts blocks in which every second token is below 2^20.
#[target_feature(enable = "avx512f,avx512ifma")]
pub(super) fn extend(tables: &Tables, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
    let table = &tables.avx512;
    for line in series.tokens.chunks(STEP_TOKENS).take(PREFETCH_TOKENS / STEP_TOKENS) {
        // SAFETY: a prefetch has no effect but on caches.
        #[allow(unused_unsafe, reason = "older compilers require it")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast())
        };
    }
    let zero = [_mm512_setzero_si512(); 3];
    let mut extra = times(zero, splat(series.extra_sum), &table.first);
    let mut growth = zero;
    if series.extra_step != 0 {
        let step = splat(series.extra_step);
        extra = times(extra, step, &table.lane);
        growth = carried(times(zero, step, &table.eight));
    }
    let mut extra = carried(extra);
    let mut before = last(times(zero, splat(series.state), &table.state));

    keys.reserve(series.tokens.len() / series.block_size);
    let mut padded = None;
    let mut starts: [usize; LANES] = std::array::from_fn(|lane| lane * series.block_size);
    for group in series.tokens.chunks(LANES * series.block_size) {
        let is_full = group.len() == LANES * series.block_size;
        let mut tokens = group;
        if !series.block_size.is_multiple_of(STEP_TOKENS) {
            let padded =
                padded.get_or_insert(PaddedGroup([TokenId(0); LANES * 2 * MAX_BLOCK_WORDS]));
            starts = padded.fill(group, series.block_size);
            tokens = &padded.0;
        } else if !is_full {
            // Lanes without a block of their own compute the last block.
            starts = starts.map(|start| start.min(group.len() - series.block_size));
        }
        let steps = series.block_size.div_ceil(STEP_TOKENS);
        let Some(sums) = sum(table, extra, tokens, &starts, steps) else {
            return;
        };
        // Lane i of `weighted` is the state times r^(7 − i).
        let weighted = carried(add(running_sums(sums), before));
        let unweighted = times(zero, weighted, &table.state);
        before = last(unweighted);
        let new = to_keys(states(unweighted, weighted));
        // A copy of constant length is faster than one of the same variable length.
        if is_full {
            keys.extend_from_slice(&new.0);
        } else {
            keys.extend_from_slice(&new.0[..group.len() / series.block_size]);
        }
        if series.extra_step != 0 {
            extra = carried(add(extra, growth));
        }
    }
}

/// A group of blocks whose tokens don't fill vectors, padded with zeros.
#[repr(align(64))]
struct PaddedGroup([TokenId; LANES * 2 * MAX_BLOCK_WORDS]);

impl PaddedGroup {
    /// Copies the blocks of `group` and returns their start indices.
    #[inline(never)]
    fn fill(&mut self, group: &[TokenId], block_size: usize) -> [usize; LANES] {
        let stride = block_size.next_multiple_of(STEP_TOKENS);
        for (padded, block) in self.0.chunks_mut(stride).zip(group.chunks_exact(block_size)) {
            padded[..block_size].copy_from_slice(block);
        }
        std::array::from_fn(|lane| lane * stride)
    }
}

/// One number of the field per lane, in limbs that may have carries left.
type Limbs = [__m512i; 3];

/// The sums of lower and of upper halves of products with each limb of a coefficient.
type Products = [[__m512i; 2]; 3];

/// Returns the same number in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn splat(number: u128) -> Limbs {
    let [low, middle, top] = limbs(number);
    [_mm512_set1_epi64(low as i64), _mm512_set1_epi64(middle as i64), _mm512_set1_epi64(top as i64)]
}

/// Adds the product of one word of 52 bits per lane and the lane's coefficient.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn add_product(products: &mut Products, word: __m512i, coefficient: &Coefficient) {
    for ([low, high], limb) in products.iter_mut().zip(coefficient) {
        // SAFETY: `Lanes` is eight aligned numbers of 64 bits.
        let limb = unsafe { _mm512_load_si512(limb.0.as_ptr().cast()) };
        *low = _mm512_madd52lo_epu64(*low, word, limb);
        *high = _mm512_madd52hi_epu64(*high, word, limb);
    }
}

/// Returns the accumulators of a sum of products that begins with `start`.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn products(start: Limbs) -> Products {
    let zero = _mm512_setzero_si512();
    [[start[0], start[1]], [zero, start[2]], [zero, zero]]
}

/// Adds the halves of equal weight.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn total([[low0, high0], [low1, high1], [low2, high2]]: Products) -> Limbs {
    [
        _mm512_add_epi64(low0, high2),
        _mm512_add_epi64(high0, low1),
        _mm512_add_epi64(high1, _mm512_srli_epi64::<TOP_SHIFT>(low2)),
    ]
}

/// Returns `start` + `number` · `factor`. The limbs of `number` have at most 52 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn times(start: Limbs, number: Limbs, factor: &Factor) -> Limbs {
    let mut products = products(start);
    for (limb, coefficient) in number.iter().zip(factor) {
        add_product(&mut products, *limb, coefficient);
    }
    total(products)
}

#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn add(one: Limbs, other: Limbs) -> Limbs {
    [
        _mm512_add_epi64(one[0], other[0]),
        _mm512_add_epi64(one[1], other[1]),
        _mm512_add_epi64(one[2], other[2]),
    ]
}

/// Propagates carries until the limbs have 52, 52 and 23 bits, except for one last carry. Accepts
/// limbs below 2^63, of which one is at most 2^11.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn carried([low, middle, top]: Limbs) -> Limbs {
    let mask = _mm512_set1_epi64(LIMB_MASK as i64);
    let low = _mm512_add_epi64(low, _mm512_srli_epi64::<TOP_BITS>(top));
    let top = _mm512_and_si512(top, _mm512_set1_epi64(TOP_MASK as i64));
    let middle = _mm512_add_epi64(middle, _mm512_srli_epi64::<LIMB_BITS>(low));
    let top = _mm512_add_epi64(top, _mm512_srli_epi64::<LIMB_BITS>(middle));
    [_mm512_and_si512(low, mask), _mm512_and_si512(middle, mask), top]
}

/// Returns the running sums: in each lane the sum of all lanes up to it.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn running_sums(mut sums: Limbs) -> Limbs {
    let zero = _mm512_setzero_si512();
    for limb in &mut sums {
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<7>(*limb, zero));
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<6>(*limb, zero));
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<4>(*limb, zero));
    }
    sums
}

/// Returns the last lane's number in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn last([low, middle, top]: Limbs) -> Limbs {
    let last = _mm512_set1_epi64(LANES as i64 - 1);
    [
        _mm512_permutexvar_epi64(last, low),
        _mm512_permutexvar_epi64(last, middle),
        _mm512_permutexvar_epi64(last, top),
    ]
}

/// Returns the states of all lanes: the last lane of `weighted`, the other lanes of `unweighted`.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn states(unweighted: Limbs, weighted: Limbs) -> Limbs {
    const LAST: __mmask8 = 1 << (LANES - 1);
    [
        _mm512_mask_mov_epi64(unweighted[0], LAST, weighted[0]),
        _mm512_mask_mov_epi64(unweighted[1], LAST, weighted[1]),
        _mm512_mask_mov_epi64(unweighted[2], LAST, weighted[2]),
    ]
}

#[repr(align(64))]
struct Keys([BlockKey; LANES]);

/// Converts states to keys, which are numbers below p.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn to_keys(states: Limbs) -> Keys {
    let [low, middle, top] = carried(states);
    let lower = _mm512_or_si512(low, _mm512_slli_epi64::<LIMB_BITS>(middle));
    let upper = _mm512_add_epi64(
        _mm512_srli_epi64::<{ 64 - LIMB_BITS }>(middle),
        _mm512_slli_epi64::<{ 2 * LIMB_BITS - 64 }>(top),
    );
    let even = _mm512_unpacklo_epi64(lower, upper);
    let odd = _mm512_unpackhi_epi64(lower, upper);
    let first = _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), odd);
    let second =
        _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), odd);
    let mut out = Keys([BlockKey(0); LANES]);
    let keys = out.0.as_mut_ptr();
    // SAFETY: eight aligned numbers of 128 bits are two vectors.
    unsafe {
        _mm512_store_si512(keys.cast(), first);
        _mm512_store_si512(keys.add(LANES / 2).cast(), second);
    }
    // Only a number whose highest limb is full can reach p: about one number in two million.
    if _mm512_cmpge_epu64_mask(top, _mm512_set1_epi64(TOP_MASK as i64)) != 0 {
        out.reduce();
    }
    out
}

impl Keys {
    #[cold]
    fn reduce(&mut self) {
        self.0 = self.0.map(|key| BlockKey(reduce(key.0)));
    }
}

/// Returns the sums of the blocks that start at `starts` and take `steps` steps, plus `extra`, each
/// times the lane's power of r.
///
/// Returns `None` if a token is too large.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn sum(
    table: &Table,
    extra: Limbs,
    tokens: &[TokenId],
    starts: &[usize; LANES],
    steps: usize,
) -> Option<Limbs> {
    assert!(starts[LANES - 1] + steps * STEP_TOKENS <= tokens.len());
    let zero = _mm512_setzero_si512();
    // Two accumulators, because each product waits for the previous one in the same accumulator.
    let mut even = products(extra);
    let mut odd = [[zero; 2]; 3];
    let mut bits = zero;
    for (step, coefficients) in table.words.as_chunks::<STEP_WORDS>().0[..steps].iter().enumerate()
    {
        let mut words = [zero; LANES];
        for (words, start) in words.iter_mut().zip(starts) {
            let place = tokens.as_ptr().wrapping_add(start + step * STEP_TOKENS);
            // SAFETY: `starts` ascends, and the assertion above leaves enough tokens after the last
            // start for all steps. A prefetch may be out of bounds.
            unsafe {
                *words = _mm512_loadu_si512(place.cast());
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(PREFETCH_TOKENS).cast());
            }
        }
        for [one, other] in words.as_chunks().0 {
            // The bitwise or of all three.
            bits = _mm512_ternarylogic_epi64::<0b1111_1110>(bits, *one, *other);
        }
        for (words, coefficients) in
            transposed(words).as_chunks::<2>().0.iter().zip(coefficients.as_chunks::<2>().0)
        {
            add_product(&mut even, words[0], &coefficients[0]);
            add_product(&mut odd, words[1], &coefficients[1]);
        }
    }
    let small = _mm512_test_epi64_mask(bits, _mm512_set1_epi64(!LIMB_MASK as i64)) == 0;
    small.then(|| add(total(even), total(odd)))
}

/// Transposes vectors of one block's words into vectors of one word of all blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn transposed(words: [__m512i; LANES]) -> [__m512i; STEP_WORDS] {
    let [a, b, c, d, e, f, g, h] = words;
    // The even or odd words of two blocks.
    let even = |a, b| _mm512_unpacklo_epi64(a, b);
    let odd = |a, b| _mm512_unpackhi_epi64(a, b);
    // Quarters 0 and 2, or 1 and 3, of two vectors.
    let outer = |a, b| _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b);
    let inner = |a, b| _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b);
    let mut rows = [_mm512_setzero_si512(); STEP_WORDS];
    for (row, [ab, cd, ef, gh]) in [
        [even(a, b), even(c, d), even(e, f), even(g, h)],
        [odd(a, b), odd(c, d), odd(e, f), odd(g, h)],
    ]
    .into_iter()
    .enumerate()
    {
        let abcd = [outer(ab, cd), inner(ab, cd)];
        let efgh = [outer(ef, gh), inner(ef, gh)];
        rows[row] = outer(abcd[0], efgh[0]);
        rows[row + 2] = outer(abcd[1], efgh[1]);
        rows[row + 4] = inner(abcd[0], efgh[0]);
        rows[row + 6] = inner(abcd[1], efgh[1]);
    }
    rows
}
