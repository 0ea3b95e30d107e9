//! Snapshots: what is no snapshot, others' events meanwhile, keys of both schemes side by side.
//! That they say what was known is in the tests by chance, which hand over from one index to
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
/// Several nodes.
const LENGTH: u32 = 40;

/// Prompts that part after so many blocks.
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

/// A worker with blocks of all kinds: shared ones, a hole, copies, one of an unknown parent, a
/// lower tier.
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
    let below = BlockStored {
        block_hashes: names(&prompts[1])[..9].to_vec(),
        medium: Some("CPU".into()),
        ..Default::default()
    };
    let again = KvEvent::BlockStored(orphan.clone());
    apply(
        &index,
        WORKER,
        vec![hole, KvEvent::BlockStored(orphan), again, KvEvent::BlockStored(below)],
    );
    index.presume(WORKER, &keys(&prompt(9, 10)));
    index
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever bytes say is read or refused, and what was refused leaves nothing behind.
    #[test]
    fn what_is_no_snapshot_leaves_all_as_it_was(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = filled().snapshot(WORKER).unwrap().bytes;
        // All but the secret's fingerprint.
        for (at, byte) in changes {
            let at = 32 + at.index(bytes.len() - 32);
            bytes[at] = byte;
        }
        bytes.truncate(end.map_or(bytes.len(), |end| end.index(bytes.len())));
        let index = filled();
        let (tokens, before) = (prompt(1, 20), (index.totals(), index.stats(WORKER)));
        match index.restore(WORKER, &bytes) {
            Ok(_) => {}
            Err(_) => {
                let totals = index.totals();
                prop_assert_eq!((totals.blocks, totals.entries), (before.0.blocks, before.0.entries));
                prop_assert_eq!(index.stats(WORKER), before.1);
                prop_assert_eq!(index.overlap(WORKER, &keys(&tokens)), LENGTH as usize);
            }
        }
        index.remove_worker(WORKER);
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
    }
}

#[test]
fn other_forms_and_other_secrets_are_told() {
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
    assert_eq!(index.restore(OTHER, &more), Err(SnapshotError::Malformed { what: "its end" }));
    assert_eq!(index.stats(OTHER), None);
    assert_eq!(index.snapshot(OTHER), None);
    let entries = index.totals().entries;
    assert_eq!(index.restore(OTHER, &bytes), Ok(3));
    assert_eq!(index.totals().entries, 2 * entries);
}

/// Nodes are split, grow and go while a snapshot is written and read, and the worker is seen as it
/// is all the time.
#[test]
fn others_go_on_meanwhile() {
    let (whole, parted) = (prompt(0, 0), prompt(1, 13));
    let index = PrefixIndex::new();
    [WORKER, OTHER].into_iter().for_each(|worker| index.add_worker(worker, BLOCK));
    apply(
        &index,
        WORKER,
        vec![stored(&whole), removed(&whole, 33), stored(&parted), removed(&parted, 20)],
    );
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..3000 {
                // It parts elsewhere each time.
                let tokens: Vec<_> = whole
                    .iter()
                    .take(1 + round % 39)
                    .copied()
                    .chain(prompt(7, 0).into_iter().take(9))
                    .collect();
                apply(&index, OTHER, vec![stored(&tokens), stored(&parted)]);
                apply(&index, OTHER, vec![removed(&tokens, 0), removed(&parted, 0)]);
            }
            done.store(true, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let snapshot = index.snapshot(WORKER).unwrap().bytes;
                assert_eq!(index.restore(WORKER, &snapshot), Ok(1));
            }
        });
        let (whole, parted) = (keys(&whole), keys(&parted));
        while !done.load(Ordering::Relaxed) {
            assert_eq!((index.overlap(WORKER, &whole), index.overlap(WORKER, &parted)), (33, 20));
        }
    });
    index.remove_worker(OTHER);
    index.remove_worker(WORKER);
    let totals = index.totals();
    assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
}

/// One engine tells what blocks hold, two others what they call them, in two ways.
#[test]
fn workers_of_several_schemes_are_found_by_the_keys_of_theirs() {
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
    // After a block that is not known, nobody knows where a prompt begins.
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
