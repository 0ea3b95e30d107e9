//! A keyed hash of sequences of 64-bit words into 127 bits.
//!
//! Words are hashed in groups of 512. The hash of a group is the sum of coefficient · word modulo
//! p = 2^127 − 1, with one random coefficient per position (multilinear hashing: Carter and Wegman
//! 1979). Groups are combined by a polynomial in a random point r, as in Poly1305: the next state
//! is state · r + group.
//!
//! Two different sequences of at most n groups collide with a probability of at most (n + 1) / p
//! over the choice of the secret. This holds for all sequences, as long as whoever chooses them
//! can't see states.

use std::sync::LazyLock;

use chiasm_types::TokenId;

use super::BlockKey;
use super::KeySecret;
use super::field::{P, add, multiply_add, multiply_add_wide, product, reduce, split};
use super::kernels::{Kernel, MAX_BLOCK_WORDS, Series, Tables};

/// The number of words per group: more than any block of a common size has. The coefficients take
/// 8 KiB.
const GROUP_WORDS: usize = 512;

/// The number of bits of a small token. All usual vocabularies have small tokens only. Larger
/// tokens are hashed correctly, but more slowly.
const SMALL_TOKEN_BITS: u32 = 25;

/// The number of bits of a word of two small tokens.
const SMALL_WORD_BITS: u32 = 32 + SMALL_TOKEN_BITS;

/// The number of small words whose products can be summed without carries: with coefficients of 64
/// and 63 bits, the sums stay below 2^(57 + 6 + 64).
const CARRY_FREE_WORDS: usize = 64;

/// The number of tokens to prefetch at a time, unless a block has more: 8 KiB.
const PREFETCH_TOKENS: usize = 2048;

/// Reads each cache line of `tokens`, so that the loads overlap instead of waiting for each block.
fn prefetch(tokens: &[TokenId]) {
    for line in tokens.chunks(16) {
        std::hint::black_box(line.first().map(|token| token.0));
    }
}

/// The number of blocks from which a kernel is faster than scalar code, measured with 16 to 128
/// tokens per block.
const MIN_KERNEL_BLOCKS: usize = 4;

/// The number of blocks hashed by scalar code after a kernel stopped, before it is tried again.
const SCALAR_RETRY_BLOCKS: usize = 8;

/// The random parameters of the hash, which clients must not know.
pub(super) struct Secret {
    /// The coefficients as low 64 and high 63 bits, uniform below 2^127.
    coefficients: [(u64, u64); GROUP_WORDS],
    /// The point r. It is not 0, because vector code divides by it.
    point: u128,
    start: u128,
    tables: Tables,
}

static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::derive_from(KeySecret::for_process()));

