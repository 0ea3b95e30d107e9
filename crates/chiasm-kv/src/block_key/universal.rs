//! A keyed hash of sequences of 64-bit words into 127 bits.
//!
//! Words are taken 512 at a time. A group is hashed by the sum of coefficient · word modulo p =
//! 2^127 − 1 with one random coefficient per place (multilinear hashing: Carter and Wegman 1979),
//! and the groups by a polynomial in a random point r (as in Poly1305): state · r + group. Two
//! different sequences of at most n groups collide with a chance of at most (n + 1) / p over the
//! choice of the secret, whatever the sequences are, as long as whoever chooses them can't see
//! states.

use std::sync::LazyLock;

use chiasm_types::TokenId;

use super::BlockKey;
use super::KeySecret;
use super::field::{P, add, multiply_add, multiply_add_wide, product, reduce, split};
use super::kernels::{Kernel, Series, Tables, WORDS};

/// Words per group: more than any block of common size has, and 8 KiB of coefficients.
const GROUP: usize = 512;

/// Bits of tokens of all usual vocabularies, and of words made of two of them. No other tokens are
/// wrong, only slower.
const SMALL_TOKEN: u32 = 25;
const SMALL_WORD: u32 = 32 + SMALL_TOKEN;

/// Words of which sums of products need no carries: with coefficients of 64 and 63 bits, below
/// 2^(57 + 6 + 64).
const SHORT: usize = 64;

/// Tokens that are brought near at a time, unless a block has more: 8 KiB.
const AHEAD: usize = 2048;

/// Looks at each cache line: so the memory works on many at a time, not on those of the next few
/// blocks.
fn bring_near(tokens: &[TokenId]) {
    for line in tokens.chunks(16) {
        std::hint::black_box(line.first().map(|token| token.0));
    }
}

/// Blocks from which on a kernel is faster than one after the other, measured with 16 to 128 tokens
/// a block.
const WORTH: usize = 4;

/// Blocks that are hashed one by one where a kernel stopped, before it is tried again.
const FEW: usize = 8;

/// What whoever chooses prompts must not know.
pub(super) struct Secret {
    /// Coefficients as low 64 and high 63 bits, uniform below 2^127.
    coefficients: [(u64, u64); GROUP],
    /// Not 0: vector code divides by it.
    point: u128,
    start: u128,
    tables: Tables,
}

static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::of(KeySecret::of_process()));

