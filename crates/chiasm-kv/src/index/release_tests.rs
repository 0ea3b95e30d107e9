//! The release of blocks in the background: its effect on lookups, and the work per lock of a tree.

use std::collections::VecDeque;

use chiasm_types::TokenId;

use super::*;
use crate::event::{BlockStored, ExternalHash};
use crate::index::release::{CacheRelease, MAX_BLOCKS_PER_LOCK};
use crate::{PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(1).unwrap();
const LEAVING: WorkerId = WorkerId(0);
const STAYING: WorkerId = WorkerId(1);
const PROMPTS: u32 = 400;

/// A queue of chores that tests run when they choose.
#[derive(Clone, Default)]
pub(super) struct Chores(Arc<Mutex<VecDeque<Chore>>>);

impl Chores {
    /// Makes an index queue its chores here.
    pub(super) fn attach(&self, index: PrefixIndex) -> PrefixIndex {
        let chores = self.clone();
        index.in_background(move |chore| chores.0.lock().unwrap().push_back(chore))
    }

    pub(super) fn waiting(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(super) fn run_one(&self) {
        let chore = self.0.lock().unwrap().pop_front();
        chore.into_iter().for_each(|chore| chore());
    }

    pub(super) fn run_all(&self) {
        while self.waiting() > 0 {
            self.run_one();
        }
    }
}

/// Returns a prompt. All prompts share their first tokens, so they are in one tree.
fn prompt(number: u32) -> Vec<TokenId> {
    let own = (0..4).map(|at| 10 + 4 * number + at);
    (0..3).chain(own).map(TokenId).collect()
}

fn keys(number: u32) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens: &prompt(number), ..Default::default() }, BLOCK)
}

fn store(index: &PrefixIndex, worker: WorkerId, number: u32) {
    let tokens = prompt(number);
    // Each engine has its own hashes.
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

/// Fills an index: each worker holds two thirds of the prompts, and both hold every third prompt.
fn fill(index: &PrefixIndex) {
    [LEAVING, STAYING].into_iter().for_each(|worker| index.add_worker(worker, BLOCK));
    for number in 0..PROMPTS {
        if number % 3 > 0 {
            store(index, LEAVING, number);
        }
        if number % 3 < 2 {
            store(index, STAYING, number);
        }
    }
}

/// Returns the number of nodes in which a holder has blocks.
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
fn release_runs_in_steps_invisible_to_lookups() {
    let index = PrefixIndex::new();
    fill(&index);
    let expected: Vec<_> = (0..PROMPTS).map(|number| if number % 3 < 2 { 7 } else { 3 }).collect();
    let check = || {
        for (number, expected) in (0..PROMPTS).zip(&expected).step_by(37) {
            assert_eq!(index.overlaps(&keys(number)), [(STAYING, *expected)]);
        }
    };
    let removed = index.core.workers.remove(LEAVING).unwrap();
    check();
    let [cache] = <[_; 1]>::try_from(index.core.workers.retire(&removed))
        .unwrap_or_else(|_| panic!("one group"));
    let mut release = CacheRelease::new(cache);
    let mut steps = 0;
    let mut left = held_nodes(&index, release.holder());
    assert!(left > 250, "{left}");
    while release.step(&index.core.prompts) {
        let now = held_nodes(&index, release.holder());
        assert!(now + MAX_BLOCKS_PER_LOCK >= left, "{left} nodes, then {now}");
        steps += 1;
        left = now;
        // Lookups and events take the tree's lock. If it were still held, this thread would
        // deadlock.
        check();
        store(&index, STAYING, 0);
    }
    assert_eq!(left, 0);
    assert!(steps > 8, "{steps} steps");
}

#[test]
fn removed_or_cleared_worker_is_released_by_chore() {
    type Change = fn(&PrefixIndex);
    let clear_by_event: Change = |index| {
        let events = vec![KvEvent::AllBlocksCleared];
        index.apply(LEAVING, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
    };
    // Each change, and the overlap of the changed worker afterwards, if the worker is still listed.
    let changes: [(Change, Option<usize>); 4] = [
        (|index| index.remove_worker(LEAVING), None),
        (|index| index.add_worker(LEAVING, BLOCK), Some(0)),
        (|index| index.clear(LEAVING), Some(0)),
        (clear_by_event, Some(0)),
    ];
    for (change, own_overlap) in changes {
        let chores = Chores::default();
        let index = chores.attach(PrefixIndex::new());
        fill(&index);
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
        let expected = |staying| own_overlap.into_iter().chain([staying]).collect::<Vec<_>>();
        assert_eq!(
            (overlaps(0), overlaps(1), overlaps(2)),
            (expected(7), expected(7), expected(3))
        );
        if own_overlap.is_some() {
            store(&index, LEAVING, 2);
            assert_eq!(overlaps(2), [7, 3]);
        }
        chores.run_all();
        if own_overlap.is_some() {
            assert_eq!(overlaps(2), [7, 3]);
            index.remove_worker(LEAVING);
        }
        chores.run_all();
        assert_eq!((overlaps(0), overlaps(1), overlaps(2)), (vec![7], vec![7], vec![3]));
        assert!(index.totals().nodes < before.nodes);
        index.remove_worker(STAYING);
        chores.run_all();
        assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
    }
}

#[test]
fn late_batch_of_replaced_worker_is_ignored() {
    let index = PrefixIndex::new();
    fill(&index);
    let replaced = index.core.workers.remove(LEAVING).unwrap();
    index.add_worker(LEAVING, BLOCK);
    store(&index, LEAVING, 2);
    // Simulates a call that found the worker before it was replaced. The call adds a group to the
    // worker, then clears the worker.
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
        index.release_in_background(None, index.core.workers.with(&replaced, apply).unwrap());
        assert_eq!(index.overlaps(&keys(2)), [(LEAVING, 7), (STAYING, 3)]);
    }
    index.release_in_background(Some(replaced), Vec::new());
    assert_eq!(index.overlaps(&keys(2)), [(LEAVING, 7), (STAYING, 3)]);
    [LEAVING, STAYING].into_iter().for_each(|worker| index.remove_worker(worker));
    assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
}

#[test]
fn chore_restores_cap() {
    const CAP: usize = 100_000;
    let chores = Chores::default();
    let index = chores.attach(PrefixIndex::with_max_bytes(CAP));
    index.add_worker(LEAVING, BLOCK);
    let mut number = 0;
    for _ in 0..4 {
        while chores.waiting() == 0 {
            assert!(index.totals().bytes <= CAP);
            store(&index, LEAVING, number);
            number += 1;
        }
        assert!(index.totals().bytes > CAP);
        let shed = index.totals().shed;
        chores.run_all();
        assert!(index.totals().bytes <= CAP, "{:?}", index.totals());
        assert!(index.totals().shed > shed);
    }
    // Removing the worker removes every node: none was left without an entry that leads to it.
    index.remove_worker(LEAVING);
    chores.run_all();
    assert_eq!((index.totals().blocks, index.totals().nodes), (0, 0));
}
