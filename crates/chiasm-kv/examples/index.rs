//! Measures speed and memory of block keys and of the prefix index, at 1,000 workers and 10 million
//! blocks.
//!
//! Run `cargo run --release -p chiasm-kv --example index [million entries]`; 0 measures block keys
//! alone. docs/prefix-index.md has the numbers of one run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, MediaSpan, Overlaps, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, TokenId, WorkerId};

const WORKERS: u32 = 1000;
/// The number of workers in the measurement of snapshots.
const SNAPSHOT_WORKERS: u32 = 64;
const BLOCK: BlockSize = BlockSize::new(16).unwrap();
/// The number of blocks of the system prompt, which every worker holds.
const SYSTEM_BLOCKS: usize = 32;
/// The number of blocks of a conversation after the system prompt. Two workers hold every fourth
/// conversation.
const CONVERSATION_BLOCKS: usize = 64;

fn main() {
    let millions: usize =
        std::env::args().nth(1).and_then(|number| number.parse().ok()).unwrap_or(10);
    if millions == 0 {
        return measure_hashing();
    }
    // The fleet comes first, while the allocator has no free memory to reuse.
    measure_fleet(millions * 1_000_000 / WORKERS as usize / CONVERSATION_BLOCKS);
    measure_snapshots(millions * 1_000_000 / SNAPSHOT_WORKERS as usize / CONVERSATION_BLOCKS);
    measure_cap();
    measure_hashing();
    measure_distinct_overlaps();
}

/// Measures bytes of tokens hashed per second on one thread, against BLAKE3 of the same blocks,
/// each keyed with the hash of the previous block.
fn measure_hashing() {
    println!("block keys, GB/s of tokens, one thread, median of 21 rounds over 4,096 blocks");
    println!("block tokens |  text | images | chained BLAKE3 | text : BLAKE3");
    for size in [16, 32, 64, 128] {
        let block_size = BlockSize::new(size).unwrap();
        let tokens = prompt(1, 4096 * size as usize);
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect();
        let media: Vec<MediaSpan> = (0..tokens.len() / 1024)
            .map(|item| MediaSpan {
                hash: MmHash::new([item as u8; 32]),
                offset: item * 1024,
                length: 1000,
            })
            .collect();
        let rate = |mut round: Box<dyn FnMut() + '_>| {
            let times = (0..21).map(|_| time(&mut round)).collect();
            bytes.len() as f64 / median(times).as_secs_f64() / 1e9
        };
        let keys = |media| {
            let prompt = PromptBlocks { tokens: &tokens, media, ..Default::default() };
            rate(Box::new(move || drop(black_box(block_keys(&prompt, block_size)))))
        };
        let text = keys(&[][..]);
        let images = keys(&media[..]);
        let blake3 = rate(Box::new(|| {
            let start = blake3::hash(b"");
            black_box(bytes.chunks_exact(4 * size as usize).fold(start, |before, block| {
                blake3::Hasher::new_keyed(before.as_bytes()).update(block).finalize()
            }));
        }));
        println!("{size:12} | {text:5.2} | {images:6.2} | {blake3:14.2} | {:.1}", text / blake3);
    }
}

/// Measures lookups with as many distinct overlaps as possible: worker w holds the first 4 (w + 1)
/// blocks of one prompt.
fn measure_distinct_overlaps() {
    let index = PrefixIndex::new();
    let tokens = prompt(2, 4096 * BLOCK.get());
    let keys = block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BLOCK);
    let mut naive: Vec<HashSet<BlockKey>> = Vec::new();
    for worker in 0..WORKERS {
        index.add_worker(WorkerId(worker), BLOCK);
        let blocks = 4 * (worker as usize + 1);
        index.apply(WorkerId(worker), &stored(None, 0, &tokens[..blocks * BLOCK.get()]));
        naive.push(keys[..blocks].iter().copied().collect());
    }
    println!(
        "\nlookup, 1,000 workers with different overlaps of one prompt, one thread, median of 101"
    );
    println!("blocks | distinct overlaps |  index µs | set per worker µs | ratio");
    let mut overlaps = Overlaps::default();
    for length in [32, 128, 512, 2048, 4096] {
        let keys = &keys[..length];
        let ours = median((0..101).map(|_| time(|| index.lookup(keys, &mut overlaps))).collect());
        let mut expected = Vec::new();
        let theirs = median(
            (0..5)
                .map(|_| {
                    time(|| {
                        let overlap = |set: &HashSet<BlockKey>| {
                            keys.iter().take_while(|key| set.contains(key)).count()
                        };
                        expected = (0..).map(WorkerId).zip(naive.iter().map(overlap)).collect();
                    })
                })
                .collect(),
        );
        assert_eq!(overlaps.found(), expected);
        let distinct: HashSet<usize> =
            overlaps.found().iter().map(|(_, overlap)| *overlap).collect();
        let ratio = theirs.as_secs_f64() / ours.as_secs_f64();
        println!(
            "{length:6} | {:17} | {:9.1} | {:17.1} | {ratio:.0}",
            distinct.len(),
            micros(ours),
            micros(theirs)
        );
    }
}

