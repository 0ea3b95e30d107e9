//! Snapshots: malformed bytes, concurrent events, and workers with different key schemes.
//!
//! The content of snapshots is covered by the property tests, which hand over from one index to
//! another.

use std::sync::atomic::{AtomicBool, Ordering};

use chiasm_types::TokenId;
use proptest::prelude::*;

use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash};
use crate::{EngineHashKeys, PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(1).unwrap();
const WORKER: WorkerId = WorkerId(3);
const OTHER: WorkerId = WorkerId(4);
/// The number of blocks of a prompt, which takes several nodes.
const LENGTH: u32 = 40;

/// Returns a prompt that shares its first `shared` blocks with the other prompts.
fn prompt(number: u32, shared: u32) -> Vec<TokenId> {
    (0..LENGTH).map(|at| TokenId(if at < shared { at } else { 1000 * (1 + number) + at })).collect()
}

fn keys(tokens: &[TokenId]) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK)
}

fn names(tokens: &[TokenId]) -> Vec<ExternalHash> {
    keys(tokens).into_iter().map(|key| ExternalHash::U64((key.get() >> 63) as u64)).collect()
}

fn stored(tokens: &[TokenId]) -> KvEvent {
    KvEvent::BlockStored(BlockStored {
        block_hashes: names(tokens),
        token_ids: tokens.to_vec(),
        block_size: 1,
        ..Default::default()
    })
}

fn removed(tokens: &[TokenId], from: usize) -> KvEvent {
    let block_hashes = names(tokens)[from..].iter().rev().cloned().collect();
    KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() })
}

fn apply(index: &PrefixIndex, worker: WorkerId, events: Vec<KvEvent>) {
    index.apply(worker, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
}

/// Returns an index with a worker that has blocks of all kinds: shared ones, a hole, copies, a
/// block with an unknown parent, and a lower tier.
fn filled() -> PrefixIndex {
    let index = PrefixIndex::new();
    index.add_worker(WORKER, BLOCK);
    let prompts: Vec<_> =
        [0, 20, 30].into_iter().zip(0..).map(|(shared, number)| prompt(number, shared)).collect();
    apply(&index, WORKER, prompts.iter().map(|tokens| stored(tokens)).collect());
    let hole = KvEvent::BlockRemoved(BlockRemoved {
        block_hashes: vec![names(&prompts[0])[5].clone()],
        ..Default::default()
    });
    let orphan = BlockStored {
        block_hashes: vec![ExternalHash::U64(1)],
        parent_block_hash: Some(ExternalHash::U64(2)),
        token_ids: vec![TokenId(7)],
        block_size: 1,
        ..Default::default()
    };
    let lower_tier = BlockStored {
        block_hashes: names(&prompts[1])[..9].to_vec(),
        medium: Some("CPU".into()),
        ..Default::default()
    };
    let orphan_copy = KvEvent::BlockStored(orphan.clone());
    apply(
        &index,
        WORKER,
        vec![hole, KvEvent::BlockStored(orphan), orphan_copy, KvEvent::BlockStored(lower_tier)],
    );
    index.presume(WORKER, &keys(&prompt(9, 10)));
    index
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Changed bytes are either read or refused, and a refused snapshot changes nothing.
    #[test]
    fn refused_snapshot_changes_nothing(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = filled().snapshot(WORKER).unwrap().bytes;
        // Magic and fingerprint stay, so that the rest is read.
        for (at, byte) in changes {
            let at = 32 + at.index(bytes.len() - 32);
            bytes[at] = byte;
        }
        bytes.truncate(end.map_or(bytes.len(), |end| end.index(bytes.len())));
        let index = filled();
        let tokens = prompt(1, 20);
        let totals_before = index.totals();
        let stats_before = index.stats(WORKER);
        if index.restore(WORKER, &bytes).is_err() {
            let totals = index.totals();
            prop_assert_eq!(totals.blocks, totals_before.blocks);
            prop_assert_eq!(totals.entries, totals_before.entries);
            prop_assert_eq!(index.stats(WORKER), stats_before);
            prop_assert_eq!(index.overlap(WORKER, &keys(&tokens)), LENGTH as usize);
        }
        index.remove_worker(WORKER);
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
    }
}

#[test]
fn unreadable_snapshot_is_refused_with_reason() {
    let index = filled();
    let bytes = index.snapshot(WORKER).unwrap().bytes;
    assert_eq!(index.restore(OTHER, b""), Err(SnapshotError::OtherForm));
    let changed = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        bytes
    };
    assert_eq!(index.restore(OTHER, &changed(15)), Err(SnapshotError::OtherForm));
    assert_eq!(index.restore(OTHER, &changed(16)), Err(SnapshotError::OtherSecret));
    let more = [&bytes[..], &[0]].concat();
    assert_eq!(index.restore(OTHER, &more), Err(SnapshotError::Malformed { part: "its end" }));
    assert_eq!(index.stats(OTHER), None);
    assert_eq!(index.snapshot(OTHER), None);
    let entries = index.totals().entries;
    assert_eq!(index.restore(OTHER, &bytes), Ok(3));
    assert_eq!(index.totals().entries, 2 * entries);
}

