use std::collections::BTreeSet;
use std::time::Duration;

use chiasm_kv::{PromptBlocks, block_keys};
use chiasm_types::{BlockSize, TokenId};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 6;
/// Two workers, and the second one's next life.
const SEATS: [Seat; 3] =
    [Seat { place: 0, life: 1 }, Seat { place: 1, life: 2 }, Seat { place: 1, life: 3 }];

fn blocks() -> Vec<BlockKey> {
    let tokens: Vec<_> = (0..BLOCKS as u32).map(TokenId).collect();
    block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BlockSize::new(1).unwrap())
}

#[test]
fn lingering_promises_are_bounded_and_the_oldest_go_first() {
    let tokens: Vec<_> = (0..2 * MAX_LINGERING as u32).map(TokenId).collect();
    let many = block_keys(
        &PromptBlocks { tokens: &tokens, ..Default::default() },
        BlockSize::new(1).unwrap(),
    );
    let mut promises = Promises::default();
    let until = Some(Duration::from_secs(3600));
    for (request, block) in many.iter().enumerate() {
        promises.make(SEATS[0], RequestNumber(request as u64), &[*block]);
        promises.end(SEATS[0], RequestNumber(request as u64), vec![*block], until);
    }
    assert_eq!(promises.counts()[&SEATS[0]], MAX_LINGERING);
    assert!(!promises.contains(SEATS[0], many[MAX_LINGERING - 1]));
    assert!(promises.contains(SEATS[0], many[MAX_LINGERING]));
}

#[test]
fn the_end_of_a_run_is_found_wherever_it_is() {
    let tokens: Vec<_> = (0..40).map(TokenId).collect();
    let keys = block_keys(
        &PromptBlocks { tokens: &tokens, ..Default::default() },
        BlockSize::new(1).unwrap(),
    );
    for start in 0..40 {
        for end in start + 1..=40 {
            let mut promises = Promises::default();
            promises.make(SEATS[0], RequestNumber(1), &keys[start..end]);
            promises.make(SEATS[1], RequestNumber(2), &keys);
            assert_eq!(promises.run_end(SEATS[0], &keys, start), end, "from {start}");
            assert_eq!(promises.run_end(SEATS[1], &keys, start), 40);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make(usize, BTreeSet<usize>),
    Confirm(usize, usize),
    /// The n-th of the requests in flight ends, with or without grace.
    End(prop::sample::Index, bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..SEATS.len(), btree_set(0..BLOCKS, 0..4)).prop_map(|(seat, blocks)| Step::Make(seat, blocks)),
        2 => (0..SEATS.len(), 0..BLOCKS).prop_map(|(seat, block)| Step::Confirm(seat, block)),
        3 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(which, grace)| Step::End(which, grace)),
        1 => (0..20u64).prop_map(Step::Pass),
    ]
}

proptest! {
    /// The naive model keeps every single promise with its maker and its end.
    #[test]
    fn promises_agree_with_a_list_of_them(steps in vec(step(), 0..60)) {
        const GRACE: Duration = Duration::from_secs(10);
        let blocks = blocks();
        let mut now = Duration::ZERO;
        let mut promises = Promises::default();
        let mut in_flight: Vec<(RequestNumber, usize, Vec<usize>)> = Vec::new();
        let mut model: Vec<(RequestNumber, usize, usize, Option<Duration>)> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Make(seat, promised) => {
                    let request = RequestNumber(number as u64);
                    let promised: Vec<_> = promised.into_iter().collect();
                    promises.make(SEATS[seat], request, &promised.iter().map(|block| blocks[*block]).collect::<Vec<_>>());
                    model.extend(promised.iter().map(|block| (request, seat, *block, None)));
                    in_flight.push((request, seat, promised));
                }
                Step::Confirm(seat, block) => {
                    promises.confirm(SEATS[seat], blocks[block]);
                    model.retain(|(_, by, promised, _)| (*by, *promised) != (seat, block));
                }
                Step::End(which, grace) if !in_flight.is_empty() => {
                    let (request, seat, promised) = in_flight.swap_remove(which.index(in_flight.len()));
                    let until = grace.then(|| now + GRACE);
                    promises.end(SEATS[seat], request, promised.iter().map(|block| blocks[*block]).collect(), until);
                    model.retain_mut(|(maker, _, _, end)| {
                        if *maker == request {
                            *end = until;
                        }
                        *maker != request || grace
                    });
                }
                Step::End(..) => {}
                Step::Pass(seconds) => {
                    now += Duration::from_secs(seconds);
                    promises.expire(now);
                    model.retain(|(_, _, _, end)| end.is_none_or(|end| end > now));
                }
            }
            for (seat, of) in SEATS.iter().enumerate() {
                for (block, key) in blocks.iter().enumerate() {
                    let promised = model.iter().any(|(_, by, promised, _)| (*by, *promised) == (seat, block));
                    prop_assert_eq!(promises.contains(*of, *key), promised, "block {} of {}", block, seat);
                }
                let distinct: BTreeSet<_> =
                    model.iter().filter(|(_, by, ..)| *by == seat).map(|(_, _, block, _)| block).collect();
                prop_assert_eq!(promises.counts().get(of).copied().unwrap_or(0), distinct.len());
            }
            prop_assert_eq!(promises.is_empty(), model.is_empty());
        }
    }
}
