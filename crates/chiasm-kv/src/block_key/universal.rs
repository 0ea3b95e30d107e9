//! A keyed hash of sequences of 64-bit words into 127 bits that needs no vector code to run at the speed of memory.
//!
//! Words are taken 512 at a time. A group is hashed by the sum of coefficient · word modulo p = 2^127 − 1 with one
//! random coefficient per place (multilinear hashing: Carter and Wegman 1979), and the groups by a polynomial in a random
//! point r (as in Poly1305): state · r + group. Two different sequences of at most n groups collide with a chance of at
//! most (n + 1) / p over the choice of the secret, whatever the sequences are, as long as whoever chooses them can't see
//! states.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;

use chiasm_types::TokenId;

/// 2^127 − 1, a prime.
const P: u128 = (1 << 127) - 1;

/// Words per group: more than any block of common size has, and 8 KiB of coefficients.
const GROUP: usize = 512;

/// Bits of tokens of all usual vocabularies, and of words made of two of them. No other tokens are wrong, only slower.
const SMALL_TOKEN: u32 = 25;
const SMALL_WORD: u32 = 32 + SMALL_TOKEN;

/// Words of which sums of products need no carries: with coefficients of 64 and 63 bits, below 2^(57 + 6 + 64).
const SHORT: usize = 64;

/// What whoever chooses prompts must not know.
pub(super) struct Secret {
    /// As low 64 and high 63 bits, uniform below 2^127.
    coefficients: [(u64, u64); GROUP],
    point: u128,
    start: u128,
}

/// One secret per process: keys of two processes don't compare.
static SECRET: LazyLock<Secret> = LazyLock::new(Secret::random);

impl Secret {
    pub(super) fn of_process() -> &'static Self {
        &SECRET
    }

    fn random() -> Self {
        // The standard library's hash maps are keyed with 128 random bits of the operating system.
        let random = RandomState::new();
        let mut reader = blake3::Hasher::new_derive_key("chiasm 2026 secret of block keys")
            .update(&random.hash_one(0_u8).to_le_bytes())
            .update(&random.hash_one(1_u8).to_le_bytes())
            .finalize_xof();
        let mut number = || {
            let mut bytes = [0; 16];
            reader.fill(&mut bytes);
            u128::from_le_bytes(bytes) >> 1
        };
        let (point, start) = (reduce(number()), reduce(number()));
        let coefficients = std::array::from_fn(|_| split(number()));
        Self { coefficients, point, start }
    }

    /// The state before anything is hashed, below 2^127 − 1 as all states.
    pub(super) fn start(&self) -> u128 {
        self.start
    }

    /// Words that come after a head and a body of so many tokens, summed up once for all blocks that have them there. `None`
    /// if they don't fit into the first group.
    pub(super) fn sum_up(&self, tokens: usize, words: &[u64]) -> Option<Summed> {
        let rest = self.coefficients.get(1 + tokens.div_ceil(2)..).filter(|rest| rest.len() >= words.len())?;
        let mut sum = Sum::default();
        rest.iter().zip(words).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        Some(Summed { sum, words: words.len() })
    }

    /// The state after one more sequence: `head`, then `body` two tokens to a word, then what is summed up, then `tail`.
    /// Which words are which must follow from `head`. `None` if they don't fit into one group.
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

    /// As [`Secret::extend_summed`] with nothing summed up, of any length.
    #[inline]
    pub(super) fn extend(&self, state: u128, head: u64, body: &[TokenId], tail: &[u64]) -> u128 {
        if tail.is_empty()
            && let (pairs, []) = body.as_chunks()
            && pairs.len() < SHORT
            && (body.iter().fold(0, |all, token| all | token.0) >> SMALL_TOKEN == 0)
            && head >> SMALL_WORD == 0
        {
            // So many steps as a known number are faster than as many.
            return match <&[_; 8]>::try_from(pairs) {
                Ok(pairs) => self.extend_small(state, head, pairs),
                Err(_) => self.extend_small(state, head, pairs),
            };
        }
        self.extend_any(state, head, body, tail)
    }

    /// By fewer than [`SHORT`] pairs of tokens and a head, all small.
    #[inline(always)]
    fn extend_small(&self, state: u128, head: u64, pairs: &[[TokenId; 2]]) -> u128 {
        let [for_head, rest @ ..] = &self.coefficients;
        // Without carries: so many products of coefficients with small words stay below 2^127 and 2^126.
        let (mut low, mut high) = (product(for_head.0, head), product(for_head.1, head));
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
            self.coefficients.iter().zip(words.by_ref()).for_each(|(coefficient, word)| sum.add(*coefficient, word));
            state = self.next(state, sum);
        }
        state
    }

    /// By one group, in which words are summed up already. Inlined, so that nothing summed up costs nothing.
    #[inline(always)]
    fn extend_once(&self, state: u128, head: u64, body: &[TokenId], summed: (Sum, usize), tail: &[u64]) -> u128 {
        let (pairs, odd) = body.as_chunks();
        let [for_head, rest @ ..] = &self.coefficients;
        let (for_pairs, rest) = rest.split_at(pairs.len());
        let (for_odd, rest) = rest.split_at(odd.len());
        let (mut sum, skipped) = summed;
        sum.add(*for_head, head);
        for_pairs.iter().zip(pairs).for_each(|(coefficient, pair)| sum.add(*coefficient, word(*pair)));
        for_odd.iter().zip(odd).for_each(|(coefficient, token)| sum.add(*coefficient, u64::from(token.0)));
        rest[skipped..].iter().zip(tail).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
        self.next(state, sum)
    }

    fn next(&self, state: u128, sum: Sum) -> u128 {
        multiply_add(state, self.point, sum.reduced())
    }
}

