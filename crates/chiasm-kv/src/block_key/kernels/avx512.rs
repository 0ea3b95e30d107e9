//! Keys with AVX-512 IFMA: eight blocks side by side, one per lane, their chain too.
//!
//! With s the state before eight blocks, S₀ to S₇ their sums and r the point, the states after them
//! are
//!
//! ```text
//! sᵢ = s · r^(i + 1) + Σ Sₖ · r^(i − k)   over k ≤ i
//! ```
//!
//! The lanes' coefficients are those of the words times r^(7 − lane), so that lane k sums up Sₖ ·
//! r^(7 − k). To the sums of these from the first lane on, s · r^8 is added, and the result is sᵢ ·
//! r^(7 − i). Once multiplied by r^(i − 7), it is the state; but that of the last lane is the state
//! already and is multiplied by r^8 instead, for the next eight blocks.
//!
//! Numbers of the field are in limbs of 52, 52 and 23 bits. A number times a coefficient is the sum
//! of its limbs times 2^0, 2^52 and 2^104 times the coefficient: of three words more, so to speak.
//! The instructions multiply 52 bits by 52 and add either half of the product. The highest limb of
//! a coefficient is kept 29 bits further up: then the upper half of its products has the weight of
//! 2^127 = 1, and the lower one is a multiple of 2^29.

use std::arch::x86_64::*;

use chiasm_types::TokenId;

use super::{BlockKey, Series, Tables, WORDS};
use crate::block_key::field::{P, multiply_add, power, reduce};

/// Blocks at a time.
const LANES: usize = 8;
/// Words of a block that are read at a time, and their tokens.
const STEP_WORDS: usize = 8;
const STEP: usize = 2 * STEP_WORDS;
/// Tokens that are brought near before they are read: 4 KiB.
const AHEAD: usize = 1024;
const BITS: u32 = 52;
const LOW: u64 = (1 << BITS) - 1;
/// Bits of a highest limb.
const TOP_BITS: u32 = 127 - 2 * BITS;
const TOP: u64 = (1 << TOP_BITS) - 1;
/// Bits by which a coefficient's highest limb is shifted.
const SHIFT: u32 = 3 * BITS - 127;

/// One number per lane.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([u64; LANES]);

/// One coefficient per lane, in limbs.
type Coefficient = [Lanes; 3];

/// Coefficients of a number's limbs.
type Factor = [Coefficient; 3];

pub(super) struct Table {
    words: [Coefficient; WORDS],
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
    pub(super) fn new(coefficients: &[u128; WORDS], point: u128) -> Self {
        let times = |one, other| multiply_add(one, other, 0);
        let inverse = power(point, P - 2);
        let behind = |lane: usize| power(point, (LANES - 1 - lane) as u128);
        let ahead = |lane: usize| match LANES - 1 - lane {
            0 => power(point, LANES as u128),
            behind => power(inverse, behind as u128),
        };
        let coefficient = |of: &dyn Fn(usize) -> u128| {
            let lanes: [[u64; 3]; LANES] = std::array::from_fn(|lane| coefficient(of(lane)));
            std::array::from_fn(|limb| Lanes(lanes.map(|limbs| limbs[limb])))
        };
        let factor = |of: &dyn Fn(usize) -> u128| -> Factor {
            std::array::from_fn(|limb| {
                coefficient(&|lane| times(1 << (BITS * limb as u32), of(lane)))
            })
        };
        Self {
            words: coefficients.map(|word| coefficient(&|lane| times(word, behind(lane)))),
            state: factor(&ahead),
            first: factor(&behind),
            lane: factor(&|lane| times(behind(lane), lane as u128)),
            eight: factor(&|lane| times(behind(lane), LANES as u128)),
        }
    }
}

fn limbs(number: u128) -> [u64; 3] {
    [number as u64 & LOW, (number >> BITS) as u64 & LOW, (number >> (2 * BITS)) as u64]
}

fn coefficient(number: u128) -> [u64; 3] {
    let [low, middle, top] = limbs(number);
    [low, middle, top << SHIFT]
}