/// Measures a fleet of workers full of conversations: memory, event rates, lookups alone and with
/// concurrent events, removal.
fn measure_fleet(conversations: usize) {
    let before = resident();
    let index = PrefixIndex::new();
    (0..WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let system = prompt(3, SYSTEM_BLOCKS * BLOCK.get());
    let mut applying = Duration::ZERO;
    let mut apply = |worker, batch: KvEventBatch| {
        applying += time(|| drop(index.apply(WorkerId(worker), &batch)))
    };
    (0..WORKERS).for_each(|worker| apply(worker, stored(None, 0, &system)));
    for conversation in 0..conversations {
        for worker in 0..WORKERS {
            let number = number_of(worker, conversation);
            apply(
                worker,
                stored(
                    Some(SYSTEM_BLOCKS as u64 - 1),
                    number,
                    &prompt(number, CONVERSATION_BLOCKS * BLOCK.get()),
                ),
            );
        }
    }
    let totals = index.totals();
    let entries = totals.entries as f64;
    let grown = resident().saturating_sub(before);
    println!(
        "\n1,000 workers, {} entries (worker, block), {} distinct blocks",
        totals.entries, totals.blocks
    );
    println!(
        "events of 64 blocks stored, one thread: {:.2} M blocks/s",
        entries / applying.as_secs_f64() / 1e6
    );
    println!(
        "index: {:.0} MB, {:.1} bytes per entry",
        totals.bytes as f64 / 1e6,
        totals.bytes as f64 / entries
    );
    println!(
        "resident memory grew by {:.0} MB, {:.1} bytes per entry",
        grown as f64 / 1e6,
        grown as f64 / entries
    );

    println!("\nlookups, µs                    |   alone p50 / p99 | beside events p50 / p99");
    let cases: Vec<(&str, Vec<Vec<BlockKey>>)> = vec![
        ("unknown, 32 blocks", chains(conversations, None, 0, 32)),
        (
            "system prompt, 96 blocks",
            chains(conversations, Some(&system), 0, SYSTEM_BLOCKS + CONVERSATION_BLOCKS),
        ),
        (
            "conversation, 96 blocks",
            chains(
                conversations,
                Some(&system),
                CONVERSATION_BLOCKS,
                SYSTEM_BLOCKS + CONVERSATION_BLOCKS,
            ),
        ),
        (
            "conversation, 1,024 blocks",
            chains(conversations, Some(&system), CONVERSATION_BLOCKS, 1024),
        ),
        (
            "conversation, 4,096 blocks",
            chains(conversations, Some(&system), CONVERSATION_BLOCKS, 4096),
        ),
    ];
    let run = |keys: &[Vec<BlockKey>]| {
        let mut overlaps = Overlaps::default();
        let mut times: Vec<_> =
            keys.iter().map(|keys| time(|| index.lookup(keys, &mut overlaps))).collect();
        times.sort_unstable();
        format!(
            "{:.1} / {:.1}",
            micros(times[times.len() / 2]),
            micros(times[times.len() * 99 / 100])
        )
    };
    let stop = AtomicBool::new(false);
    let applied = AtomicUsize::new(0);
    let churn = || {
        for round in 0.. {
            for worker in 0..WORKERS {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let number = u64::from(worker) << 32 | 1 << 60 | round;
                let events = [
                    stored(
                        Some(SYSTEM_BLOCKS as u64 - 1),
                        number,
                        &prompt(number, CONVERSATION_BLOCKS * BLOCK.get()),
                    ),
                    removed(number, CONVERSATION_BLOCKS),
                ];
                events.iter().for_each(|batch| drop(index.apply(WorkerId(worker), batch)));
                applied.fetch_add(2 * CONVERSATION_BLOCKS, Ordering::Relaxed);
            }
        }
    };
    let alone: Vec<String> = cases.iter().map(|(_, keys)| run(keys)).collect();
    let (beside, took) = std::thread::scope(|scope| {
        scope.spawn(churn);
        let start = Instant::now();
        let beside: Vec<String> = cases.iter().map(|(_, keys)| run(keys)).collect();
        stop.store(true, Ordering::Relaxed);
        (beside, start.elapsed())
    });
    for (((name, _), alone), beside) in cases.iter().zip(alone).zip(beside) {
        println!("{name:30} | {alone:>17} | {beside:>17}");
    }
    let rate = applied.load(Ordering::Relaxed) as f64 / took.as_secs_f64() / 1e6;
    println!("(events: {rate:.2} M blocks/s stored and removed, including making the events)");

    // The keys lie above the index's memory and would keep the allocator from freeing it.
    drop(cases);
    let mut removing = Duration::ZERO;
    for conversation in 0..conversations {
        for worker in 0..WORKERS {
            let batch = removed(number_of(worker, conversation), CONVERSATION_BLOCKS);
            removing += time(|| drop(index.apply(WorkerId(worker), &batch)));
        }
    }
    let left = index.totals();
    let gone = (totals.entries - left.entries) as f64;
    println!("\nremoved, one thread: {:.2} M blocks/s", gone / removing.as_secs_f64() / 1e6);
    println!(
        "left: {} entries, {} blocks, {:.1} MB",
        left.entries,
        left.blocks,
        left.bytes as f64 / 1e6
    );
    println!(
        "resident memory above the start: {:.0} MB",
        resident().saturating_sub(before) as f64 / 1e6
    );
}

/// Measures snapshots of fewer workers with as many blocks, the lookups during the snapshots, and
/// another index that restores the snapshots.
fn measure_snapshots(conversations: usize) {
    let index = PrefixIndex::new();
    (0..SNAPSHOT_WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let system = prompt(3, SYSTEM_BLOCKS * BLOCK.get());
    let apply = |worker, batch: KvEventBatch| drop(index.apply(WorkerId(worker), &batch));
    (0..SNAPSHOT_WORKERS).for_each(|worker| apply(worker, stored(None, 0, &system)));
    for conversation in 0..conversations {
        for worker in 0..SNAPSHOT_WORKERS {
            let number = number_of(worker, conversation);
            apply(
                worker,
                stored(
                    Some(SYSTEM_BLOCKS as u64 - 1),
                    number,
                    &prompt(number, CONVERSATION_BLOCKS * BLOCK.get()),
                ),
            );
        }
    }
    let entries = index.totals().entries;
    let keys = chains_of(
        SNAPSHOT_WORKERS,
        conversations,
        Some(&system),
        CONVERSATION_BLOCKS,
        SYSTEM_BLOCKS + CONVERSATION_BLOCKS,
    );
    let look_up = |stop: &AtomicBool| {
        let mut overlaps = Overlaps::default();
        let mut longest = Duration::ZERO;
        let mut number = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            let keys = &keys[number as usize % keys.len()];
            longest = longest.max(time(|| index.lookup(keys, &mut overlaps)));
            number += 1;
        }
        (longest, number)
    };
    let with_lookups = |work: &mut dyn FnMut()| {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lookups = scope.spawn(|| look_up(&stop));
            let took = time(work);
            stop.store(true, Ordering::Relaxed);
            (took, lookups.join().unwrap())
        })
    };
    println!(
        "\n{SNAPSHOT_WORKERS} workers, {entries} entries: \
         snapshots, and another index that reads them"
    );
    let mut snapshots = Vec::new();
    let mut longest_snapshot = Duration::ZERO;
    let (took, (longest, lookups)) = with_lookups(&mut || {
        for worker in 0..SNAPSHOT_WORKERS {
            longest_snapshot = longest_snapshot.max(time(|| {
                snapshots.extend(index.snapshot(WorkerId(worker)).map(|snapshot| snapshot.bytes))
            }));
        }
    });
    let bytes: usize = snapshots.iter().map(Vec::len).sum();
    println!(
        "written in {:.2} s, one worker in {:.1} ms at most, {:.1} bytes per entry",
        took.as_secs_f64(),
        longest_snapshot.as_secs_f64() * 1e3,
        bytes as f64 / entries as f64
    );
    println!("the longest of {lookups} lookups during it: {:.2} ms", longest.as_secs_f64() * 1e3);
    let (_, (longest, lookups)) = with_lookups(&mut || std::thread::sleep(took));
    println!(
        "the longest of {lookups} lookups without snapshots: {:.2} ms",
        longest.as_secs_f64() * 1e3
    );
    let next = PrefixIndex::new();
    let took = time(|| {
        for (worker, snapshot) in (0..).zip(&snapshots) {
            next.restore(WorkerId(worker), snapshot).unwrap();
        }
    });
    println!("read in {:.2} s", took.as_secs_f64());
    let totals = index.totals();
    let restored = next.totals();
    assert_eq!((totals.entries, totals.blocks), (restored.entries, restored.blocks));
    for keys in &keys {
        assert_eq!(index.overlaps(keys), next.overlaps(keys));
    }
    println!("{} prompts have the same overlaps in both", keys.len());
}

