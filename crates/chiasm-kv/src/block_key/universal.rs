//! A keyed hash of sequences of 32-bit words into 127 bits that needs no vector code to run at the speed of memory.
//!
//! Words are taken in pairs, 256 pairs at a time. A group is hashed by the sum of coefficient · pair modulo p = 2^127 − 1
//! with one random coefficient per place (multilinear hashing: Carter and Wegman 1979), and the groups by a polynomial in a
//! random point r (as in Poly1305): state · r + group. Two different sequences of at most n groups collide with a chance of
//! at most (n + 1) / p over the choice of the secret, whatever the sequences are, as long as whoever chooses them can't see
//! states.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;

use chiasm_types::TokenId;

/// 2^127 − 1, a prime.
const P: u128 = (1 << 127) - 1;

/// Pairs per group: more than any block of common size has, and 4 KiB of coefficients.
const GROUP: usize = 256;

/// The lowest 63 bits.
const LOW_63: u128 = (1 << 63) - 1;

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

    /// The state after one more sequence: `head`, then `body`, then `tail`. How many words are in which must follow from the
    /// words of `head`.
    pub(super) fn extend(&self, state: u128, head: [u32; 2], body: &[TokenId], tail: &[u64]) -> u128 {
        let (pairs, last) = body.as_chunks();
        let last = last.first().map(|token| u64::from(token.0));
        let head = pair(head[0], head[1]);
        if 1 + pairs.len() + usize::from(last.is_some()) + tail.len() <= GROUP {
            let (for_pairs, rest) = self.coefficients[1..].split_at(pairs.len());
            let mut sum = Sum::default();
            sum.add(self.coefficients[0], head);
            for_pairs.iter().zip(pairs).for_each(|(coefficient, [one, other])| {
                sum.add(*coefficient, pair(one.0, other.0));
            });
            rest.iter().zip(last.iter().chain(tail)).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
            return self.next(state, sum);
        }
        let mut state = state;
        let pairs = pairs.iter().map(|[one, other]| pair(one.0, other.0));
        let mut words = [head].into_iter().chain(pairs).chain(last).chain(tail.iter().copied()).peekable();
        while words.peek().is_some() {
            let mut sum = Sum::default();
            self.coefficients.iter().zip(words.by_ref()).for_each(|(coefficient, word)| sum.add(*coefficient, word));
            state = self.next(state, sum);
        }
        state
    }

    /// state · r + sum, below p.
    fn next(&self, state: u128, sum: Sum) -> u128 {
        let sum = fold(multiply(state, self.point) + sum.folded());
        if sum >= P { sum - P } else { sum }
    }
}

/// Of coefficient · pair for a group, not yet reduced: 128 bits each and what they overflowed.
#[derive(Default)]
struct Sum {
    low: u128,
    low_carry: u64,
    /// To be multiplied by 2^64.
    high: u128,
    high_carry: u64,
}

impl Sum {
    #[inline(always)]
    fn add(&mut self, (low, high): (u64, u64), word: u64) {
        let (sum, carry) = self.low.overflowing_add(u128::from(low) * u128::from(word));
        (self.low, self.low_carry) = (sum, self.low_carry + u64::from(carry));
        let (sum, carry) = self.high.overflowing_add(u128::from(high) * u128::from(word));
        (self.high, self.high_carry) = (sum, self.high_carry + u64::from(carry));
    }

    /// Below 2^127.
    fn folded(&self) -> u128 {
        // low + 2^128 · low_carry + 2^64 · high + 2^192 · high_carry, and 2^127 = 1.
        let most = fold(fold(self.low) + ((self.high & LOW_63) << 64));
        fold(most + (self.high >> 63) + 2 * u128::from(self.low_carry) + (u128::from(self.high_carry) << 65))
    }
}

fn pair(one: u32, other: u32) -> u64 {
    u64::from(one) | u64::from(other) << 32
}

fn split(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

/// The same modulo p, at most 2^127; below 2^127 if the number is below 2^127 + 2^126.
fn fold(number: u128) -> u128 {
    (number & P) + (number >> 127)
}

fn reduce(number: u128) -> u128 {
    let folded = fold(number);
    if folded >= P { folded - P } else { folded }
}

/// Of two numbers below 2^127; the product modulo p, at most 2^127.
fn multiply(one: u128, other: u128) -> u128 {
    let ((a0, a1), (b0, b1)) = (split(one), split(other));
    let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
    // Each of the two below 2^127, as a1 and b1 are below 2^63: the sum fits.
    let middle = product(a0, b1) + product(a1, b0);
    // low + 2^64 · middle + 2^128 · high, and 2^128 = 2. At most 2^127 + 2^127 − 2^64: fits.
    let first = fold(product(a0, b0)) + ((middle & LOW_63) << 64);
    // Below 2^127 + 2^65.
    let second = 2 * product(a1, b1) + (middle >> 63);
    fold(fold(first) + fold(second))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn add(one: u128, other: u128) -> u128 {
        reduce(reduce(one) + reduce(other))
    }

    /// By doubling and adding.
    fn slow(mut one: u128, other: u128) -> u128 {
        let mut sum = 0;
        for bit in 0..127 {
            if other >> bit & 1 == 1 {
                sum = add(sum, one);
            }
            one = add(one, one);
        }
        sum
    }

    /// The formula, step by step.
    fn expected(secret: &Secret, words: &[u64]) -> u128 {
        words.chunks(GROUP).fold(secret.start(), |state, group| {
            let sum = group.iter().zip(&secret.coefficients).fold(0, |sum, (word, (a, b))| {
                add(sum, slow(u128::from(*a) | u128::from(*b) << 64, u128::from(*word)))
            });
            add(slow(state, secret.point), sum)
        })
    }

    fn extended(secret: &Secret, body: &[u32], tail: &[u64]) -> (u128, u128) {
        let tokens: Vec<_> = body.iter().copied().map(TokenId).collect();
        let pairs = body.chunks(2).map(|two| pair(two[0], two.get(1).copied().unwrap_or(0)));
        let words: Vec<u64> = [pair(3, 4)].into_iter().chain(pairs).chain(tail.iter().copied()).collect();
        (secret.extend(secret.start(), [3, 4], &tokens, tail), expected(secret, &words))
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_field(one in 0..=P, other in 0..=P) {
            prop_assert_eq!(reduce(multiply(one, other)), slow(one, other));
        }

        #[test]
        fn extending_follows_the_formula(
            body in proptest::collection::vec(any::<u32>(), 0..800),
            tail in proptest::collection::vec(any::<u64>(), 0..300),
        ) {
            let (found, formula) = extended(Secret::of_process(), &body, &tail);
            prop_assert_eq!(found, formula);
        }
    }

    #[test]
    fn the_ends_of_the_field() {
        for (one, other) in [(P - 1, P - 1), (P, P), (P, 1), (P - 1, 2), (0, P - 1), (1 << 126, 1 << 126)] {
            assert_eq!(reduce(multiply(one, other)), slow(one, other), "{one:x} · {other:x}");
        }
    }

    #[test]
    fn the_largest_words_and_coefficients_overflow_nothing() {
        let largest = (u64::MAX, u64::MAX >> 1);
        let secret = Secret { coefficients: [largest; GROUP], point: P - 1, start: P - 1 };
        for pairs in [0, 1, 2, 100, 255, 256, 600] {
            let (found, formula) = extended(&secret, &vec![u32::MAX; 2 * pairs], &[u64::MAX; 7]);
            assert_eq!(found, formula, "{pairs} pairs");
        }
    }
}
