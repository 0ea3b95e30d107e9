//! Lookups against a model of the blocks that each worker holds: many workers, long chains, holes,
//! both key schemes, snapshots, caps and threads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chiasm_types::TokenId;
use proptest::collection::vec;
use proptest::prelude::*;

use super::release_tests::Chores;
use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash};
use crate::{EngineHashKeys, PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(1).unwrap();
/// Holders in more than one word of a bit set, and more than a list of holders may have.
const WORKERS: u32 = 70;
const LENGTH: usize = 40;

/// Returns a prompt. Prompts with the same `shared` have their first `shared` tokens in common.
fn prompt(branch: u32, shared: usize) -> Vec<TokenId> {
    (0..LENGTH).map(|at| TokenId(if at < shared { 0 } else { branch })).collect()
}

fn keys(tokens: &[TokenId]) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK)
}

/// Returns an engine's hash of a block. It uses other bits of the key than the hashes of presumed
/// blocks. Half of the engines share their hashes, and a quarter share those of some blocks.
fn name(worker: u32, key: BlockKey) -> ExternalHash {
    let is_shared = match worker % 4 {
        0 | 1 => true,
        2 => key.get() & 6 != 0,
        _ => false,
    };
    ExternalHash::U64(
        (key.get() >> 63) as u64 ^ if is_shared { 0 } else { u64::from(worker) << 40 },
    )
}

/// The name of the hash function of engines that share their hashes and publish nothing else.
const HASHING: &str = "alike";

/// Converts keys of content to the keys of a scheme.
fn scheme_keys(contents: &[BlockKey], hashing: Option<&EngineHashKeys>) -> Vec<BlockKey> {
    let key =
        |content: &BlockKey| hashing.map_or(*content, |hashing| hashing.key(&name(0, *content)));
    contents.iter().map(key).collect()
}

fn batch(events: Vec<KvEvent>) -> KvEventBatch {
    KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None }
}

fn stored(worker: u32, tokens: &[TokenId], keys: &[BlockKey], from: usize, to: usize) -> KvEvent {
    KvEvent::BlockStored(BlockStored {
        block_hashes: keys[from..to].iter().map(|key| name(worker, *key)).collect(),
        parent_block_hash: from.checked_sub(1).map(|parent| name(worker, keys[parent])),
        token_ids: tokens[from..to].to_vec(),
        block_size: 1,
        ..Default::default()
    })
}

fn removed(worker: u32, keys: impl IntoIterator<Item = BlockKey>) -> KvEvent {
    let block_hashes = keys.into_iter().map(|key| name(worker, key)).collect();
    KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() })
}