impl Secret {
    pub(super) fn of_process() -> &'static Self {
        &SECRET
    }

    #[cfg(test)]
    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    fn of(secret: &KeySecret) -> Self {
        let mut reader = secret.derive("chiasm 2026 coefficients of block keys", b"");
        let mut number = || {
            let mut bytes = [0; 16];
            reader.fill(&mut bytes);
            u128::from_le_bytes(bytes) >> 1
        };
        let start = reduce(number());
        let coefficients: [_; GROUP] = std::array::from_fn(|_| split(number()));
        let mut point = 0;
        while point == 0 {
            point = reduce(number());
        }
        // The first is the head's.
        let of_tokens = std::array::from_fn(|word| reduce(whole(coefficients[1 + word])));
        Self { coefficients, point, start, tables: Tables::new(&of_tokens, point) }
    }

    /// The state before anything is hashed, below 2^127 − 1 as all states.
    pub(super) fn start(&self) -> u128 {
        self.start
    }

    /// Words that come after a head and a body of so many tokens, summed up once for all blocks
    /// that have them there. `None` if they don't fit into the first group.
    pub(super) fn sum_up(&self, tokens: usize, words: &[u64]) -> Option<Summed> {
        let rest = self
            .coefficients
            .get(1 + tokens.div_ceil(2)..)
            .filter(|rest| rest.len() >= words.len())?;
        let mut sum = Sum::default();
        rest.iter().zip(words).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        Some(Summed { sum, words: words.len() })
    }

    /// The state after one more sequence: `head`, then `body` two tokens to a word, then what is
    /// summed up, then `tail`. Which words are which must follow from `head`. `None` if they don't
    /// fit into one group.
    pub(super) fn extend_summed(
        &self,
        state: u128,
        head: u64,
        body: &[TokenId],
        summed: &Summed,
        tail: &[u64],
    ) -> Option<u128> {
        let fits = 1 + body.len().div_ceil(2) + summed.words + tail.len() <= GROUP;
        fits.then(|| self.extend_once(state, head, body, (summed.sum.clone(), summed.words), tail))
    }

    /// What a head and the words after a body of so many tokens add to a sum; below p. `None` if
    /// they don't fit into the first group.
    pub(super) fn sum_around(&self, head: u64, tokens: usize, words: &[u64]) -> Option<u128> {
        let Summed { mut sum, .. } = self.sum_up(tokens, words)?;
        sum.add(self.coefficients[0], head);
        Some(sum.reduced())
    }

    /// What a sum grows by when the word at this place after a body of so many tokens falls by
    /// `fall`; below p. `None` if it is not in the first group.
    pub(super) fn growth(&self, tokens: usize, place: usize, fall: usize) -> Option<u128> {
        let coefficient = self.coefficients.get(1 + tokens.div_ceil(2) + place)?;
        Some(reduce(P - multiply_add(reduce(whole(*coefficient)), fall as u128, 0)))
    }

    /// Appends the keys of a series, of as many blocks as it can by the kernel.
    pub(super) fn extend_series(
        &self,
        kernel: Option<Kernel>,
        mut series: Series<'_>,
        keys: &mut Vec<BlockKey>,
    ) {
        let worth = WORTH * series.block_size..;
        let Some(kernel) = kernel
            .filter(|_| series.block_size <= 2 * WORDS && worth.contains(&series.tokens.len()))
        else {
            return self.extend_each(&series, keys);
        };
        while !series.tokens.is_empty() {
            let known = keys.len();
            kernel.extend(&self.tables, &series, keys);
            series.skip(&keys[known..]);
            // It stopped at large tokens, if at all.
            let known = keys.len();
            let few = series.tokens.len().min(FEW * series.block_size);
            self.extend_each(&Series { tokens: &series.tokens[..few], ..series }, keys);
            series.skip(&keys[known..]);
        }
    }

    /// Appends the keys of a series one after the other: the reference of all kernels. Each block
    /// and what is around its tokens fit into one group.
    pub(super) fn extend_each(&self, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
        let (mut state, mut more) = (series.state, series.first);
        for near in series.tokens.chunks((AHEAD / series.block_size).max(1) * series.block_size) {
            bring_near(near);
            for tokens in near.chunks_exact(series.block_size) {
                state = match small(tokens) {
                    Some(pairs) => self.extend_small(state, more.into(), pairs),
                    None => {
                        let mut sum = Sum::default();
                        self.sum_tokens(&mut sum, tokens);
                        multiply_add(state, self.point, add(sum.reduced(), more))
                    }
                };
                keys.push(BlockKey(state));
                more = add(more, series.step);
            }
        }
    }

    /// Does what [`Secret::extend_summed`] does for a body of any length of which nothing is summed
    /// up.
    #[inline]
    pub(super) fn extend(&self, state: u128, head: u64, body: &[TokenId], tail: &[u64]) -> u128 {
        if let (true, true, Some(pairs)) = (tail.is_empty(), head >> SMALL_WORD == 0, small(body)) {
            let [for_head, ..] = &self.coefficients;
            let before = Halves { low: product(for_head.0, head), high: product(for_head.1, head) };
            // So many steps as a known number are faster than as many.
            return match <&[_; 8]>::try_from(pairs) {
                Ok(pairs) => self.extend_small(state, before, pairs),
                Err(_) => self.extend_small(state, before, pairs),
            };
        }
        self.extend_any(state, head, body, tail)
    }

    /// Extends the state by fewer than [`SHORT`] pairs of small tokens, and by what is summed up
    /// before: at most the product of a small word.
    #[inline(always)]
    fn extend_small(&self, state: u128, before: Halves, pairs: &[[TokenId; 2]]) -> u128 {
        let [_, rest @ ..] = &self.coefficients;
        // Without carries: so many products of coefficients with small words stay below 2^127 and
        // 2^126.
        let Halves { mut low, mut high } = before;
        for (coefficient, pair) in rest[..pairs.len()].iter().zip(pairs) {
            let word = word(*pair);
            low += product(coefficient.0, word);
            high += product(coefficient.1, word);
        }
        multiply_add_wide(state, self.point, low, high)
    }

    #[inline(never)]
    fn extend_any(&self, state: u128, head: u64, body: &[TokenId], tail: &[u64]) -> u128 {
        if 1 + body.len().div_ceil(2) + tail.len() <= GROUP {
            return self.extend_once(state, head, body, (Sum::default(), 0), tail);
        }
        let (pairs, odd) = body.as_chunks();
        let last = odd.first().map(|token| u64::from(token.0));
        let mut state = state;
        let body = pairs.iter().map(|pair| word(*pair)).chain(last);
        let mut words = [head].into_iter().chain(body).chain(tail.iter().copied()).peekable();
        while words.peek().is_some() {
            let mut sum = Sum::default();
            self.coefficients
                .iter()
                .zip(words.by_ref())
                .for_each(|(coefficient, word)| sum.add(*coefficient, word));
            state = self.next(state, sum);
        }
        state
    }

    /// Extends the state by one group, in which words are summed up already. Inlined, so that
    /// nothing summed up costs nothing.
    #[inline(always)]
    fn extend_once(
        &self,
        state: u128,
        head: u64,
        body: &[TokenId],
        summed: (Sum, usize),
        tail: &[u64],
    ) -> u128 {
        let (mut sum, skipped) = summed;
        let rest = self.sum_tokens(&mut sum, body);
        sum.add(self.coefficients[0], head);
        rest[skipped..]
            .iter()
            .zip(tail)
            .for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        self.next(state, sum)
    }

    /// Adds the words of tokens, and returns the coefficients of what comes after them.
    #[inline(always)]
    fn sum_tokens(&self, sum: &mut Sum, tokens: &[TokenId]) -> &[(u64, u64)] {
        let (pairs, odd) = tokens.as_chunks();
        let [_, rest @ ..] = &self.coefficients;
        let (for_pairs, rest) = rest.split_at(pairs.len());
        let (for_odd, rest) = rest.split_at(odd.len());
        for_pairs
            .iter()
            .zip(pairs)
            .for_each(|(coefficient, pair)| sum.add(*coefficient, word(*pair)));
        for_odd
            .iter()
            .zip(odd)
            .for_each(|(coefficient, token)| sum.add(*coefficient, u64::from(token.0)));
        rest
    }

    fn next(&self, state: u128, sum: Sum) -> u128 {
        multiply_add(state, self.point, sum.reduced())
    }
}

