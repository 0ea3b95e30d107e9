use std::collections::BTreeSet;
use std::time::Duration;

use chiasm_kv::{PromptBlocks, block_keys};
use chiasm_types::{BlockSize, TokenId};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 6;

fn blocks() -> Vec<BlockKey> {
    let tokens: Vec<_> = (0..BLOCKS as u32).map(TokenId).collect();
    block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BlockSize::new(1).unwrap())
}

#[test]
fn lingering_promises_are_bounded_and_the_oldest_go_first() {
    let tokens: Vec<_> = (0..2 * MAX_LINGERING as u32).map(TokenId).collect();
    let many = block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BlockSize::new(1).unwrap());
    let mut promises = Promises::default();
    let until = Some(Instant::now() + Duration::from_secs(3600));
    for (request, block) in many.iter().enumerate() {
        promises.make(RequestNumber(request as u64), &[*block]);
        promises.end(RequestNumber(request as u64), vec![*block], until);
    }
    assert_eq!(promises.len(), MAX_LINGERING);
    assert!(!promises.contains(many[MAX_LINGERING - 1]));
    assert!(promises.contains(many[MAX_LINGERING]));
}

#[derive(Clone, Debug)]
enum Step {
    Make(BTreeSet<usize>),
    Confirm(usize),
    /// The n-th of the requests in flight ends, with or without grace.
    End(prop::sample::Index, bool),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => btree_set(0..BLOCKS, 0..4).prop_map(Step::Make),
        2 => (0..BLOCKS).prop_map(Step::Confirm),
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
        let mut now = Instant::now();
        let mut promises = Promises::default();
        let mut in_flight: Vec<(RequestNumber, Vec<usize>)> = Vec::new();
        let mut model: Vec<(RequestNumber, usize, Option<Instant>)> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Make(promised) => {
                    let request = RequestNumber(number as u64);
                    let promised: Vec<_> = promised.into_iter().collect();
                    promises.make(request, &promised.iter().map(|block| blocks[*block]).collect::<Vec<_>>());
                    model.extend(promised.iter().map(|block| (request, *block, None)));
                    in_flight.push((request, promised));
                }
                Step::Confirm(block) => {
                    promises.confirm(blocks[block]);
                    model.retain(|(_, promised, _)| *promised != block);
                }
                Step::End(which, grace) if !in_flight.is_empty() => {
                    let (request, promised) = in_flight.swap_remove(which.index(in_flight.len()));
                    let until = grace.then(|| now + GRACE);
                    promises.end(request, promised.iter().map(|block| blocks[*block]).collect(), until);
                    model.retain_mut(|(maker, _, end)| {
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
                    model.retain(|(_, _, end)| end.is_none_or(|end| end > now));
                }
            }
            for (block, key) in blocks.iter().enumerate() {
                let promised = model.iter().any(|(_, promised, _)| *promised == block);
                prop_assert_eq!(promises.contains(*key), promised, "block {}", block);
            }
            prop_assert_eq!(promises.len(), model.iter().map(|(_, block, _)| block).collect::<BTreeSet<_>>().len());
        }
    }
}