#[derive(Clone, Debug)]
enum Step {
    Store {
        worker: u32,
        prompt: usize,
        from: usize,
        to: usize,
    },
    /// Removes any blocks, with or without their children.
    Remove {
        worker: u32,
        prompt: usize,
        blocks: Vec<usize>,
    },
    Truncate {
        worker: u32,
        prompt: usize,
        to: usize,
    },
    /// Presumes blocks, as for a worker without events. The worker usually has events too.
    Presume {
        worker: u32,
        prompt: usize,
        to: usize,
    },
    /// Forgets any blocks, in any order, presumed or not.
    Forget {
        worker: u32,
        prompt: usize,
        blocks: Vec<usize>,
    },
    Clear {
        worker: u32,
    },
    Replace {
        worker: u32,
    },
    Leave {
        worker: u32,
    },
    /// Restores the worker from a snapshot of itself.
    Restore {
        worker: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // Half of the steps concern the first four workers.
    let worker = || prop_oneof![0..WORKERS, 0..4u32];
    let prompt = || 0..4usize;
    prop_oneof![
        12 => (worker(), prompt(), 0..3usize, 0..=LENGTH).prop_map(|(worker, prompt, cut, to)| {
            Step::Store { worker, prompt, from: if cut == 0 { to / 2 } else { 0 }, to }
        }),
        4 => (worker(), prompt(), vec(0..LENGTH, 1..4))
            .prop_map(|(worker, prompt, blocks)| Step::Remove { worker, prompt, blocks }),
        4 => (worker(), prompt(), 0..LENGTH)
            .prop_map(|(worker, prompt, to)| Step::Truncate { worker, prompt, to }),
        4 => (worker(), prompt(), 0..=LENGTH)
            .prop_map(|(worker, prompt, to)| Step::Presume { worker, prompt, to }),
        2 => (worker(), prompt(), vec(0..LENGTH, 1..4))
            .prop_map(|(worker, prompt, blocks)| Step::Forget { worker, prompt, blocks }),
        2 => (worker(), prompt(), 0..LENGTH).prop_map(|(worker, prompt, to)| {
            Step::Forget { worker, prompt, blocks: (to..LENGTH).rev().collect() }
        }),
        1 => worker().prop_map(|worker| Step::Clear { worker }),
        1 => worker().prop_map(|worker| Step::Replace { worker }),
        1 => worker().prop_map(|worker| Step::Leave { worker }),
        3 => worker().prop_map(|worker| Step::Restore { worker }),
    ]
}

/// The number of copies of each key that each worker holds according to its events.
type Model = BTreeMap<u32, BTreeMap<BlockKey, u32>>;

/// The keys that each worker presumably holds.
type Presumed = BTreeMap<u32, BTreeSet<BlockKey>>;

fn store(model: &mut Model, worker: u32, keys: &[BlockKey], from: usize, to: usize) {
    let Some(held) = model.get_mut(&worker) else { return };
    keys[from..to].iter().for_each(|key| *held.entry(*key).or_default() += 1);
}

fn remove(model: &mut Model, worker: u32, key: BlockKey) {
    if let Some(held) = model.get_mut(&worker)
        && let Some(copies) = held.get_mut(&key)
    {
        *copies -= 1;
        if *copies == 0 {
            held.remove(&key);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn overlaps_equal_model(
        shared in vec(0..LENGTH, 4),
        held_by_all in 0..=LENGTH,
        steps in vec(step(), 0..120),
        delay_chores in any::<bool>(),
        hashing in any::<bool>(),
    ) {
        let prompts: Vec<_> =
            shared.iter().zip(1..).map(|(shared, branch)| prompt(branch, *shared)).collect();
        let contents: Vec<_> = prompts.iter().map(|tokens| keys(tokens)).collect();
        let hashing = EngineHashKeys::new(HASHING).filter(|_| hashing);
        let chains: Vec<_> =
            contents.iter().map(|contents| scheme_keys(contents, hashing.as_ref())).collect();
        let scheme = || hashing.clone().map_or(KeyScheme::Content, KeyScheme::EngineHashes);
        let add = |index: &PrefixIndex, worker| {
            index.add_worker_with(WorkerId(worker), BLOCK, scheme());
        };
        let namespace = |worker: u32| if hashing.is_some() { 0 } else { worker };
        let stored = |worker: u32, prompt: usize, from: usize, to: usize| {
            let worker = namespace(worker);
            let mut event = stored(worker, &prompts[prompt], &contents[prompt], from, to);
            if let (KvEvent::BlockStored(stored), Some(_)) = (&mut event, &hashing) {
                stored.token_ids.clear();
            }
            event
        };
        let removed = |worker: u32, prompt: usize, blocks: &[usize]| {
            removed(namespace(worker), blocks.iter().map(|block| contents[prompt][*block]))
        };
        let chores = Chores::default();
        let index =
            if delay_chores { chores.attach(PrefixIndex::new()) } else { PrefixIndex::new() };
        let mut model = Model::new();
        let mut presumed = Presumed::new();
        for worker in 0..WORKERS {
            add(&index, worker);
            index.apply(WorkerId(worker), &batch(vec![stored(worker, 0, 0, held_by_all)]));
            model.insert(worker, BTreeMap::new());
            store(&mut model, worker, &chains[0], 0, held_by_all);
        }
        let mut overlaps = Overlaps::default();
        for step in steps {
            match step {
                Step::Store { worker, prompt, from, to } => {
                    let keys = &chains[prompt];
                    // Blocks without a known parent are tested in tests/prefix_index.rs.
                    let parent_is_known =
                        |held: &BTreeMap<_, _>| from == 0 || held.contains_key(&keys[from - 1]);
                    if !model.get(&worker).is_some_and(parent_is_known) {
                        continue;
                    }
                    index.apply(WorkerId(worker), &batch(vec![stored(worker, prompt, from, to)]));
                    store(&mut model, worker, keys, from, to);
                }
                Step::Remove { worker, prompt, blocks } => {
                    index.apply(WorkerId(worker), &batch(vec![removed(worker, prompt, &blocks)]));
                    for block in blocks {
                        remove(&mut model, worker, chains[prompt][block]);
                    }
                }
                Step::Truncate { worker, prompt, to } => {
                    let blocks: Vec<_> = (to..LENGTH).rev().collect();
                    index.apply(WorkerId(worker), &batch(vec![removed(worker, prompt, &blocks)]));
                    for block in blocks {
                        remove(&mut model, worker, chains[prompt][block]);
                    }
                }
                Step::Presume { worker, prompt, to } => {
                    index.presume(WorkerId(worker), &chains[prompt][..to]);
                    if model.contains_key(&worker) {
                        presumed.entry(worker).or_default().extend(&chains[prompt][..to]);
                    }
                }
                Step::Forget { worker, prompt, blocks } => {
                    let forgotten: Vec<_> =
                        blocks.iter().map(|block| chains[prompt][*block]).collect();
                    index.forget(WorkerId(worker), &forgotten);
                    let held = presumed.entry(worker).or_default();
                    held.retain(|key| !forgotten.contains(key));
                }
                Step::Clear { worker } => {
                    presumed.remove(&worker);
                    index.apply(WorkerId(worker), &batch(vec![KvEvent::AllBlocksCleared]));
                    model.entry(worker).and_modify(BTreeMap::clear);
                }
                Step::Replace { worker } => {
                    presumed.remove(&worker);
                    add(&index, worker);
                    model.insert(worker, BTreeMap::new());
                }
                Step::Leave { worker } => {
                    presumed.remove(&worker);
                    index.remove_worker(WorkerId(worker));
                    model.remove(&worker);
                }
                Step::Restore { worker } => {
                    let snapshot = index.snapshot(WorkerId(worker));
                    prop_assert_eq!(snapshot.is_some(), model.contains_key(&worker));
                    let stats = index.stats(WorkerId(worker));
                    if let (Some(snapshot), Some(stats)) = (snapshot, stats) {
                        prop_assert_eq!(snapshot.revision, stats.revision);
                        let revision = index.restore(WorkerId(worker), &snapshot.bytes);
                        prop_assert_eq!(revision, Ok(stats.revision));
                        let restored = index.stats(WorkerId(worker)).unwrap();
                        let counts = |stats: &WorkerIndexStats| {
                            (stats.blocks, stats.unkeyed_blocks, stats.revision)
                        };
                        prop_assert_eq!(counts(&restored), counts(&stats));
                    }
                }
            }
            if chores.waiting() > 3 {
                chores.run_one();
            }
            for keys in &chains {
                let expected: Vec<_> = model
                    .iter()
                    .map(|(id, held)| {
                        let presumed = presumed.get(id);
                        let is_held = |key: &&BlockKey| {
                            held.contains_key(key)
                                || presumed.is_some_and(|presumed| presumed.contains(key))
                        };
                        (WorkerId(*id), keys.iter().take_while(is_held).count())
                    })
                    .collect();
                prop_assert_eq!(&index.overlaps(keys), &expected);
                index.lookup(keys, &mut overlaps);
                let expected: Vec<_> =
                    expected.into_iter().filter(|(_, overlap)| *overlap > 0).collect();
                prop_assert_eq!(overlaps.found(), expected);
            }
        }
        chores.run_all();
        let stored_keys = model.values().flat_map(BTreeMap::keys);
        let distinct: BTreeSet<_> = stored_keys.chain(presumed.values().flatten()).collect();
        prop_assert_eq!(index.totals().blocks, distinct.len());
        for worker in 0..WORKERS {
            index.clear(WorkerId(worker));
        }
        chores.run_all();
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
    }
}

#[test]
fn unchanged_worker_is_stable_under_concurrent_events() {
    let tokens = prompt(1, 0);
    let chain = keys(&tokens);
    let index = PrefixIndex::new();
    (0..4).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    index.apply(WorkerId(0), &batch(vec![stored(0, &tokens, &chain, 0, 17)]));
    // The blocks that worker 1 always holds. A lookup may see any state within a batch.
    index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 0, 5)]));
    // One block of worker 3 is missing in the middle from the start.
    index.apply(
        WorkerId(3),
        &batch(vec![stored(3, &tokens, &chain, 0, 30), removed(3, [chain[9]])]),
    );
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A fixed number of rounds, so that a failure below does not block forever.
            for _ in 0..2000 {
                // Always at least the first 5 blocks.
                index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 0, LENGTH)]));
                index
                    .apply(WorkerId(1), &batch(vec![removed(1, chain[5..].iter().rev().copied())]));
                index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 5, 20)]));
                index.apply(
                    WorkerId(1),
                    &batch(vec![removed(1, chain[5..20].iter().rev().copied())]),
                );
                // An overlap of 25, 12 or 0: never the blocks after the hole.
                index.apply(WorkerId(2), &batch(vec![stored(2, &tokens, &chain, 0, 25)]));
                index.apply(WorkerId(2), &batch(vec![removed(2, [chain[12]])]));
                index.clear(WorkerId(2));
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let overlaps = index.overlaps(&chain);
            assert_eq!((overlaps[0].1, overlaps[3].1), (17, 9));
            assert!(overlaps[1].1 >= 5, "{overlaps:?}");
            assert!(overlaps[2].1 <= 25, "{overlaps:?}");
        }
    });
}

