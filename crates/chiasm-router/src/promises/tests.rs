use std::collections::BTreeSet;
use std::time::Duration;

use chiasm_kv::{PromptBlocks, block_keys};
use chiasm_types::{BlockSize, TokenId};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 6;
/// Two workers, and a later worker with the index of the second one.
const WORKERS: [WorkerHandle; 3] = [
    WorkerHandle { index: 0, generation: 1 },
    WorkerHandle { index: 1, generation: 2 },
    WorkerHandle { index: 1, generation: 3 },
];

/// Returns the keys of a prompt of this many blocks.
fn keys(blocks: usize) -> Vec<BlockKey> {
    let tokens: Vec<_> = (0..blocks as u32).map(TokenId).collect();
    block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BlockSize::new(1).unwrap())
}

#[test]
fn lingering_promises_are_bounded_oldest_first() {
    let many = keys(2 * MAX_LINGERING_BLOCKS);
    let mut promises = Promises::default();
    let until = Some(Duration::from_secs(3600));
    for (request, block) in many.iter().enumerate() {
        promises.add(WORKERS[0], RequestNumber(request as u64), &[*block]);
        promises.end(WORKERS[0], RequestNumber(request as u64), vec![*block], until);
    }
    assert_eq!(promises.counts()[&WORKERS[0]], MAX_LINGERING_BLOCKS);
    assert!(!promises.contains(WORKERS[0], many[MAX_LINGERING_BLOCKS - 1]));
    assert!(promises.contains(WORKERS[0], many[MAX_LINGERING_BLOCKS]));
}

#[test]
fn run_end_is_found_at_any_position() {
    let keys = keys(40);
    for start in 0..40 {
        for end in start + 1..=40 {
            let mut promises = Promises::default();
            promises.add(WORKERS[0], RequestNumber(1), &keys[start..end]);
            promises.add(WORKERS[1], RequestNumber(2), &keys);
            assert_eq!(promises.run_end(WORKERS[0], &keys, start), end, "from {start}");
            assert_eq!(promises.run_end(WORKERS[1], &keys, start), 40);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add {
        worker: usize,
        blocks: BTreeSet<usize>,
    },
    Confirm {
        worker: usize,
        block: usize,
    },
    /// One of the requests in flight ends.
    End {
        which: prop::sample::Index,
        grace: bool,
    },
    Pass {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..WORKERS.len(), btree_set(0..BLOCKS, 0..4))
            .prop_map(|(worker, blocks)| Step::Add { worker, blocks }),
        2 => (0..WORKERS.len(), 0..BLOCKS)
            .prop_map(|(worker, block)| Step::Confirm { worker, block }),
        3 => (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(which, grace)| Step::End { which, grace }),
        1 => (0..20u64).prop_map(|seconds| Step::Pass { seconds }),
    ]
}

/// A request in flight and the blocks that it promised.
struct InFlight {
    request: RequestNumber,
    worker: usize,
    blocks: Vec<usize>,
}

/// One promise of the naive model.
struct ModelPromise {
    request: RequestNumber,
    worker: usize,
    block: usize,
    until: Option<Duration>,
}

proptest! {
    /// The naive model keeps every single promise with its request and its end.
    #[test]
    fn promises_agree_with_a_naive_list(steps in vec(step(), 0..60)) {
        const GRACE: Duration = Duration::from_secs(10);
        let keys = keys(BLOCKS);
        let mut now = Duration::ZERO;
        let mut promises = Promises::default();
        let mut in_flight: Vec<InFlight> = Vec::new();
        let mut model: Vec<ModelPromise> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Add { worker, blocks } => {
                    let request = RequestNumber(number as u64);
                    let blocks: Vec<_> = blocks.into_iter().collect();
                    let promised: Vec<_> = blocks.iter().map(|block| keys[*block]).collect();
                    promises.add(WORKERS[worker], request, &promised);
                    model.extend(blocks.iter().map(|&block| {
                        ModelPromise { request, worker, block, until: None }
                    }));
                    in_flight.push(InFlight { request, worker, blocks });
                }
                Step::Confirm { worker, block } => {
                    promises.confirm(WORKERS[worker], keys[block]);
                    model.retain(|promise| (promise.worker, promise.block) != (worker, block));
                }
                Step::End { which, grace } if !in_flight.is_empty() => {
                    let InFlight { request, worker, blocks } =
                        in_flight.swap_remove(which.index(in_flight.len()));
                    let until = grace.then(|| now + GRACE);
                    let promised = blocks.iter().map(|block| keys[*block]).collect();
                    promises.end(WORKERS[worker], request, promised, until);
                    model.retain_mut(|promise| {
                        if promise.request == request {
                            promise.until = until;
                        }
                        promise.request != request || grace
                    });
                }
                Step::End { .. } => {}
                Step::Pass { seconds } => {
                    now += Duration::from_secs(seconds);
                    promises.expire(now);
                    model.retain(|promise| promise.until.is_none_or(|until| until > now));
                }
            }
            for (worker, handle) in WORKERS.iter().enumerate() {
                for (block, key) in keys.iter().enumerate() {
                    let promised = model
                        .iter()
                        .any(|promise| (promise.worker, promise.block) == (worker, block));
                    prop_assert_eq!(
                        promises.contains(*handle, *key), promised, "block {} of {}", block, worker
                    );
                }
                let distinct: BTreeSet<_> = model
                    .iter()
                    .filter(|promise| promise.worker == worker)
                    .map(|promise| promise.block)
                    .collect();
                let count = promises.counts().get(handle).copied().unwrap_or(0);
                prop_assert_eq!(count, distinct.len());
            }
            prop_assert_eq!(promises.is_empty(), model.is_empty());
        }
    }
}
