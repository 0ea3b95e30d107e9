//! Blocks that are given back later: what lookups say meanwhile, and how much is done with a tree
//! locked.

use std::collections::VecDeque;

use chiasm_types::TokenId;

use super::*;
use crate::event::{BlockStored, ExternalHash};
use crate::index::leaving::{BLOCKS, Leaving};
use crate::{PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(1).unwrap();
const LEAVES: WorkerId = WorkerId(0);
const STAYS: WorkerId = WorkerId(1);
const PROMPTS: u32 = 400;

/// Chores that wait until somebody does them.
#[derive(Clone, Default)]
pub(super) struct Chores(Arc<Mutex<VecDeque<Chore>>>);

impl Chores {
    pub(super) fn of(&self, index: PrefixIndex) -> PrefixIndex {
        let chores = self.clone();
        index.in_background(move |chore| chores.0.lock().unwrap().push_back(chore))
    }

    pub(super) fn waiting(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(super) fn do_one(&self) {
        let chore = self.0.lock().unwrap().pop_front();
        chore.into_iter().for_each(|chore| chore());
    }

    pub(super) fn do_all(&self) {
        while self.waiting() > 0 {
            self.do_one();
        }
    }
}

/// Prompts begin alike, so that all are in one tree.
fn prompt(number: u32) -> Vec<TokenId> {
    let own = (0..4).map(|at| 10 + 4 * number + at);
    (0..3).chain(own).map(TokenId).collect()
}

fn keys(number: u32) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens: &prompt(number), ..Default::default() }, BLOCK)
}