/// See [`super::Kernel::extend`]. Takes tokens of which each second is below 2^20.
#[target_feature(enable = "avx512f,avx512ifma")]
pub(super) fn extend(tables: &Tables, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
    let table = &tables.avx512;
    for line in series.tokens.chunks(STEP).take(AHEAD / STEP) {
        // SAFETY: it changes nothing.
        #[allow(unused_unsafe, reason = "older compilers want it")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast())
        };
    }
    let zero = [_mm512_setzero_si512(); 3];
    let mut more = times(zero, splat(series.first), &table.first);
    let mut growth = zero;
    if series.step != 0 {
        let step = splat(series.step);
        more = times(more, step, &table.lane);
        growth = carried(times(zero, step, &table.eight));
    }
    let mut more = carried(more);
    let mut before = last(times(zero, splat(series.state), &table.state));

    keys.reserve(series.tokens.len() / series.block_size);
    let mut room = None;
    let mut starts: [usize; LANES] = std::array::from_fn(|lane| lane * series.block_size);
    for group in series.tokens.chunks(LANES * series.block_size) {
        let whole = group.len() == LANES * series.block_size;
        let mut tokens = group;
        if !series.block_size.is_multiple_of(STEP) {
            let room = room.get_or_insert(Room([TokenId(0); LANES * 2 * WORDS]));
            starts = room.fill(group, series.block_size);
            tokens = &room.0;
        } else if !whole {
            // Lanes without a block have the last one's.
            starts = starts.map(|start| start.min(group.len() - series.block_size));
        }
        let Some(sums) = sum(table, more, tokens, &starts, series.block_size.div_ceil(STEP)) else {
            return;
        };
        let ahead = carried(add(summed_up(sums), before));
        let behind = times(zero, ahead, &table.state);
        before = last(behind);
        let new = keys_of(states(behind, ahead));
        // So many as a known number are faster than as many.
        if whole {
            keys.extend_from_slice(&new.0);
        } else {
            keys.extend_from_slice(&new.0[..group.len() / series.block_size]);
        }
        if series.step != 0 {
            more = carried(add(more, growth));
        }
    }
}

/// Room for a group of blocks whose tokens don't fill vectors: zeros stand for what is not there.
#[repr(align(64))]
struct Room([TokenId; LANES * 2 * WORDS]);

impl Room {
    /// Returns where the blocks start.
    #[inline(never)]
    fn fill(&mut self, group: &[TokenId], block_size: usize) -> [usize; LANES] {
        let stride = block_size.next_multiple_of(STEP);
        for (room, block) in self.0.chunks_mut(stride).zip(group.chunks_exact(block_size)) {
            room[..block_size].copy_from_slice(block);
        }
        std::array::from_fn(|lane| lane * stride)
    }
}

/// One number of the field per lane, in limbs. They may have more bits than they should.
type Limbs = [__m512i; 3];

/// Lower and upper halves of products with each limb of a coefficient.
type Products = [[__m512i; 2]; 3];

/// The same number in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn splat(number: u128) -> Limbs {
    let [low, middle, top] = limbs(number);
    [_mm512_set1_epi64(low as i64), _mm512_set1_epi64(middle as i64), _mm512_set1_epi64(top as i64)]
}

/// One word per lane, of 52 bits, times the lane's coefficient.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn add_product(products: &mut Products, word: __m512i, coefficient: &Coefficient) {
    for ([low, high], limb) in products.iter_mut().zip(coefficient) {
        // SAFETY: eight aligned numbers of 64 bits.
        let limb = unsafe { _mm512_load_si512(limb.0.as_ptr().cast()) };
        *low = _mm512_madd52lo_epu64(*low, word, limb);
        *high = _mm512_madd52hi_epu64(*high, word, limb);
    }
}

/// The accumulators of a sum of products, which begins with `start`.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn products(start: Limbs) -> Products {
    let zero = _mm512_setzero_si512();
    [[start[0], start[1]], [zero, start[2]], [zero, zero]]
}

/// Halves of the same weight together.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn total([[low0, high0], [low1, high1], [low2, high2]]: Products) -> Limbs {
    [
        _mm512_add_epi64(low0, high2),
        _mm512_add_epi64(high0, low1),
        _mm512_add_epi64(high1, _mm512_srli_epi64::<SHIFT>(low2)),
    ]
}

/// start + number · factor, the number's limbs of 52 bits at most.
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

/// Hands carries on until limbs have 52, 52 and 23 bits, but for a last carry. Takes limbs below
/// 2^63, one of them at most 2^11.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn carried([low, middle, top]: Limbs) -> Limbs {
    let mask = _mm512_set1_epi64(LOW as i64);
    let low = _mm512_add_epi64(low, _mm512_srli_epi64::<TOP_BITS>(top));
    let top = _mm512_and_si512(top, _mm512_set1_epi64(TOP as i64));
    let middle = _mm512_add_epi64(middle, _mm512_srli_epi64::<BITS>(low));
    let top = _mm512_add_epi64(top, _mm512_srli_epi64::<BITS>(middle));
    [_mm512_and_si512(low, mask), _mm512_and_si512(middle, mask), top]
}