/// A group's sum of coefficient · word, not yet reduced: numbers of 192 bits, as a product has up
/// to 128.
#[derive(Clone, Default)]
struct Sum {
    low: u128,
    /// Counts 2^128.
    low_over: u64,
    /// Counts 2^64.
    high: u128,
    /// Counts 2^192. Its width is another than that of `low_over`, lest the compiler put both into
    /// one vector register, carry by carry, which takes longer than the sums.
    high_over: u32,
}

/// The sum of some words of a group with the coefficients of their places.
#[derive(Default)]
pub(super) struct Summed {
    sum: Sum,
    words: usize,
}

impl Sum {
    fn add(&mut self, (low, high): (u64, u64), word: u64) {
        let (sum, over) = self.low.overflowing_add(u128::from(low) * u128::from(word));
        (self.low, self.low_over) = (sum, self.low_over + u64::from(over));
        let (sum, over) = self.high.overflowing_add(u128::from(high) * u128::from(word));
        (self.high, self.high_over) = (sum, self.high_over + u32::from(over));
    }

    fn reduced(&self) -> u128 {
        // 2^127 = 1, so 2^128 = 2, and 2^64 · high = (high >> 63) + 2^64 · (the rest). At most 512
        // carries.
        let rest = (self.high & ((1 << 63) - 1)) << 64;
        let small =
            (self.high >> 63) + 2 * u128::from(self.low_over) + (u128::from(self.high_over) << 65);
        add(add(reduce(self.low), reduce(small)), reduce(rest))
    }
}

/// Low 64 and high 63 bits of a number; or sums of products with those of coefficients.
struct Halves {
    low: u128,
    high: u128,
}

impl From<u128> for Halves {
    fn from(number: u128) -> Self {
        let (low, high) = split(number);
        Self { low: low.into(), high: high.into() }
    }
}

/// Pairs of tokens, if there are fewer than [`SHORT`] and all tokens are small.
#[inline(always)]
fn small(tokens: &[TokenId]) -> Option<&[[TokenId; 2]]> {
    match tokens.as_chunks() {
        (pairs, []) if pairs.len() < SHORT => {
            (tokens.iter().fold(0, |all, token| all | token.0) >> SMALL_TOKEN == 0).then_some(pairs)
        }
        _ => None,
    }
}

fn whole((low, high): (u64, u64)) -> u128 {
    u128::from(low) | u128::from(high) << 64
}

fn word([first, second]: [TokenId; 2]) -> u64 {
    u64::from(first.0) | u64::from(second.0) << 32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block_key::field::tests::slow;

    proptest! {
        #[test]
        fn extending_follows_the_formula(
            head in any::<u64>(),
            tokens in prop_oneof![
                proptest::collection::vec(prop_oneof![any::<u32>(), Just(u32::MAX)], 0..1500),
                proptest::collection::vec(prop_oneof![0..1_u32 << 25, Just((1 << 25) - 1)], 0..150),
            ],
            tail in proptest::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX)], 0..600),
        ) {
            let secret = Secret::of_process();
            let body: Vec<_> = tokens.iter().copied().map(TokenId).collect();
            let pairs = tokens.chunks(2).map(|pair| pair.iter().rev().fold(0, |word, token| word << 32 | u64::from(*token)));
            let all: Vec<u64> = [head].into_iter().chain(pairs).chain(tail.iter().copied()).collect();
            let expected = all.chunks(GROUP).fold(secret.start(), |state, group| {
                let sum = group.iter().zip(&secret.coefficients).fold(0, |sum, (word, (a, b))| {
                    add(sum, slow(u128::from(*a) | u128::from(*b) << 64, u128::from(*word)))
                });
                add(slow(state, secret.point), sum)
            });
            prop_assert_eq!(secret.extend(secret.start(), head, &body, &tail), expected);
            let (known, rest) = tail.split_at(tail.len().min(4));
            let summed = secret.sum_up(body.len(), known);
            let found = summed.and_then(|summed| secret.extend_summed(secret.start(), head, &body, &summed, rest));
            prop_assert_eq!(found, (all.len() <= GROUP).then_some(expected));
        }
    }
}
