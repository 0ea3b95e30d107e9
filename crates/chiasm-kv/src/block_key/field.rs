//! Arithmetic in the field of integers modulo the prime p = 2^127 − 1.

/// The modulus p. Elements of the field are numbers below p.
pub(super) const P: u128 = (1 << 127) - 1;

/// Splits a number into its low and high 64 bits.
#[inline]
pub(super) fn split(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

/// Returns `number` modulo p.
#[inline]
pub(super) fn reduce(number: u128) -> u128 {
    let folded = (number & P) + (number >> 127);
    if folded >= P { folded - P } else { folded }
}

/// Returns the sum modulo p of two numbers below p.
#[inline]
pub(super) fn add(one: u128, other: u128) -> u128 {
    let sum = one + other;
    if sum >= P { sum - P } else { sum }
}

/// Returns the full product of two words.
#[inline]
pub(super) fn product(one: u64, other: u64) -> u128 {
    u128::from(one) * u128::from(other)
}

/// Returns `one` · `other` + `low` + 2^64 · `high` modulo p.
///
/// `one` and `other` are below p, `low` is below 2^127 and `high` below 2^126.
#[inline(always)]
pub(super) fn multiply_add_wide(one: u128, other: u128, low: u128, high: u128) -> u128 {
    const HIGH: u64 = (1 << 63) - 1;
    let (a0, a1) = split(one);
    let (b0, b1) = split(other);
    // 2^128 = 2, and a1 and b1 are below 2^63: the first sum is below 2^128.
    let (low, over) = product(a0, b0).overflowing_add(low + product(a1, 2 * b1));
    // The products sum to at most 2^128 − 3 · 2^64 + 2, and the third summand is below 2^65.
    let middle = product(a0, b1) + product(a1, b0) + ((low >> 64) | u128::from(over) << 64);
    // The result is low's lower half + 2^64 · (middle + high), and 2^127 = 1.
    let lower = low as u64;
    let middle_bits = middle as u64 & HIGH;
    let high_bits = high as u64 & HIGH;
    let sum = (u128::from(lower) | u128::from(middle_bits) << 64) + (u128::from(high_bits) << 64);
    // The last two are below 2^65 and 2^63.
    reduce((sum & P) + (sum >> 127) + (middle >> 63) + (high >> 63))
}

/// Returns `one` · `other` + `more` modulo p, for `one` of at most 2^127, and `other` and `more`
/// below p.
///
/// Each block's state depends on the previous block's, so latency matters: intermediate results are
/// only folded, and the full reduction happens once.
#[inline]
pub(super) fn multiply_add(one: u128, other: u128, more: u128) -> u128 {
    let (a0, a1) = split(one);
    let (b0, b1) = split(other);
    // Maps a number below 2^128 to one of at most 2^127.
    let fold = |number: u128| (number & P) + (number >> 127);
    let low = product(a0, b0);
    // Each below 2^127, as a1 is at most 2^63 and b1 below it: the sum fits.
    let middle = product(a0, b1) + product(a1, b0);
    // Below 2^126.
    let high = product(a1, b1);
    // The result is low + 2^64 · middle + 2^128 · high + more, and 2^127 = 1.
    let shifted = (middle & ((1 << 63) - 1)) << 64;
    // Each folded sum is below 2^128: its summands are below 2^127, and one of them is folded
    // already.
    let sum = fold(fold((low & P) + shifted) + more);
    let rest = fold((low >> 127) + (middle >> 63) + 2 * high);
    reduce(sum + rest)
}

/// Returns `number`, which is below p, raised to `exponent` modulo p.
#[cfg(target_arch = "x86_64")]
pub(super) fn power(number: u128, exponent: u128) -> u128 {
    (0..128).rev().fold(1, |power, bit| {
        let square = multiply_add(power, power, 0);
        if exponent >> bit & 1 == 1 { multiply_add(square, number, 0) } else { square }
    })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the product modulo p by doubling and adding, which is slow but easy to check.
    pub(in crate::block_key) fn slow_product(mut one: u128, other: u128) -> u128 {
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
        fn multiply_add_equals_slow_reference(one in 0..=P + 1, other in 0..P, more in 0..P) {
            prop_assert_eq!(multiply_add(one, other, more), add(slow_product(one, other), more));
        }

        #[test]
        fn multiply_add_wide_equals_slow_reference(
            one in 0..P,
            other in 0..P,
            low in 0..1_u128 << 127,
            high in 0..1_u128 << 126,
        ) {
            let low_sum = add(slow_product(one, other), reduce(low));
            let expected = add(low_sum, slow_product(high, 1 << 64));
            prop_assert_eq!(multiply_add_wide(one, other, low, high), expected);
        }
    }

    #[test]
    fn products_at_field_bounds_equal_slow_reference() {
        let bounds =
            [0, 1, 2, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 126, P - (1 << 64), P - 2, P - 1];
        for one in bounds.into_iter().chain([P, P + 1]) {
            for other in bounds {
                for more in bounds {
                    let expected = add(slow_product(one, other), more);
                    assert_eq!(
                        multiply_add(one, other, more),
                        expected,
                        "{one:x} · {other:x} + {more:x}"
                    );
                    if one < P {
                        for high in [0, (1 << 126) - 1, (1 << 64) - 1] {
                            let expected = add(expected, slow_product(high, 1 << 64));
                            let found = multiply_add_wide(one, other, more, high);
                            assert_eq!(
                                found, expected,
                                "{one:x} · {other:x} + {more:x} + {high:x}"
                            );
                        }
                        let expected =
                            add(slow_product(one, other), slow_product((1 << 126) - 1, 1 << 64));
                        assert_eq!(multiply_add_wide(one, other, P, (1 << 126) - 1), expected);
                    }
                }
            }
        }
    }
}
