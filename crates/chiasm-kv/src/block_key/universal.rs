//! A keyed hash of sequences of 32-bit words into 127 bits that needs no vector code to run at the speed of memory.
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

    /// The state after one more sequence: `head`, then `body`, then `tail`. Which words are which must follow from the
    /// words of `head`.
    pub(super) fn extend(&self, state: u128, head: [u32; 2], body: &[TokenId], tail: &[u32]) -> u128 {
        if head.len() + body.len() + tail.len() <= GROUP {
            let (for_head, rest) = self.coefficients.split_at(head.len());
            let (for_body, rest) = rest.split_at(body.len());
            let mut sum = Sum::default();
            for_head.iter().zip(head).for_each(|(coefficient, word)| sum.add(*coefficient, word));
            for_body.iter().zip(body).for_each(|(coefficient, token)| sum.add(*coefficient, token.0));
            rest.iter().zip(tail).for_each(|(coefficient, word)| sum.add(*coefficient, *word));
            return self.next(state, sum);
        }
        let mut state = state;
        let mut words = head.into_iter().chain(body.iter().map(|token| token.0)).chain(tail.iter().copied()).peekable();
        while words.peek().is_some() {
            let mut sum = Sum::default();
            self.coefficients.iter().zip(words.by_ref()).for_each(|(coefficient, word)| sum.add(*coefficient, word));
            state = self.next(state, sum);
        }
        state
    }

    fn next(&self, state: u128, sum: Sum) -> u128 {
        add(multiply(state, self.point), sum.reduced())
    }
}

/// Of coefficient · word for a group, not yet reduced: a product has at most 96 bits, and 512 of them don't overflow.
#[derive(Default)]
struct Sum {
    low: u128,
    /// To be multiplied by 2^64.
    high: u128,
}

impl Sum {
    fn add(&mut self, (low, high): (u64, u64), word: u32) {
        self.low += u128::from(low) * u128::from(word);
        self.high += u128::from(high) * u128::from(word);
    }

    fn reduced(&self) -> u128 {
        // 2^64 · high = 2^127 · (high >> 63) + 2^64 · (the rest), and 2^127 = 1.
        let rest = (self.high & ((1 << 63) - 1)) << 64;
        add(reduce(self.low + (self.high >> 63)), reduce(rest))
    }
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

/// Of two numbers below 2^127.
fn multiply(one: u128, other: u128) -> u128 {
    let ((a0, a1), (b0, b1)) = (split(one), split(other));
    let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
    let low = product(a0, b0);
    // Each below 2^127, as a1 and b1 are below 2^63: the sum fits.
    let middle = product(a0, b1) + product(a1, b0);
    let high = product(a1, b1);
    // low + 2^64 · middle + 2^128 · high, and 2^128 = 2.
    let shifted = (middle & ((1 << 63) - 1)) << 64;
    add(add(reduce(low), reduce(shifted)), reduce((middle >> 63) + 2 * high))
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
        fn products_are_those_of_the_field(one in 0..=P, other in 0..=P) {
            prop_assert_eq!(multiply(one, other), slow(one, other));
        }

        #[test]
        fn extending_follows_the_formula(words in proptest::collection::vec(any::<u32>(), 0..1500), cut in 0..1500usize) {
            let secret = Secret::of_process();
            let (body, tail) = words.split_at(cut.min(words.len()));
            let body: Vec<_> = body.iter().copied().map(TokenId).collect();
            let all: Vec<u32> = [3, 4].into_iter().chain(words.iter().copied()).collect();
            let expected = all.chunks(GROUP).fold(secret.start(), |state, group| {
                let sum = group.iter().zip(&secret.coefficients).fold(0, |sum, (word, (a, b))| {
                    add(sum, slow(u128::from(*a) | u128::from(*b) << 64, u128::from(*word)))
                });
                add(slow(state, secret.point), sum)
            });
            prop_assert_eq!(secret.extend(secret.start(), [3, 4], &body, tail), expected);
        }
    }

    #[test]
    fn the_ends_of_the_field() {
        for (one, other) in [(P - 1, P - 1), (P, P), (P, 1), (P - 1, 2), (0, P - 1), (1 << 126, 1 << 126)] {
            assert_eq!(multiply(one, other), slow(one, other), "{one:x} · {other:x}");
        }
    }
}
