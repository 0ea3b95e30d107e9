use proptest::prelude::*;

use super::*;
use crate::block_key::field::{P, add, reduce};
use crate::block_key::universal::Secret;

fn token() -> impl Strategy<Value = u32> {
    prop_oneof![0..150_000_u32, Just((1 << 20) - 1), Just(0)]
}

/// Mostly such as all implementations take, with few that some don't.
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

/// Block size, and tokens of full blocks.
fn blocks() -> impl Strategy<Value = (usize, Vec<u32>)> {
    let size = prop_oneof![Just(16), Just(32), Just(64), Just(128), 1..=2 * WORDS];
    (size, 0..40_usize).prop_flat_map(|(size, blocks)| (Just(size), tokens(size * blocks)))
}

/// Numbers below p, its ends among them.
fn number() -> impl Strategy<Value = u128> {
    prop_oneof![4 => 0..P, 1 => prop_oneof![Just(0), Just(1), Just(P - 1), Just(P - 2), Just(1 << 126)]]
}

#[test]
fn keys_at_the_ends_of_the_field_are_below_p() {
    let ends = [0, 1, P - 1, P - 2, 1 << 126, P - (1 << 104), P - (1 << 104) - 1];
    let tokens = [TokenId(0); 16 * 16];
    for kernel in supported() {
        for point in [1, 2, P - 1, 1 << 126] {
            let tables = Tables::new(&[1; WORDS], point);
            for (state, first, step) in
                ends.iter().flat_map(|one| ends.iter().map(|other| (*one, *other, P - *other)))
            {
                for step in [0, 1, reduce(step)] {
                    let (mut before, mut more) = (state, first);
                    let expected: Vec<_> = (0..16)
                        .map(|_| {
                            before = multiply_add(before, point, more);
                            more = add(more, step);
                            BlockKey(before)
                        })
                        .collect();
                    let mut keys = Vec::new();
                    kernel.extend(
                        &tables,
                        &Series { state, first, step, tokens: &tokens, block_size: 16 },
                        &mut keys,
                    );
                    assert_eq!(
                        keys, expected,
                        "{}: {state:x} · {point:x} + {first:x}, {step:x}",
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
    fn all_implementations_make_the_same_keys(
        (block_size, tokens) in blocks(),
        state in number(),
        first in number(),
        step in prop_oneof![Just(0), number()],
    ) {
        let secret = Secret::of_process();
        let tokens: Vec<_> = tokens.into_iter().map(TokenId).collect();
        let series = Series { state, first, step, tokens: &tokens, block_size };
        let mut expected = Vec::new();
        secret.extend_each(&series, &mut expected);
        prop_assert_eq!(expected.len(), tokens.len() / block_size);
        for kernel in supported() {
            let mut keys = vec![BlockKey(7)];
            secret.extend_series(Some(kernel), series, &mut keys);
            prop_assert_eq!(&keys[1..], &expected[..], "{}", kernel.name);
            // Alone it stops only before large tokens.
            let mut keys = Vec::new();
            kernel.extend(secret.tables(), &series, &mut keys);
            prop_assert_eq!(&keys[..], &expected[..keys.len()], "{}", kernel.name);
            if tokens.iter().all(|token| token.0 < 1 << 20) {
                prop_assert_eq!(keys.len(), expected.len(), "{}", kernel.name);
            }
        }
    }

    #[test]
    fn secrets_at_the_ends_of_the_field_work_too(
        (block_size, tokens) in blocks(),
        coefficients in proptest::collection::vec(number(), WORDS),
        point in number().prop_filter("not 0", |point| *point != 0),
        state in number(),
        first in number(),
        step in prop_oneof![Just(0), number()],
    ) {
        let tokens: Vec<_> = tokens.into_iter().map(TokenId).collect();
        let coefficients = std::array::from_fn(|word| coefficients[word]);
        let tables = Tables::new(&coefficients, point);
        let (mut before, mut more) = (state, first);
        let expected: Vec<_> = tokens
            .chunks_exact(block_size)
            .map(|block| {
                let words = block.chunks(2).map(|pair| pair.iter().rev().fold(0, |word, token| word << 32 | u128::from(token.0)));
                let sum = words.zip(&coefficients).fold(more, |sum, (word, coefficient)| multiply_add(word, *coefficient, sum));
                before = multiply_add(before, point, sum);
                more = add(more, step);
                BlockKey(before)
            })
            .collect();
        let series = Series { state, first, step, tokens: &tokens, block_size };
        for kernel in supported() {
            let mut keys = Vec::new();
            kernel.extend(&tables, &series, &mut keys);
            prop_assert_eq!(&keys[..], &expected[..keys.len()], "{}", kernel.name);
        }
    }
}