/// Measures an index with a cap, under three times as many blocks as fit.
fn measure_cap() {
    const CAP: usize = 64_000_000;
    let index = PrefixIndex::with_max_bytes(CAP);
    (0..WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let mut max_bytes = 0;
    let mut applying = Duration::ZERO;
    let mut longest = Duration::ZERO;
    let mut stored_blocks = 0;
    while stored_blocks * 24 < 3 * CAP {
        for worker in 0..WORKERS {
            let number = u64::from(worker) << 32 | stored_blocks as u64;
            let batch = stored(None, number, &prompt(number, CONVERSATION_BLOCKS * BLOCK.get()));
            let took = time(|| drop(index.apply(WorkerId(worker), &batch)));
            applying += took;
            longest = longest.max(took);
            stored_blocks += CONVERSATION_BLOCKS;
            if worker % 100 == 0 {
                max_bytes = max_bytes.max(index.totals().bytes);
            }
        }
    }
    let totals = index.totals();
    println!(
        "\ncap {} MB: {stored_blocks} stored, {} held, {} shed",
        CAP / 1_000_000,
        totals.entries,
        totals.shed
    );
    println!(
        "at most {:.1} MB; {:.1} MB at the end",
        max_bytes as f64 / 1e6,
        totals.bytes as f64 / 1e6
    );
    let rate = stored_blocks as f64 / applying.as_secs_f64() / 1e6;
    println!("{rate:.2} M blocks/s, the longest batch {:.1} ms", longest.as_secs_f64() * 1e3);
}

/// Returns the number of the first block of a worker's conversation.
fn number_of(worker: u32, conversation: usize) -> u64 {
    let owner = if conversation.is_multiple_of(4) { worker & !1 } else { worker };
    u64::from(owner) << 32 | (conversation as u64 + 1) << 8
}

/// Returns prompts like [`chains_of`], for the workers of the fleet.
fn chains(
    conversations: usize,
    system: Option<&[TokenId]>,
    held: usize,
    length: usize,
) -> Vec<Vec<BlockKey>> {
    chains_of(WORKERS, conversations, system, held, length)
}

/// Returns the keys of prompts of `length` blocks: the system prompt, `held` blocks of a
/// conversation of one of `workers` workers, then unknown blocks.
fn chains_of(
    workers: u32,
    conversations: usize,
    system: Option<&[TokenId]>,
    held: usize,
    length: usize,
) -> Vec<Vec<BlockKey>> {
    let chain = |n: usize| {
        let mut tokens = system.unwrap_or_default().to_vec();
        let number = number_of(n as u32 * 37 % workers, n * 101 % conversations);
        tokens.extend(&prompt(number, CONVERSATION_BLOCKS * BLOCK.get())[..held * BLOCK.get()]);
        tokens.extend(prompt(1 << 50 | n as u64, length * BLOCK.get() - tokens.len()));
        block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BLOCK)
    };
    (0..2000).map(chain).collect()
}

