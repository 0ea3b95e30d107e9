//! Speed and memory of block keys and of the prefix index, at 1,000 workers and 10 million blocks.
//!
//! `cargo run --release -p chiasm-kv --example index [million entries]`, 0 for block keys alone;
//! docs/index.md has the numbers of one run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, MediaSpan, Overlaps, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, TokenId, WorkerId};

const WORKERS: u32 = 1000;
/// Workers whose snapshots are taken.
const FEW: u32 = 64;
const BLOCK: BlockSize = BlockSize::new(16).unwrap();
/// Blocks of the system prompt that every worker holds.
const SYSTEM: usize = 32;
/// Blocks of a conversation after it. Every fourth conversation is held by two workers.
const TURNS: usize = 64;

fn main() {
    let millions: usize =
        std::env::args().nth(1).and_then(|number| number.parse().ok()).unwrap_or(10);
    // First, while the allocator has nothing to spare.
    if millions == 0 {
        return hashing();
    }
    fleet(millions * 1_000_000 / WORKERS as usize / TURNS);
    handed_over(millions * 1_000_000 / FEW as usize / TURNS);
    capped();
    hashing();
    ladder();
}

/// Bytes of tokens per second, one thread, against keyed BLAKE3 of the same blocks, each keyed with
/// the one before.
fn hashing() {
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
        let (text, images) = (keys(&[][..]), keys(&media[..]));
        let blake3 = rate(Box::new(|| {
            let start = blake3::hash(b"");
            black_box(bytes.chunks_exact(4 * size as usize).fold(start, |before, block| {
                blake3::Hasher::new_keyed(before.as_bytes()).update(block).finalize()
            }));
        }));
        println!("{size:12} | {text:5.2} | {images:6.2} | {blake3:14.2} | {:.1}", text / blake3);
    }
}