/// Running sums: each lane gets the sum of the lanes up to it.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn summed_up(mut sums: Limbs) -> Limbs {
    let zero = _mm512_setzero_si512();
    for limb in &mut sums {
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<7>(*limb, zero));
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<6>(*limb, zero));
        *limb = _mm512_add_epi64(*limb, _mm512_alignr_epi64::<4>(*limb, zero));
    }
    sums
}

/// The last lane in all.
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

/// The one but for the last lane, which is the other's.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn states(behind: Limbs, ahead: Limbs) -> Limbs {
    const LAST: __mmask8 = 1 << (LANES - 1);
    [
        _mm512_mask_mov_epi64(behind[0], LAST, ahead[0]),
        _mm512_mask_mov_epi64(behind[1], LAST, ahead[1]),
        _mm512_mask_mov_epi64(behind[2], LAST, ahead[2]),
    ]
}

#[repr(align(64))]
struct Keys([BlockKey; LANES]);

/// Numbers below p.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn keys_of(states: Limbs) -> Keys {
    let [low, middle, top] = carried(states);
    let lower = _mm512_or_si512(low, _mm512_slli_epi64::<BITS>(middle));
    let upper = _mm512_add_epi64(
        _mm512_srli_epi64::<{ 64 - BITS }>(middle),
        _mm512_slli_epi64::<{ 2 * BITS - 64 }>(top),
    );
    let (even, odd) = (_mm512_unpacklo_epi64(lower, upper), _mm512_unpackhi_epi64(lower, upper));
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
    // All others are below p: of two million numbers one is not.
    if _mm512_cmpge_epu64_mask(top, _mm512_set1_epi64(TOP as i64)) != 0 {
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

/// Sums of the blocks of so many steps that start there, and what is more, each times a power of r.
/// `None` if a token is too large.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn sum(
    table: &Table,
    more: Limbs,
    tokens: &[TokenId],
    starts: &[usize; LANES],
    steps: usize,
) -> Option<Limbs> {
    assert!(starts[LANES - 1] + steps * STEP <= tokens.len());
    let zero = _mm512_setzero_si512();
    // Two, as each product waits for the one before in the same sum.
    let (mut even, mut odd) = (products(more), [[zero; 2]; 3]);
    let mut bits = zero;
    for (step, coefficients) in table.words.as_chunks::<STEP_WORDS>().0[..steps].iter().enumerate()
    {
        let mut words = [zero; LANES];
        for (words, start) in words.iter_mut().zip(starts) {
            let place = tokens.as_ptr().wrapping_add(start + step * STEP);
            // SAFETY: starts ascend, and from the last on there are as many tokens as all steps
            // read. What is brought near need not be there.
            unsafe {
                *words = _mm512_loadu_si512(place.cast());
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(AHEAD).cast());
            }
        }
        for [one, other] in words.as_chunks().0 {
            // The bits of any of the three.
            bits = _mm512_ternarylogic_epi64::<0b1111_1110>(bits, *one, *other);
        }
        for (words, coefficients) in
            turned(words).as_chunks::<2>().0.iter().zip(coefficients.as_chunks::<2>().0)
        {
            add_product(&mut even, words[0], &coefficients[0]);
            add_product(&mut odd, words[1], &coefficients[1]);
        }
    }
    let small = _mm512_test_epi64_mask(bits, _mm512_set1_epi64(!LOW as i64)) == 0;
    small.then(|| add(total(even), total(odd)))
}

/// Turns a block's words in each vector into one word of all blocks in each: columns to rows.
#[inline]
#[target_feature(enable = "avx512f,avx512ifma")]
fn turned(words: [__m512i; LANES]) -> [__m512i; STEP_WORDS] {
    let [a, b, c, d, e, f, g, h] = words;
    // Two blocks, each second word of both.
    let even = |a, b| _mm512_unpacklo_epi64(a, b);
    let odd = |a, b| _mm512_unpackhi_epi64(a, b);
    // Quarters 0 and 2, or 1 and 3, of both.
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
        let (abcd, efgh) = ([outer(ab, cd), inner(ab, cd)], [outer(ef, gh), inner(ef, gh)]);
        rows[row] = outer(abcd[0], efgh[0]);
        rows[row + 2] = outer(abcd[1], efgh[1]);
        rows[row + 4] = inner(abcd[0], efgh[0]);
        rows[row + 6] = inner(abcd[1], efgh[1]);
    }
    rows
}