/// Returns a prompt of pseudo-random tokens.
fn prompt(seed: u64, tokens: usize) -> Vec<TokenId> {
    (0..tokens as u64).map(|at| TokenId((mixed(seed ^ at << 20) % 150_000) as u32)).collect()
}

/// Returns hashes like those of an engine, for the blocks `number`, `number + 1`, ….
fn hashes(number: u64, blocks: usize) -> Vec<ExternalHash> {
    (number..number + blocks as u64).map(|number| ExternalHash::U64(mixed(number))).collect()
}

fn stored(parent: Option<u64>, number: u64, tokens: &[TokenId]) -> KvEventBatch {
    batch(KvEvent::BlockStored(BlockStored {
        block_hashes: hashes(number, tokens.len() / BLOCK.get()),
        parent_block_hash: parent.map(|parent| ExternalHash::U64(mixed(parent))),
        token_ids: tokens.to_vec(),
        block_size: BLOCK.get() as u32,
        ..Default::default()
    }))
}

/// Returns the removal of blocks, the last block first as in vLLM's evictions.
fn removed(number: u64, blocks: usize) -> KvEventBatch {
    let block_hashes = hashes(number, blocks).into_iter().rev().collect();
    batch(KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() }))
}

fn batch(event: KvEvent) -> KvEventBatch {
    KvEventBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None }
}

/// Returns the next output of splitmix64.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

fn time(mut work: impl FnMut()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns the resident memory of this process in bytes, or 0 where there is no `/proc`.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next())
        .and_then(|kib| kib.parse::<usize>().ok())
        .unwrap_or(0)
        * 1024
}
