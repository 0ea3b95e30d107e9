//! Lookups against a model that knows what each worker holds: many workers, long chains, holes,
//! both schemes of keys, snapshots, caps, threads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chiasm_types::TokenId;
use proptest::collection::vec;
use proptest::prelude::*;

use super::leaving_tests::Chores;
use super::*;
use crate::event::{BlockRemoved, BlockStored, ExternalHash};
use crate::{EngineHashKeys, PromptBlocks, block_keys};

const BLOCK: BlockSize = BlockSize::new(1).unwrap();
/// Places in more than one word, and more than one list takes.
const WORKERS: u32 = 70;
const LENGTH: usize = 40;

/// Prompts that cache at some block: the first `shared` tokens are the same.
fn prompt(branch: u32, shared: usize) -> Vec<TokenId> {
    (0..LENGTH).map(|at| TokenId(if at < shared { 0 } else { branch })).collect()
}

fn keys(tokens: &[TokenId]) -> Vec<BlockKey> {
    block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK)
}

/// The engine's name: of the key's own bits, not those that presumed blocks are named by. Some
/// engines name blocks alike, and some of these do for some blocks only.
fn name(worker: u32, key: BlockKey) -> ExternalHash {
    let alike = match worker % 4 {
        0 | 1 => true,
        2 => key.get() & 6 != 0,
        _ => false,
    };
    ExternalHash::U64((key.get() >> 63) as u64 ^ if alike { 0 } else { u64::from(worker) << 40 })
}

/// What engines are called that all name blocks alike, and tell nothing else of them.
const HASHING: &str = "alike";