/// Worker w holds the first 4 (w + 1) blocks of one prompt: as many distinct overlaps as there can
/// be.
fn ladder() {
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

/// Every worker full of conversations: memory, rates, lookups alone and beside events, removal.
fn fleet(conversations: usize) {
    let before = resident();
    let index = PrefixIndex::new();
    (0..WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let system = prompt(3, SYSTEM * BLOCK.get());
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
                stored(Some(SYSTEM as u64 - 1), number, &prompt(number, TURNS * BLOCK.get())),
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
        ("system prompt, 96 blocks", chains(conversations, Some(&system), 0, SYSTEM + TURNS)),
        ("conversation, 96 blocks", chains(conversations, Some(&system), TURNS, SYSTEM + TURNS)),
        ("conversation, 1,024 blocks", chains(conversations, Some(&system), TURNS, 1024)),
        ("conversation, 4,096 blocks", chains(conversations, Some(&system), TURNS, 4096)),
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
    let (stop, applied) = (AtomicBool::new(false), AtomicUsize::new(0));
    let churn = || {
        for round in 0.. {
            for worker in 0..WORKERS {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let number = u64::from(worker) << 32 | 1 << 60 | round;
                let events = [
                    stored(Some(SYSTEM as u64 - 1), number, &prompt(number, TURNS * BLOCK.get())),
                    removed(number, TURNS),
                ];
                events.iter().for_each(|batch| drop(index.apply(WorkerId(worker), batch)));
                applied.fetch_add(2 * TURNS, Ordering::Relaxed);
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
    println!("(beside {rate:.2} M blocks/s stored and removed, making the events included)");

    // It lies above the index's memory and would keep the allocator from giving that back.
    drop(cases);
    let mut removing = Duration::ZERO;
    for conversation in 0..conversations {
        for worker in 0..WORKERS {
            let batch = removed(number_of(worker, conversation), TURNS);
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

/// Fewer workers with as many blocks: snapshots, lookups and events meanwhile, and another index
/// that goes on from them.
fn handed_over(conversations: usize) {
    let index = PrefixIndex::new();
    (0..FEW).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let system = prompt(3, SYSTEM * BLOCK.get());
    let told = |index: &PrefixIndex, worker, batch: KvEventBatch| {
        drop(index.apply(WorkerId(worker), &batch))
    };
    (0..FEW).for_each(|worker| told(&index, worker, stored(None, 0, &system)));
    for conversation in 0..conversations {
        for worker in 0..FEW {
            let number = number_of(worker, conversation);
            told(
                &index,
                worker,
                stored(Some(SYSTEM as u64 - 1), number, &prompt(number, TURNS * BLOCK.get())),
            );
        }
    }
    let entries = index.totals().entries;
    let keys = chains_of(FEW, conversations, Some(&system), TURNS, SYSTEM + TURNS);
    let look_up = |stop: &AtomicBool| {
        let (mut overlaps, mut longest, mut number) = (Overlaps::default(), Duration::ZERO, 0_u64);
        while !stop.load(Ordering::Relaxed) {
            let keys = &keys[number as usize % keys.len()];
            longest = longest.max(time(|| index.lookup(keys, &mut overlaps)));
            number += 1;
        }
        (longest, number)
    };
    let beside = |work: &mut dyn FnMut()| {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lookups = scope.spawn(|| look_up(&stop));
            let took = time(work);
            stop.store(true, Ordering::Relaxed);
            (took, lookups.join().unwrap())
        })
    };
    println!("\n{FEW} workers, {entries} entries: snapshots, and another index that reads them");
    let mut snapshots = Vec::new();
    let mut longest_one = Duration::ZERO;
    let (took, (longest, lookups)) = beside(&mut || {
        for worker in 0..FEW {
            longest_one = longest_one.max(time(|| {
                snapshots.extend(index.snapshot(WorkerId(worker)).map(|snapshot| snapshot.bytes))
            }));
        }
    });
    let bytes: usize = snapshots.iter().map(Vec::len).sum();
    println!(
        "written in {:.2} s, one worker in {:.1} ms at most, {:.1} bytes per entry",
        took.as_secs_f64(),
        longest_one.as_secs_f64() * 1e3,
        bytes as f64 / entries as f64
    );
    println!("the longest of {lookups} lookups meanwhile: {:.2} ms", longest.as_secs_f64() * 1e3);
    let (_, (longest, lookups)) = beside(&mut || std::thread::sleep(took));
    println!(
        "the longest of {lookups} lookups beside nothing: {:.2} ms",
        longest.as_secs_f64() * 1e3
    );
    let next = PrefixIndex::new();
    let took = time(|| {
        for (worker, snapshot) in (0..).zip(&snapshots) {
            next.restore(WorkerId(worker), snapshot).unwrap();
        }
    });
    println!("read in {:.2} s", took.as_secs_f64());
    let (was, is) = (index.totals(), next.totals());
    assert_eq!((was.entries, was.blocks), (is.entries, is.blocks));
    for keys in &keys {
        assert_eq!(index.overlaps(keys), next.overlaps(keys));
    }
    println!("{} prompts have the same overlaps in both", keys.len());
}

/// Three times as many blocks as fit.
fn capped() {
    const CAP: usize = 64_000_000;
    let index = PrefixIndex::with_max_bytes(CAP);
    (0..WORKERS).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
    let (mut most, mut applying, mut longest) = (0, Duration::ZERO, Duration::ZERO);
    let mut stored_blocks = 0;
    while stored_blocks * 24 < 3 * CAP {
        for worker in 0..WORKERS {
            let number = u64::from(worker) << 32 | stored_blocks as u64;
            let batch = stored(None, number, &prompt(number, TURNS * BLOCK.get()));
            let took = time(|| drop(index.apply(WorkerId(worker), &batch)));
            (applying, longest) = (applying + took, longest.max(took));
            stored_blocks += TURNS;
            most = most.max(if worker % 100 == 0 { index.totals().bytes } else { 0 });
        }
    }
    let totals = index.totals();
    println!(
        "\ncap {} MB: {stored_blocks} stored, {} held, {} shed",
        CAP / 1_000_000,
        totals.entries,
        totals.shed
    );
    println!("at most {:.1} MB; {:.1} MB at the end", most as f64 / 1e6, totals.bytes as f64 / 1e6);
    let rate = stored_blocks as f64 / applying.as_secs_f64() / 1e6;
    println!("{rate:.2} M blocks/s, the longest batch {:.1} ms", longest.as_secs_f64() * 1e3);
}

fn number_of(worker: u32, conversation: usize) -> u64 {
    let owner = if conversation.is_multiple_of(4) { worker & !1 } else { worker };
    u64::from(owner) << 32 | (conversation as u64 + 1) << 8
}

fn chains(
    conversations: usize,
    system: Option<&[TokenId]>,
    held: usize,
    length: usize,
) -> Vec<Vec<BlockKey>> {
    chains_of(WORKERS, conversations, system, held, length)
}

/// Prompts of `length` blocks: the system prompt, so many blocks of a conversation that one of so
/// many workers holds, then others.
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
        tokens.extend(&prompt(number, TURNS * BLOCK.get())[..held * BLOCK.get()]);
        tokens.extend(prompt(1 << 50 | n as u64, length * BLOCK.get() - tokens.len()));
        block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, BLOCK)
    };
    (0..2000).map(chain).collect()
}

fn prompt(seed: u64, tokens: usize) -> Vec<TokenId> {
    (0..tokens as u64).map(|at| TokenId((mixed(seed ^ at << 20) % 150_000) as u32)).collect()
}

/// Hashes as an engine would send them, for the blocks `number`, `number + 1`, ….
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

/// Last block first, as vLLM evicts.
fn removed(number: u64, blocks: usize) -> KvEventBatch {
    let block_hashes = hashes(number, blocks).into_iter().rev().collect();
    batch(KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() }))
}

fn batch(event: KvEvent) -> KvEventBatch {
    KvEventBatch { timestamp: 0.0, events: vec![event], data_parallel_rank: None }
}

/// splitmix64.
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

/// Bytes of this process in memory; 0 where there is no `/proc`.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next())
        .and_then(|kib| kib.parse::<usize>().ok())
        .unwrap_or(0)
        * 1024
}