fn store(index: &PrefixIndex, worker: WorkerId, number: u32) {
    let tokens = prompt(number);
    // Engines hash blocks differently.
    let name = |token: &TokenId| ExternalHash::U64(u64::from(token.0) << 8 | u64::from(worker.0));
    let stored = BlockStored {
        block_hashes: tokens.iter().map(name).collect(),
        token_ids: tokens,
        block_size: 1,
        ..Default::default()
    };
    let events = vec![KvEvent::BlockStored(stored)];
    index.apply(worker, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
}

/// Both workers hold each third prompt.
fn filled(index: &PrefixIndex) {
    [LEAVES, STAYS].into_iter().for_each(|worker| index.add_worker(worker, BLOCK));
    for number in 0..PROMPTS {
        if number % 3 > 0 {
            store(index, LEAVES, number);
        }
        if number % 3 < 2 {
            store(index, STAYS, number);
        }
    }
}

fn held_nodes(index: &PrefixIndex, holder: HolderId) -> usize {
    let mut held = 0;
    index
        .core
        .prompts
        .trees
        .each_node(|node| held += usize::from(node.holders.get(holder, node.len()).is_some()));
    held
}

#[test]
fn what_leaves_is_in_no_answer_and_goes_in_steps_between_which_nobody_waits() {
    let index = PrefixIndex::new();
    filled(&index);
    let expected: Vec<_> = (0..PROMPTS).map(|number| if number % 3 < 2 { 7 } else { 3 }).collect();
    let check = || {
        for (number, expected) in (0..PROMPTS).zip(&expected).step_by(37) {
            assert_eq!(index.overlaps(&keys(number)), [(STAYS, *expected)]);
        }
    };
    let removed = index.core.workers.remove(LEAVES).unwrap();
    check();
    let [cache] = <[_; 1]>::try_from(index.core.workers.end(&removed))
        .unwrap_or_else(|_| panic!("one group"));
    let mut leaving = Leaving::new(cache);
    let (mut steps, mut left) = (0, held_nodes(&index, leaving.holder()));
    assert!(left > 250, "{left}");
    while leaving.step(&index.core.prompts) {
        let now = held_nodes(&index, leaving.holder());
        assert!(now + BLOCKS >= left, "{left} nodes, then {now}");
        (steps, left) = (steps + 1, now);
        // Lookups and events take the same lock: on this thread they would never end if it was
        // held.
        check();
        store(&index, STAYS, 0);
    }
    assert_eq!(left, 0);
    assert!(steps > 8, "{steps} steps");
}

#[test]
fn a_worker_that_left_was_cleared_or_replaced_waits_for_nothing_but_its_memory_does() {
    type Change = fn(&PrefixIndex);
    let clear_by_event: Change = |index| {
        let events = vec![KvEvent::AllBlocksCleared];
        index.apply(LEAVES, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
    };
    let changes: [(Change, Option<usize>); 4] = [
        (|index| index.remove_worker(LEAVES), None),
        (|index| index.add_worker(LEAVES, BLOCK), Some(0)),
        (|index| index.clear(LEAVES), Some(0)),
        (clear_by_event, Some(0)),
    ];
    for (change, left) in changes {
        let chores = Chores::default();
        let index = chores.of(PrefixIndex::new());
        filled(&index);
        let before = index.totals();
        assert_eq!(chores.waiting(), 0);
        change(&index);
        assert_eq!(chores.waiting(), 1);
        assert_eq!(index.totals().nodes, before.nodes);
        let overlaps = |number| {
            index
                .overlaps(&keys(number))
                .into_iter()
                .map(|(_, overlap)| overlap)
                .collect::<Vec<_>>()
        };
        let expected = |stays| left.into_iter().chain([stays]).collect::<Vec<_>>();
        assert_eq!(
            (overlaps(0), overlaps(1), overlaps(2)),
            (expected(7), expected(7), expected(3))
        );
        if left.is_some() {
            store(&index, LEAVES, 2);
            assert_eq!(overlaps(2), [7, 3]);
        }
        chores.do_all();
        if left.is_some() {
            assert_eq!(overlaps(2), [7, 3]);
            index.remove_worker(LEAVES);
        }
        chores.do_all();
        assert_eq!((overlaps(0), overlaps(1), overlaps(2)), (vec![7], vec![7], vec![3]));
        assert!(index.totals().nodes < before.nodes);
        index.remove_worker(STAYS);
        chores.do_all();
        assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
    }
}

#[test]
fn a_batch_that_the_worker_before_still_takes_in_changes_nothing_for_the_one_after() {
    let index = PrefixIndex::new();
    filled(&index);
    let before = index.core.workers.remove(LEAVES).unwrap();
    index.add_worker(LEAVES, BLOCK);
    store(&index, LEAVES, 2);
    // It had been found when it was still there; now it learns of another group, and is cleared.
    let stored = BlockStored {
        block_hashes: vec![ExternalHash::U64(7)],
        token_ids: vec![TokenId(0)],
        block_size: 1,
        group_idx: Some(1),
        ..Default::default()
    };
    for event in [KvEvent::BlockStored(stored), KvEvent::AllBlocksCleared] {
        let batch = KvEventBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None };
        let apply = |worker: &mut Worker| {
            index.apply_to(worker, &batch, &mut Scratch::default(), &mut Vec::new())
        };
        index.leave(None, index.core.workers.with(&before, apply).unwrap());
        assert_eq!(index.overlaps(&keys(2)), [(LEAVES, 7), (STAYS, 3)]);
    }
    index.leave(Some(before), Vec::new());
    assert_eq!(index.overlaps(&keys(2)), [(LEAVES, 7), (STAYS, 3)]);
    [LEAVES, STAYS].into_iter().for_each(|worker| index.remove_worker(worker));
    assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
}

#[test]
fn the_cap_is_kept_once_the_chore_is_done() {
    const CAP: usize = 100_000;
    let chores = Chores::default();
    let index = chores.of(PrefixIndex::with_max_bytes(CAP));
    index.add_worker(LEAVES, BLOCK);
    let mut number = 0;
    for _ in 0..4 {
        while chores.waiting() == 0 {
            assert!(index.totals().bytes <= CAP);
            store(&index, LEAVES, number);
            number += 1;
        }
        assert!(index.totals().bytes > CAP);
        let shed = index.totals().shed;
        chores.do_all();
        assert!(index.totals().bytes <= CAP, "{:?}", index.totals());
        assert!(index.totals().shed > shed);
    }
    // What is left leads to all that is left.
    index.remove_worker(LEAVES);
    chores.do_all();
    assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
}