impl Secret {
    /// Returns the parameters derived from the secret of this process.
    pub(super) fn for_process() -> &'static Self {
        &SECRET
    }

    #[cfg(test)]
    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    fn derive_from(secret: &KeySecret) -> Self {
        let mut reader = secret.derive("chiasm 2026 coefficients of block keys", b"");
        let mut number = || {
            let mut bytes = [0; 16];
            reader.fill(&mut bytes);
            u128::from_le_bytes(bytes) >> 1
        };
        let start = reduce(number());
        let coefficients: [_; GROUP_WORDS] = std::array::from_fn(|_| split(number()));
        let mut point = 0;
        while point == 0 {
            point = reduce(number());
        }
        // The first coefficient belongs to the head.
        let token_coefficients = std::array::from_fn(|word| reduce(whole(coefficients[1 + word])));
        Self { coefficients, point, start, tables: Tables::new(&token_coefficients, point) }
    }

    /// Returns the initial state. Like all states, it is below p.
    pub(super) fn start(&self) -> u128 {
        self.start
    }

    /// Returns the partial sum of `words` that follow a head and a body of `tokens` tokens. Blocks
    /// that share these words share the partial sum.
    ///
    /// Returns `None` if the words don't fit into the first group.
    pub(super) fn partial_sum(&self, tokens: usize, words: &[u64]) -> Option<PartialSum> {
        let rest = self
            .coefficients
            .get(1 + tokens.div_ceil(2)..)
            .filter(|rest| rest.len() >= words.len())?;
        let mut sum = Sum::default();
        rest.iter().zip(words).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        Some(PartialSum { sum, words: words.len() })
    }

    /// Returns the state after one more sequence: `head`, `body` with two tokens per word, the
    /// words of `partial`, `tail`. `head` must determine the lengths of these parts.
    ///
    /// Returns `None` if the sequence does not fit into one group.
    pub(super) fn extend_with_sum(
        &self,
        state: u128,
        head: u64,
        body: &[TokenId],
        partial: &PartialSum,
        tail: &[u64],
    ) -> Option<u128> {
        let fits = 1 + body.len().div_ceil(2) + partial.words + tail.len() <= GROUP_WORDS;
        fits.then(|| self.extend_once(state, head, body, partial.clone(), tail))
    }

    /// Returns the share of a group's sum that a head and the `words` after a body of `tokens`
    /// tokens have; below p.
    ///
    /// Returns `None` if they don't fit into the first group.
    pub(super) fn sum_around(&self, head: u64, tokens: usize, words: &[u64]) -> Option<u128> {
        let PartialSum { mut sum, .. } = self.partial_sum(tokens, words)?;
        sum.add(self.coefficients[0], head);
        Some(sum.reduced())
    }

    /// Returns the growth of a group's sum when the word at `index` after a body of `tokens` tokens
    /// falls by `fall`; below p.
    ///
    /// Returns `None` if that word is not in the first group.
    pub(super) fn growth(&self, tokens: usize, index: usize, fall: usize) -> Option<u128> {
        let coefficient = self.coefficients.get(1 + tokens.div_ceil(2) + index)?;
        Some(reduce(P - multiply_add(reduce(whole(*coefficient)), fall as u128, 0)))
    }

    /// Appends the keys of a series. Uses the kernel for as many blocks as it accepts.
    pub(super) fn extend_series(
        &self,
        kernel: Option<Kernel>,
        mut series: Series<'_>,
        keys: &mut Vec<BlockKey>,
    ) {
        let is_worthwhile = series.block_size <= 2 * MAX_BLOCK_WORDS
            && series.tokens.len() >= MIN_KERNEL_BLOCKS * series.block_size;
        let Some(kernel) = kernel.filter(|_| is_worthwhile) else {
            return self.extend_each(&series, keys);
        };
        while !series.tokens.is_empty() {
            let known = keys.len();
            kernel.extend(&self.tables, &series, keys);
            series.skip(&keys[known..]);
            // If the kernel stopped early, it met large tokens.
            let known = keys.len();
            let scalar = series.tokens.len().min(SCALAR_RETRY_BLOCKS * series.block_size);
            self.extend_each(&Series { tokens: &series.tokens[..scalar], ..series }, keys);
            series.skip(&keys[known..]);
        }
    }

    /// Appends the keys of a series block by block: the scalar reference of all kernels.
    ///
    /// Each block, including the words around its tokens, must fit into one group.
    pub(super) fn extend_each(&self, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
        let mut state = series.state;
        let mut extra = series.extra_sum;
        let prefetch_blocks = (PREFETCH_TOKENS / series.block_size).max(1);
        for chunk in series.tokens.chunks(prefetch_blocks * series.block_size) {
            prefetch(chunk);
            for tokens in chunk.chunks_exact(series.block_size) {
                state = match small_pairs(tokens) {
                    Some(pairs) => self.extend_small(state, extra.into(), pairs),
                    None => {
                        let mut sum = Sum::default();
                        self.sum_tokens(&mut sum, tokens);
                        multiply_add(state, self.point, add(sum.reduced(), extra))
                    }
                };
                keys.push(BlockKey(state));
                extra = add(extra, series.extra_step);
            }
        }
    }

    /// Returns the state after one more sequence, like [`Secret::extend_with_sum`], but without a
    /// partial sum and for a sequence of any length.
    #[inline]
    pub(super) fn extend(&self, state: u128, head: u64, body: &[TokenId], tail: &[u64]) -> u128 {
        if tail.is_empty()
            && head >> SMALL_WORD_BITS == 0
            && let Some(pairs) = small_pairs(body)
        {
            let [for_head, ..] = &self.coefficients;
            let before = Halves { low: product(for_head.0, head), high: product(for_head.1, head) };
            // A loop of constant length is faster than one of the same variable length.
            return match <&[_; 8]>::try_from(pairs) {
                Ok(pairs) => self.extend_small(state, before, pairs),
                Err(_) => self.extend_small(state, before, pairs),
            };
        }
        self.extend_any(state, head, body, tail)
    }

    /// Returns the state after fewer than [`CARRY_FREE_WORDS`] pairs of small tokens. `before` is
    /// the sum so far: at most the product of one small word.
    #[inline(always)]
    fn extend_small(&self, state: u128, before: Halves, pairs: &[[TokenId; 2]]) -> u128 {
        let [_, rest @ ..] = &self.coefficients;
        // No carries: the sums of so few products with small words stay below 2^127 and 2^126.
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
        if 1 + body.len().div_ceil(2) + tail.len() <= GROUP_WORDS {
            return self.extend_once(state, head, body, PartialSum::default(), tail);
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

    /// Returns the state after one group, of which `partial` is already summed up. Inlined, so that
    /// an empty partial sum is free.
    #[inline(always)]
    fn extend_once(
        &self,
        state: u128,
        head: u64,
        body: &[TokenId],
        partial: PartialSum,
        tail: &[u64],
    ) -> u128 {
        let PartialSum { mut sum, words: skipped } = partial;
        let rest = self.sum_tokens(&mut sum, body);
        sum.add(self.coefficients[0], head);
        rest[skipped..]
            .iter()
            .zip(tail)
            .for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        self.next(state, sum)
    }

    /// Adds the words of `tokens` to `sum` and returns the coefficients of the words after them.
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

/// An unreduced sum of coefficient · word over a group. A product has up to 128 bits, so the sums
/// of low and of high products have up to 192 bits each.
#[derive(Clone, Default)]
struct Sum {
    low: u128,
    /// The number of carries out of `low`, in units of 2^128.
    low_over: u64,
    /// The sum of high products, in units of 2^64.
    high: u128,
    /// The number of carries out of `high`, in units of 2^192. Its type differs from that of
    /// `low_over` on purpose: with equal types the compiler moves both into one vector register for
    /// each carry, which takes longer than the sums.
    high_over: u32,
}

/// The sum of some words of a group with the coefficients of their positions.
#[derive(Clone, Default)]
pub(super) struct PartialSum {
    sum: Sum,
    words: usize,
}

impl Sum {
    fn add(&mut self, (low, high): (u64, u64), word: u64) {
        let (sum, over) = self.low.overflowing_add(u128::from(low) * u128::from(word));
        self.low = sum;
        self.low_over += u64::from(over);
        let (sum, over) = self.high.overflowing_add(u128::from(high) * u128::from(word));
        self.high = sum;
        self.high_over += u32::from(over);
    }

    fn reduced(&self) -> u128 {
        // 2^127 = 1, so 2^128 = 2, and 2^64 · high = (high >> 63) + 2^64 · rest. There are at most
        // 512 carries.
        let rest = (self.high & ((1 << 63) - 1)) << 64;
        let small =
            (self.high >> 63) + 2 * u128::from(self.low_over) + (u128::from(self.high_over) << 65);
        add(add(reduce(self.low), reduce(small)), reduce(rest))
    }
}

/// The low 64 and high 63 bits of a number, or sums of products with these parts of coefficients.
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

/// Returns the tokens as pairs if there are fewer than [`CARRY_FREE_WORDS`] pairs, no odd token,
/// and all tokens are small.
#[inline(always)]
fn small_pairs(tokens: &[TokenId]) -> Option<&[[TokenId; 2]]> {
    match tokens.as_chunks() {
        (pairs, []) if pairs.len() < CARRY_FREE_WORDS => {
            let bits = tokens.iter().fold(0, |bits, token| bits | token.0);
            (bits >> SMALL_TOKEN_BITS == 0).then_some(pairs)
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
    use crate::block_key::field::tests::slow_product;

    proptest! {
        #[test]
        fn extend_equals_slow_formula(
            head in any::<u64>(),
            tokens in prop_oneof![
                proptest::collection::vec(prop_oneof![any::<u32>(), Just(u32::MAX)], 0..1500),
                proptest::collection::vec(prop_oneof![0..1_u32 << 25, Just((1 << 25) - 1)], 0..150),
            ],
            tail in proptest::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX)], 0..600),
        ) {
            let secret = Secret::for_process();
            let body: Vec<_> = tokens.iter().copied().map(TokenId).collect();
            let pairs = tokens.chunks(2).map(|pair| {
                pair.iter().rev().fold(0, |word, token| word << 32 | u64::from(*token))
            });
            let all: Vec<u64> =
                [head].into_iter().chain(pairs).chain(tail.iter().copied()).collect();
            let expected = all.chunks(GROUP_WORDS).fold(secret.start(), |state, group| {
                let sum = group.iter().zip(&secret.coefficients).fold(0, |sum, (word, (a, b))| {
                    add(sum, slow_product(whole((*a, *b)), u128::from(*word)))
                });
                add(slow_product(state, secret.point), sum)
            });
            prop_assert_eq!(secret.extend(secret.start(), head, &body, &tail), expected);
            let (known, rest) = tail.split_at(tail.len().min(4));
            let partial = secret.partial_sum(body.len(), known);
            let found = partial.and_then(|partial| {
                secret.extend_with_sum(secret.start(), head, &body, &partial, rest)
            });
            prop_assert_eq!(found, (all.len() <= GROUP_WORDS).then_some(expected));
        }
    }
}