/// Nodes are split, grow and are pruned while a snapshot is written and read. Lookups always see
/// the worker's blocks.
#[test]
fn snapshot_is_consistent_under_concurrent_events() {
    let whole = prompt(0, 0);
    let branch = prompt(1, 13);
    let index = PrefixIndex::new();
    [WORKER, OTHER].into_iter().for_each(|worker| index.add_worker(worker, BLOCK));
    apply(
        &index,
        WORKER,
        vec![stored(&whole), removed(&whole, 33), stored(&branch), removed(&branch, 20)],
    );
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..3000 {
                // The prompt diverges at another block in each round.
                let tokens: Vec<_> = whole
                    .iter()
                    .take(1 + round % 39)
                    .copied()
                    .chain(prompt(7, 0).into_iter().take(9))
                    .collect();
                apply(&index, OTHER, vec![stored(&tokens), stored(&branch)]);
                apply(&index, OTHER, vec![removed(&tokens, 0), removed(&branch, 0)]);
            }
            done.store(true, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let snapshot = index.snapshot(WORKER).unwrap().bytes;
                assert_eq!(index.restore(WORKER, &snapshot), Ok(1));
            }
        });
        let whole_keys = keys(&whole);
        let branch_keys = keys(&branch);
        while !done.load(Ordering::Relaxed) {
            assert_eq!(index.overlap(WORKER, &whole_keys), 33);
            assert_eq!(index.overlap(WORKER, &branch_keys), 20);
        }
    });
    index.remove_worker(OTHER);
    index.remove_worker(WORKER);
    let totals = index.totals();
    assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
}

/// One engine publishes the content of its blocks, two others publish hashes of two kinds.
#[test]
fn workers_are_found_by_keys_of_their_scheme() {
    let index = PrefixIndex::new();
    let tokens = prompt(0, 0);
    let [one, two] = ["one", "two"].map(|name| EngineHashKeys::new(name).unwrap());
    let third = WorkerId(5);
    index.add_worker(WORKER, BLOCK);
    index.add_worker_with(OTHER, BLOCK, KeyScheme::EngineHashes(one.clone()));
    index.add_worker_with(third, BLOCK, KeyScheme::EngineHashes(two.clone()));
    let hashed = |to: usize| {
        let block_hashes = names(&tokens)[..to].to_vec();
        KvEvent::BlockStored(BlockStored { block_hashes, block_size: 1, ..Default::default() })
    };
    apply(&index, WORKER, vec![stored(&tokens)]);
    apply(&index, OTHER, vec![hashed(30)]);
    apply(&index, third, vec![hashed(20)]);
    // The parent is unknown, so the block can't be placed in a prompt.
    let lost = BlockStored {
        block_hashes: vec![ExternalHash::U64(77)],
        parent_block_hash: Some(ExternalHash::U64(78)),
        block_size: 1,
        ..Default::default()
    };
    apply(&index, third, vec![KvEvent::BlockStored(lost)]);
    assert_eq!(index.stats(third).unwrap().unknown_parents, 1);
    let keys_of = |scheme: &EngineHashKeys| {
        names(&tokens).iter().map(|hash| scheme.key(hash)).collect::<Vec<_>>()
    };
    let mut overlaps = Overlaps::default();
    for (keys, expected) in [
        (keys(&tokens), (WORKER, LENGTH as usize)),
        (keys_of(&one), (OTHER, 30)),
        (keys_of(&two), (third, 20)),
    ] {
        index.lookup(&keys, &mut overlaps);
        assert_eq!(overlaps.found(), [expected]);
    }
    let next = PrefixIndex::new();
    next.restore(third, &index.snapshot(third).unwrap().bytes).unwrap();
    apply(&next, third, vec![removed(&tokens[..20], 12)]);
    assert_eq!(next.overlap(third, &keys_of(&two)), 12);
}