/// The keys that lookups go by, for blocks with these keys of their content.
fn keys_of(contents: &[BlockKey], hashing: Option<&EngineHashKeys>) -> Vec<BlockKey> {
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
    /// Removes blocks from anywhere, children or not.
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
    /// Presumes blocks as of a worker without events; most steps happen to others.
    Presume {
        worker: u32,
        prompt: usize,
        to: usize,
    },
    /// Forgets blocks from anywhere, last block first or not, presumed or not.
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
    /// Becomes what a snapshot of it says.
    Restore {
        worker: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    // Most of what happens happens to few of them.
    let (worker, prompt) = (|| prop_oneof![0..WORKERS, 0..4u32], || 0..4usize);
    prop_oneof![
        12 => (worker(), prompt(), 0..3usize, 0..=LENGTH).prop_map(|(worker, prompt, cut, to)| {
            Step::Store { worker, prompt, from: if cut == 0 { to / 2 } else { 0 }, to }
        }),
        4 => (worker(), prompt(), vec(0..LENGTH, 1..4))
            .prop_map(|(worker, prompt, blocks)| Step::Remove { worker, prompt, blocks }),
        4 => (worker(), prompt(), 0..LENGTH).prop_map(|(worker, prompt, to)| Step::Truncate { worker, prompt, to }),
        4 => (worker(), prompt(), 0..=LENGTH).prop_map(|(worker, prompt, to)| Step::Presume { worker, prompt, to }),
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

/// Copies of each key that a worker holds and that the events tell.
type Model = BTreeMap<u32, BTreeMap<BlockKey, u32>>;

/// Keys that a worker is believed to hold.
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
    fn overlaps_are_those_of_the_model(
        shared in vec(0..LENGTH, 4),
        everyone in 0..=LENGTH,
        steps in vec(step(), 0..120),
        late in any::<bool>(),
        hashing in any::<bool>(),
    ) {
        let prompts: Vec<_> = shared.iter().zip(1..).map(|(shared, branch)| prompt(branch, *shared)).collect();
        let contents: Vec<_> = prompts.iter().map(|tokens| keys(tokens)).collect();
        let hashing = EngineHashKeys::new(HASHING).filter(|_| hashing);
        let chains: Vec<_> = contents.iter().map(|contents| keys_of(contents, hashing.as_ref())).collect();
        let scheme = || hashing.clone().map_or(KeyScheme::Content, KeyScheme::EngineHashes);
        let add = |index: &PrefixIndex, worker| index.add_worker_with(WorkerId(worker), BLOCK, scheme());
        let named = |worker: u32| if hashing.is_some() { 0 } else { worker };
        let stored = |worker: u32, prompt: usize, from: usize, to: usize| {
            let mut event = stored(named(worker), &prompts[prompt], &contents[prompt], from, to);
            if let (KvEvent::BlockStored(stored), Some(_)) = (&mut event, &hashing) {
                stored.token_ids.clear();
            }
            event
        };
        let removed = |worker: u32, prompt: usize, blocks: &[usize]| {
            removed(named(worker), blocks.iter().map(|block| contents[prompt][*block]))
        };
        let chores = Chores::default();
        let index = if late { chores.of(PrefixIndex::new()) } else { PrefixIndex::new() };
        let (mut model, mut presumed) = (Model::new(), Presumed::new());
        for worker in 0..WORKERS {
            add(&index, worker);
            index.apply(WorkerId(worker), &batch(vec![stored(worker, 0, 0, everyone)]));
            model.insert(worker, BTreeMap::new());
            store(&mut model, worker, &chains[0], 0, everyone);
        }
        let mut overlaps = Overlaps::default();
        for step in steps {
            match step {
                Step::Store { worker, prompt, from, to } => {
                    let keys = &chains[prompt];
                    // Without its parent a block is not told; tests/prefix_index.rs has that.
                    let told = |held: &BTreeMap<_, _>| from == 0 || held.contains_key(&keys[from - 1]);
                    if !model.get(&worker).is_some_and(told) {
                        continue;
                    }
                    index.apply(WorkerId(worker), &batch(vec![stored(worker, prompt, from, to)]));
                    store(&mut model, worker, keys, from, to);
                }
                Step::Remove { worker, prompt, blocks } => {
                    index.apply(WorkerId(worker), &batch(vec![removed(worker, prompt, &blocks)]));
                    blocks.iter().for_each(|block| remove(&mut model, worker, chains[prompt][*block]));
                }
                Step::Truncate { worker, prompt, to } => {
                    let blocks: Vec<_> = (to..LENGTH).rev().collect();
                    index.apply(WorkerId(worker), &batch(vec![removed(worker, prompt, &blocks)]));
                    blocks.iter().for_each(|block| remove(&mut model, worker, chains[prompt][*block]));
                }
                Step::Presume { worker, prompt, to } => {
                    index.presume(WorkerId(worker), &chains[prompt][..to]);
                    if model.contains_key(&worker) {
                        presumed.entry(worker).or_default().extend(&chains[prompt][..to]);
                    }
                }
                Step::Forget { worker, prompt, blocks } => {
                    let gone: Vec<_> = blocks.iter().map(|block| chains[prompt][*block]).collect();
                    index.forget(WorkerId(worker), &gone);
                    let held = presumed.entry(worker).or_default();
                    held.retain(|key| !gone.contains(key));
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
                        prop_assert_eq!(index.restore(WorkerId(worker), &snapshot.bytes), Ok(stats.revision));
                        let restored = index.stats(WorkerId(worker)).unwrap();
                        let counts = |stats: &WorkerIndexStats| (stats.blocks, stats.unkeyed_blocks, stats.revision);
                        prop_assert_eq!(counts(&restored), counts(&stats));
                    }
                }
            }
            if chores.waiting() > 3 {
                chores.do_one();
            }
            for keys in &chains {
                let expected: Vec<_> = model
                    .iter()
                    .map(|(id, held)| {
                        let presumed = |key: &BlockKey| presumed.get(id).is_some_and(|presumed| presumed.contains(key));
                        let held = |key: &&BlockKey| held.contains_key(key) || presumed(key);
                        (WorkerId(*id), keys.iter().take_while(held).count())
                    })
                    .collect();
                prop_assert_eq!(&index.overlaps(keys), &expected);
                index.lookup(keys, &mut overlaps);
                let expected: Vec<_> = expected.into_iter().filter(|(_, overlap)| *overlap > 0).collect();
                prop_assert_eq!(overlaps.found(), expected);
            }
        }
        chores.do_all();
        let distinct: BTreeSet<_> = model.values().flat_map(BTreeMap::keys).chain(presumed.values().flatten()).collect();
        prop_assert_eq!(index.totals().blocks, distinct.len());
        for worker in 0..WORKERS {
            index.clear(WorkerId(worker));
        }
        chores.do_all();
        let totals = index.totals();
        prop_assert_eq!((totals.blocks, totals.entries, totals.nodes), (0, 0, 0));
    }
}

#[test]
fn a_worker_that_stands_still_is_seen_as_it_is_while_others_change() {
    let tokens = prompt(1, 0);
    let chain = keys(&tokens);
    let index = PrefixIndex::new();
    (0..4).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    index.apply(WorkerId(0), &batch(vec![stored(0, &tokens, &chain, 0, 17)]));
    // What worker 1 always holds: a lookup may see any cache of a batch that is being applied.
    index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 0, 5)]));
    // One block of worker 3 is missing in the middle from the start.
    index.apply(
        WorkerId(3),
        &batch(vec![stored(3, &tokens, &chain, 0, 30), removed(3, [chain[9]])]),
    );
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A number of rounds, so that a failure below does not wait for ever.
            for _ in 0..2000 {
                // Always at least 5, in order.
                index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 0, LENGTH)]));
                index
                    .apply(WorkerId(1), &batch(vec![removed(1, chain[5..].iter().rev().copied())]));
                index.apply(WorkerId(1), &batch(vec![stored(1, &tokens, &chain, 5, 20)]));
                index.apply(
                    WorkerId(1),
                    &batch(vec![removed(1, chain[5..20].iter().rev().copied())]),
                );
                // 25 or 12: never what lies beyond the hole; or nothing.
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

/// Blocks leave a tree some at a time, after the list of workers has changed: buffers that know an
/// older list see none of that.
#[test]
fn a_worker_that_is_cleared_is_seen_as_before_or_after() {
    const BLOCKS: usize = 5 * super::leaving::BLOCKS;
    let tokens: Vec<TokenId> = (0..2 * BLOCKS as u32).map(TokenId).collect();
    let chain = keys(&tokens);
    let index = PrefixIndex::new();
    index.add_worker(WorkerId(0), BLOCK);
    let (done, has_seen_both) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut overlaps, mut seen) = (Overlaps::default(), [0; 2]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            // On a busy machine lookups may miss all moments of one kind for long.
            let is_enough = || {
                has_seen_both.load(Ordering::Relaxed) || begun.elapsed() > Duration::from_secs(60)
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
            let overlap = overlaps.of(WorkerId(0));
            assert!(overlap == 0 || overlap == BLOCKS, "{overlap}");
            seen[overlap / BLOCKS] += 1;
            has_seen_both.store(seen[0] > 0 && seen[1] > 0, Ordering::Relaxed);
        }
    });
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn a_cap_holds_counts_and_keeps_what_is_used() {
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
    // What was shed is nothing that the engine can take away.
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
