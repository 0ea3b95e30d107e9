//! Arithmetic modulo p = 2^127 − 1, a prime.

/// The modulus. Elements of the field are numbers below it.
pub(super) const P: u128 = (1 << 127) - 1;

#[inline]
pub(super) fn split(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

#[inline]
pub(super) fn reduce(number: u128) -> u128 {
    let folded = (number & P) + (number >> 127);
    if folded >= P { folded - P } else { folded }
}

/// The sum modulo p of two numbers below p.
#[inline]
pub(super) fn add(one: u128, other: u128) -> u128 {
    let sum = one + other;
    if sum >= P { sum - P } else { sum }
}

#[inline]
pub(super) fn product(one: u64, other: u64) -> u128 {
    u128::from(one) * u128::from(other)
}

/// one · other + low + 2^64 · high, of numbers below p, 2^127 and 2^126.
#[inline(always)]
pub(super) fn multiply_add_wide(one: u128, other: u128, low: u128, high: u128) -> u128 {
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

/// `one` · `other` + `more` modulo p, for a factor `one` of at most 2^127 and two numbers below p.
/// Each block's state waits for that of the block before, so this reduces by halves and to the end
/// only once.
#[inline]
pub(super) fn multiply_add(one: u128, other: u128, more: u128) -> u128 {
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
    // What is folded is below 2^128 each time: two numbers below 2^127, of which one is folded
    // already.
    let sum = fold(fold((low & P) + shifted) + more);
    let rest = fold((low >> 127) + (middle >> 63) + 2 * high);
    reduce(sum + rest)
}

/// A number below p, raised to a power modulo p.
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

    /// The product modulo p by doubling and adding: slow, and easy to check.
    pub(in crate::block_key) fn slow(mut one: u128, other: u128) -> u128 {
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
    }

    #[test]
    fn the_ends_of_the_field() {
        let ends =
            [0, 1, 2, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 126, P - (1 << 64), P - 2, P - 1];
        for one in ends.into_iter().chain([P, P + 1]) {
            for other in ends {
                for more in ends {
                    let expected = add(slow(one, other), more);
                    assert_eq!(
                        multiply_add(one, other, more),
                        expected,
                        "{one:x} · {other:x} + {more:x}"
                    );
                    if one < P {
                        for high in [0, (1 << 126) - 1, (1 << 64) - 1] {
                            let expected = add(expected, slow(high, 1 << 64));
                            let found = multiply_add_wide(one, other, more, high);
                            assert_eq!(
                                found, expected,
                                "{one:x} · {other:x} + {more:x} + {high:x}"
                            );
                        }
                        let expected = add(slow(one, other), slow((1 << 126) - 1, 1 << 64));
                        assert_eq!(multiply_add_wide(one, other, P, (1 << 126) - 1), expected);
                    }
                }
            }
        }
    }
}