/// Blocks are released in steps after the list of workers has changed. A lookup with an older list
/// must not see the steps.
#[test]
fn lookup_sees_cleared_worker_before_or_after() {
    const BLOCKS: usize = 5 * super::release::MAX_BLOCKS_PER_LOCK;
    let tokens: Vec<TokenId> = (0..2 * BLOCKS as u32).map(TokenId).collect();
    let chain = keys(&tokens);
    let index = PrefixIndex::new();
    index.add_worker(WorkerId(0), BLOCK);
    let done = AtomicBool::new(false);
    let has_seen_both = AtomicBool::new(false);
    let mut overlaps = Overlaps::default();
    let mut seen = [0; 2];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            // On a busy machine, lookups may miss one of the two states for a long time.
            let is_enough = || {
                has_seen_both.load(Ordering::Relaxed) || start.elapsed() > Duration::from_secs(60)
            };
            for _ in (0..).take_while(|round| *round < 1000 || !is_enough()) {
                index.apply(WorkerId(0), &batch(vec![stored(0, &tokens, &chain, 0, BLOCKS)]));
                std::thread::yield_now();
                index.clear(WorkerId(0));
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            index.lookup(&chain, &mut overlaps);
            let overlap = overlaps.get(WorkerId(0));
            assert!(overlap == 0 || overlap == BLOCKS, "{overlap}");
            seen[overlap / BLOCKS] += 1;
            has_seen_both.store(seen[0] > 0 && seen[1] > 0, Ordering::Relaxed);
        }
    });
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn capped_index_keeps_used_blocks() {
    const CAP: usize = 600_000;
    let index = PrefixIndex::with_max_bytes(CAP);
    index.add_worker(WorkerId(0), BLOCK);
    index.add_worker(WorkerId(1), BLOCK);
    let used = prompt(1, 0);
    let used_keys = keys(&used);
    index.apply(WorkerId(0), &batch(vec![stored(0, &used, &used_keys, 0, LENGTH)]));
    for branch in 2..2000 {
        let tokens = prompt(branch, 0);
        let chain = keys(&tokens);
        index.apply(
            WorkerId(branch % 2),
            &batch(vec![stored(branch % 2, &tokens, &chain, 0, LENGTH)]),
        );
        assert!(index.totals().bytes <= CAP, "{:?}", index.totals());
        assert_eq!(index.overlaps(&used_keys)[0].1, LENGTH, "after {branch} prompts");
    }
    let totals = index.totals();
    let stored = 1999 * LENGTH;
    assert_eq!(totals.entries + totals.shed as usize, stored);
    assert!(totals.entries > 3000, "{totals:?}");
    assert_eq!(index.stats(WorkerId(0)).unwrap().unkeyed_blocks, 0);
    // Removals of shed blocks have no effect.
    for branch in 2..2000 {
        let chain = keys(&prompt(branch, 0));
        index.apply(
            WorkerId(branch % 2),
            &batch(vec![removed(branch % 2, chain.iter().rev().copied())]),
        );
    }
    assert_eq!(index.totals().entries, LENGTH);
    assert!(index.totals().bytes < CAP / 4);
}