/// Of coefficient · word for a group, not yet reduced: numbers of 192 bits, as a product has up to 128.
#[derive(Clone, Default)]
struct Sum {
    low: u128,
    /// To be multiplied by 2^128.
    low_over: u64,
    /// To be multiplied by 2^64.
    high: u128,
    /// To be multiplied by 2^192. Of another width than `low_over`, lest the compiler put both into one vector register, carry
    /// by carry, which takes longer than the sums.
    high_over: u32,
}

/// Of words with the coefficients of their places.
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
        // 2^127 = 1, so 2^128 = 2, and 2^64 · high = (high >> 63) + 2^64 · (the rest). At most 512 carries.
        let rest = (self.high & ((1 << 63) - 1)) << 64;
        let small = (self.high >> 63) + 2 * u128::from(self.low_over) + (u128::from(self.high_over) << 65);
        add(add(reduce(self.low), reduce(small)), reduce(rest))
    }
}

fn word([first, second]: [TokenId; 2]) -> u64 {
    u64::from(first.0) | u64::from(second.0) << 32
}

fn split(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

fn reduce(number: u128) -> u128 {
    let folded = (number & P) + (number >> 127);
    if folded >= P { folded - P } else { folded }
}

/// Of two numbers below p.
fn add(one: u128, other: u128) -> u128 {
    let sum = one + other;
    if sum >= P { sum - P } else { sum }
}

fn product(one: u64, other: u64) -> u128 {
    u128::from(one) * u128::from(other)
}

/// one · other + low + 2^64 · high, of numbers below p, 2^127 and 2^126.
#[inline(always)]
fn multiply_add_wide(one: u128, other: u128, low: u128, high: u128) -> u128 {
    const HIGH: u64 = (1 << 63) - 1;
    let ((a0, a1), (b0, b1)) = (split(one), split(other));
    // 2^128 = 2, and a1 and b1 are below 2^63: the first sum is below 2^128.
    let (low, over) = product(a0, b0).overflowing_add(low + product(a1, 2 * b1));
    // The products are at most 2^128 − 3 · 2^64 + 2 together; what is added is below 2^65.
    let middle = product(a0, b1) + product(a1, b0) + ((low >> 64) | u128::from(over) << 64);
    // low's lower half + 2^64 · (middle + high), and 2^127 = 1.
    let (lower, upper) = (low as u64, (middle as u64 & HIGH, high as u64 & HIGH));
    let sum = (u128::from(lower) | u128::from(upper.0) << 64) + (u128::from(upper.1) << 64);
    // The last two are below 2^65 and 2^63.
    reduce((sum & P) + (sum >> 127) + (middle >> 63) + (high >> 63))
}

/// Of one factor that is at most 2^127 and two numbers below p. Each block's state waits for that of the block before, so
/// this reduces by halves and to the end only once.
fn multiply_add(one: u128, other: u128, more: u128) -> u128 {
    let ((a0, a1), (b0, b1)) = (split(one), split(other));
    // Leaves at most 2^127 of a number below 2^128.
    let fold = |number: u128| (number & P) + (number >> 127);
    let low = product(a0, b0);
    // Each below 2^127, as a1 is at most 2^63 and b1 below it: the sum fits.
    let middle = product(a0, b1) + product(a1, b0);
    // Below 2^126.
    let high = product(a1, b1);
    // low + 2^64 · middle + 2^128 · high, and 2^127 = 1.
    let shifted = (middle & ((1 << 63) - 1)) << 64;
    // What is folded is below 2^128 each time: two numbers below 2^127, of which one is folded already.
    let sum = fold(fold((low & P) + shifted) + more);
    let rest = fold((low >> 127) + (middle >> 63) + 2 * high);
    reduce(sum + rest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// By doubling and adding.
    fn slow(mut one: u128, other: u128) -> u128 {
        let mut sum = 0;
        for bit in 0..127 {
            if other >> bit & 1 == 1 {
                sum = add(sum, reduce(one));
            }
            one = add(reduce(one), reduce(one));
        }
        sum
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_field(one in 0..=P + 1, other in 0..P, more in 0..P) {
            prop_assert_eq!(multiply_add(one, other, more), add(slow(one, other), more));
        }

        #[test]
        fn wide_sums_are_those_of_the_field(
            one in 0..P,
            other in 0..P,
            low in 0..1_u128 << 127,
            high in 0..1_u128 << 126,
        ) {
            let expected = add(add(slow(one, other), reduce(low)), slow(high, 1 << 64));
            prop_assert_eq!(multiply_add_wide(one, other, low, high), expected);
        }

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

    #[test]
    fn the_ends_of_the_field() {
        let ends = [0, 1, 2, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 126, P - (1 << 64), P - 2, P - 1];
        for one in ends.into_iter().chain([P, P + 1]) {
            for other in ends {
                for more in ends {
                    let expected = add(slow(one, other), more);
                    assert_eq!(multiply_add(one, other, more), expected, "{one:x} · {other:x} + {more:x}");
                    if one < P {
                        for high in [0, (1 << 126) - 1, (1 << 64) - 1] {
                            let expected = add(expected, slow(high, 1 << 64));
                            let found = multiply_add_wide(one, other, more, high);
                            assert_eq!(found, expected, "{one:x} · {other:x} + {more:x} + {high:x}");
                        }
                        let expected = add(slow(one, other), slow((1 << 126) - 1, 1 << 64));
                        assert_eq!(multiply_add_wide(one, other, P, (1 << 126) - 1), expected);
                    }
                }
            }
        }
    }
}
