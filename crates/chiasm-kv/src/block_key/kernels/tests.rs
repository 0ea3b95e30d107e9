use proptest::prelude::*;

use super::*;
use crate::block_key::field::{P, add, reduce};
use crate::block_key::universal::Secret;

fn token() -> impl Strategy<Value = u32> {
    prop_oneof![0..150_000_u32, Just((1 << 20) - 1), Just(0)]
}

/// Tokens that all implementations accept, sometimes with a few that some implementations reject.
fn tokens(count: usize) -> impl Strategy<Value = Vec<u32>> {
    let large = prop_oneof![
        Just(1 << 20),
        Just((1 << 25) - 1),
        Just(1 << 25),
        Just(u32::MAX),
        any::<u32>()
    ];
    let few = proptest::collection::vec((0..count.max(1), large), 0..4);
    (proptest::collection::vec(token(), count), prop_oneof![2 => Just(Vec::new()), 1 => few])
        .prop_map(|(mut tokens, large)| {
            for (at, token) in large {
                if let Some(place) = tokens.get_mut(at) {
                    *place = token;
                }
            }
            tokens
        })
}

/// A block size and the tokens of full blocks.
fn blocks() -> impl Strategy<Value = (usize, Vec<u32>)> {
    let size = prop_oneof![Just(16), Just(32), Just(64), Just(128), 1..=2 * MAX_BLOCK_WORDS];
    (size, 0..40_usize).prop_flat_map(|(size, blocks)| (Just(size), tokens(size * blocks)))
}

/// Numbers below p, including the bounds of the field.
fn number() -> impl Strategy<Value = u128> {
    let bounds = prop_oneof![Just(0), Just(1), Just(P - 1), Just(P - 2), Just(1 << 126)];
    prop_oneof![4 => 0..P, 1 => bounds]
}

#[test]
fn kernel_at_field_bounds_equals_formula() {
    let bounds = [0, 1, P - 1, P - 2, 1 << 126, P - (1 << 104), P - (1 << 104) - 1];
    let tokens = [TokenId(0); 16 * 16];
    for kernel in supported() {
        for point in [1, 2, P - 1, 1 << 126] {
            let tables = Tables::new(&[1; MAX_BLOCK_WORDS], point);
            for (state, extra_sum) in
                bounds.iter().flat_map(|one| bounds.iter().map(|other| (*one, *other)))
            {
                for extra_step in [0, 1, reduce(P - extra_sum)] {
                    let mut before = state;
                    let mut extra = extra_sum;
                    let expected: Vec<_> = (0..16)
                        .map(|_| {
                            before = multiply_add(before, point, extra);
                            extra = add(extra, extra_step);
                            BlockKey(before)
                        })
                        .collect();
                    let mut keys = Vec::new();
                    kernel.extend(
                        &tables,
                        &Series { state, extra_sum, extra_step, tokens: &tokens, block_size: 16 },
                        &mut keys,
                    );
                    assert_eq!(
                        keys, expected,
                        "{}: {state:x} · {point:x} + {extra_sum:x}, {extra_step:x}",
                        kernel.name
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn kernels_equal_scalar_reference(
        (block_size, tokens) in blocks(),
        state in number(),
        extra_sum in number(),
        extra_step in prop_oneof![Just(0), number()],
    ) {
        let secret = Secret::for_process();
        let tokens: Vec<_> = tokens.into_iter().map(TokenId).collect();
        let series = Series { state, extra_sum, extra_step, tokens: &tokens, block_size };
        let mut expected = Vec::new();
        secret.extend_each(&series, &mut expected);
        prop_assert_eq!(expected.len(), tokens.len() / block_size);
        for kernel in supported() {
            let mut keys = vec![BlockKey(7)];
            secret.extend_series(Some(kernel), series, &mut keys);
            prop_assert_eq!(&keys[1..], &expected[..], "{}", kernel.name);
            // Without the scalar fallback, a kernel stops only before large tokens.
            let mut keys = Vec::new();
            kernel.extend(secret.tables(), &series, &mut keys);
            prop_assert_eq!(&keys[..], &expected[..keys.len()], "{}", kernel.name);
            if tokens.iter().all(|token| token.0 < 1 << 20) {
                prop_assert_eq!(keys.len(), expected.len(), "{}", kernel.name);
            }
        }
    }

    #[test]
    fn kernels_with_extreme_secrets_equal_formula(
        (block_size, tokens) in blocks(),
        coefficients in proptest::collection::vec(number(), MAX_BLOCK_WORDS),
        point in number().prop_filter("not 0", |point| *point != 0),
        state in number(),
        extra_sum in number(),
        extra_step in prop_oneof![Just(0), number()],
    ) {
        let tokens: Vec<_> = tokens.into_iter().map(TokenId).collect();
        let coefficients = std::array::from_fn(|word| coefficients[word]);
        let tables = Tables::new(&coefficients, point);
        let mut before = state;
        let mut extra = extra_sum;
        let expected: Vec<_> = tokens
            .chunks_exact(block_size)
            .map(|block| {
                let words = block.chunks(2).map(|pair| {
                    pair.iter().rev().fold(0, |word, token| word << 32 | u128::from(token.0))
                });
                let sum = words.zip(&coefficients).fold(extra, |sum, (word, coefficient)| {
                    multiply_add(word, *coefficient, sum)
                });
                before = multiply_add(before, point, sum);
                extra = add(extra, extra_step);
                BlockKey(before)
            })
            .collect();
        let series = Series { state, extra_sum, extra_step, tokens: &tokens, block_size };
        for kernel in supported() {
            let mut keys = Vec::new();
            kernel.extend(&tables, &series, &mut keys);
            prop_assert_eq!(&keys[..], &expected[..keys.len()], "{}", kernel.name);
        }
    }
}
