//! Traces of a fleet that serves conversations: who asks what, which worker answers, what its cache
//! does.
//!
//! | | |
//! |---|---|
//! | system prompts | 4, of 48 to 128 blocks; each request starts with one |
//! | documents | two for each worker and at least 500, of 32 to 256 blocks; 4 of 10 conversations are about one; by Zipf's law, exponent 1 |
//! | conversations | 1 to 12 turns; a question of 1 to 32 blocks, an answer of 2 to 24 |
//! | workers | a conversation about a document starts at the document's worker or at any, with even chances; 1 of 10 later turns goes to another worker |
//! | stored | a question, and what else of the prompt is missing: up to 64 blocks an event; an answer: block by block, up to 4 answers side by side |
//! | removed | least recently used first, leaves before roots: up to 64 blocks an event |

use dynamo_kv_router::protocols::{BlockHashOptions, compute_block_hash_for_seq, compute_next_seq_hash};
use fastrand::Rng;
use peers::numbers::Zipf;

use crate::cache::Cache;
use crate::trace::{BLOCK_SIZE, Event, NO_PARENT, Run, Trace, block_tokens};

/// How large the fleet is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fleet {
    pub(crate) workers: u32,
    /// Capacity of each worker's cache. A multiple of the longest prompt, which has about 1,000.
    pub(crate) blocks: usize,
}

const SYSTEM_PROMPTS: usize = 4;
const TURNS: u32 = 12;
/// Answers that a worker makes side by side.
const ACTIVE: usize = 4;
/// Most blocks in an event.
const EVENT: u32 = 64;
/// Conversations that go on, per worker.
const OPEN: usize = 6;
/// How many prompts are written down each time.
const PROMPTS: usize = 4096;

/// Fills all caches to nine tenths, then goes on for so many stored and removed blocks.
pub(crate) fn make(fleet: &Fleet, steady: usize, seed: u64) -> Trace {
    let mut workload = Workload::new(fleet, seed);
    let full = fleet.workers as usize * fleet.blocks / 10 * 9;
    while workload.workers.iter().map(|worker| worker.cache.blocks()).sum::<usize>() < full {
        // The sum takes as long as some requests.
        for _ in 0..1 + fleet.workers / 8 {
            workload.request();
        }
    }
    workload.trace.fill = workload.trace.batches.len();
    let (mut prompts, fill) = (Vec::with_capacity(PROMPTS), workload.changed);
    while workload.changed - fill < steady || prompts.len() < PROMPTS {
        let prompt = workload.request();
        if prompts.len() < PROMPTS {
            prompts.push(prompt);
        }
    }
    // What comes in next needs runs, but its events are not those of the trace.
    let (events, batches) = (workload.trace.events.len(), workload.trace.batches.len());
    let after = (0..PROMPTS).map(|_| workload.request()).collect();
    let mut trace = workload.trace;
    trace.events.truncate(events);
    trace.batches.truncate(batches);
    trace.prompts = [prompts, after];
    trace
}

struct Workload {
    rng: Rng,
    trace: Trace,
    system_prompts: Vec<u32>,
    documents: Vec<u32>,
    popularity: Zipf,
    open: Vec<Conversation>,
    workers: Vec<Worker>,
    /// Counts requests.
    now: u32,
    /// Counts stored and removed blocks.
    changed: usize,
}

#[derive(Clone, Copy)]
struct Conversation {
    /// Its last run.
    run: u32,
    turns: u32,
    worker: usize,
}

struct Worker {
    cache: Cache,
    /// Answers that are being made, oldest first.
    active: Vec<u32>,
}

impl Workload {
    fn new(fleet: &Fleet, seed: u64) -> Self {
        let worker = || Worker { cache: Cache::new(fleet.blocks), active: Vec::new() };
        let mut workload = Self {
            rng: Rng::with_seed(seed),
            trace: Trace { workers: fleet.workers, ..Trace::default() },
            system_prompts: Vec::new(),
            documents: Vec::new(),
            popularity: Zipf::new((2 * fleet.workers).max(500) as usize),
            open: Vec::new(),
            workers: (0..fleet.workers).map(|_| worker()).collect(),
            now: 0,
            changed: 0,
        };
        for _ in 0..SYSTEM_PROMPTS {
            let blocks = workload.rng.u32(48..=128);
            let run = workload.run(NO_PARENT, blocks);
            workload.system_prompts.push(run);
        }
        for rank in 1..=(2 * fleet.workers).max(500) as usize {
            let system_prompt = workload.system_prompts[rank % SYSTEM_PROMPTS];
            let blocks = workload.rng.u32(32..=256);
            let document = workload.run(system_prompt, blocks);
            workload.documents.push(document);
        }
        workload
    }

    /// Adds a run that is like no other.
    fn run(&mut self, parent: u32, blocks: u32) -> u32 {
        let trace = &mut self.trace;
        let depth = trace.runs.get(parent as usize).map_or(0, |before| before.depth + before.blocks);
        let first = trace.hashes.len() as u32;
        let mut before = trace.last_hash(parent);
        let tokens: Vec<u32> = (first..first + blocks).flat_map(block_tokens).collect();
        for local in compute_block_hash_for_seq(&tokens, BLOCK_SIZE as u32, BlockHashOptions::default()) {
            // `compute_seq_hash_for_block` does the same, but can't go on from a parent.
            let hash = before.map_or(local.0, |before| compute_next_seq_hash(before, local));
            trace.hashes.push(hash);
            before = Some(hash);
        }
        trace.runs.push(Run { parent, blocks, first, depth });
        (trace.runs.len() - 1) as u32
    }

    /// One turn of some conversation. Returns the last run of its prompt.
    fn request(&mut self) -> u32 {
        self.now += 1;
        let goes_on = self.open.len() >= OPEN * self.workers.len();
        let mut conversation = if goes_on {
            let conversation = self.rng.usize(..self.open.len());
            self.open.swap_remove(conversation)
        } else {
            self.conversation()
        };
        if conversation.turns < TURNS && self.rng.u32(..10) == 0 {
            conversation.worker = self.rng.usize(..self.workers.len());
        }
        // Short ones are more frequent.
        let blocks = 1 + self.rng.u32(..32).min(self.rng.u32(..32));
        let question = self.run(conversation.run, blocks);
        let blocks = self.rng.u32(2..=24);
        conversation.run = self.run(question, blocks);
        self.admit(conversation.worker, question);
        self.workers[conversation.worker].active.push(conversation.run);
        while self.workers[conversation.worker].active.len() >= ACTIVE {
            self.step(conversation.worker);
        }
        conversation.turns -= 1;
        if conversation.turns > 0 {
            self.open.push(conversation);
        }
        question
    }

    fn conversation(&mut self) -> Conversation {
        let turns = self.rng.u32(1..=TURNS);
        let mut worker = self.rng.usize(..self.workers.len());
        if self.rng.u32(..10) < 6 {
            // The first ones are more popular.
            let system_prompt = self.rng.usize(..SYSTEM_PROMPTS).min(self.rng.usize(..SYSTEM_PROMPTS));
            return Conversation { run: self.system_prompts[system_prompt], turns, worker };
        }
        let document = self.popularity.draw(&mut self.rng);
        if self.rng.bool() {
            worker = document % self.workers.len();
        }
        Conversation { run: self.documents[document], turns, worker }
    }

    /// A worker takes in a prompt: uses what it holds, stores the rest.
    fn admit(&mut self, worker: usize, prompt: u32) {
        let chain = self.trace.chain(prompt);
        // A prompt that goes on after an answer in the making waits for it.
        while self.workers[worker].active.iter().any(|answer| chain.contains(answer)) {
            self.step(worker);
        }
        let now = self.now;
        chain.iter().for_each(|&run| self.workers[worker].cache.touch(run, now));
        let missing = |cache: &Cache, run: u32, blocks: u32| (run, cache.held(run), blocks);
        let cache = &self.workers[worker].cache;
        let runs = chain.iter().map(|&run| missing(cache, run, self.trace.runs[run as usize].blocks));
        let missing: Vec<_> = runs.filter(|(_, held, blocks)| held < blocks).collect();
        self.make_room(worker, missing.iter().map(|(_, held, blocks)| (blocks - held) as usize).sum());
        for (run, held, blocks) in missing {
            self.store(worker, run, held..blocks, now);
        }
        self.end_batch();
    }

    /// One more block of each answer that a worker makes.
    fn step(&mut self, worker: usize) {
        for answer in std::mem::take(&mut self.workers[worker].active) {
            let run = self.trace.runs[answer as usize];
            self.make_room(worker, 1);
            let cache = &self.workers[worker].cache;
            let (held, question) = (cache.held(answer), run.parent);
            // An answer is as old as its prompt, or it would outlive it. One whose prompt was
            // evicted is given up.
            let whole = cache.held(question) == self.trace.runs[question as usize].blocks;
            let Some(used) = cache.used(question).filter(|_| whole) else { continue };
            if held < run.blocks {
                self.store(worker, answer, held..held + 1, used);
            }
            if held + 1 < run.blocks {
                self.workers[worker].active.push(answer);
            }
        }
        self.end_batch();
    }

    fn make_room(&mut self, worker: usize, blocks: usize) {
        for evicted in self.workers[worker].cache.make_room(blocks) {
            // The last ones first.
            let mut end = evicted.start + evicted.blocks;
            while end > evicted.start {
                let blocks = EVENT.min(end - evicted.start);
                end -= blocks;
                self.event(Event { worker: worker as u32, run: evicted.run, start: end, blocks, stored: false });
            }
        }
    }

    fn store(&mut self, worker: usize, run: u32, range: std::ops::Range<u32>, now: u32) {
        let depth = self.trace.runs[run as usize].depth;
        self.workers[worker].cache.store(run, depth, range.len() as u32, now);
        let mut start = range.start;
        while start < range.end {
            let blocks = EVENT.min(range.end - start);
            self.event(Event { worker: worker as u32, run, start, blocks, stored: true });
            start += blocks;
        }
    }

    fn event(&mut self, event: Event) {
        self.changed += event.blocks as usize;
        self.trace.events.push(event);
    }

    fn end_batch(&mut self) {
        let end = self.trace.events.len() as u32;
        if self.trace.batches.last().copied().unwrap_or_default() < end {
            self.trace.batches.push(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn caches_never_hold_a_block_without_its_parent_nor_more_than_they_can() {
        let trace = make(&Fleet { workers: 3, blocks: 2_500 }, 100_000, 3);
        let mut held = vec![HashSet::new(); 3];
        let mut children = vec![HashMap::<u64, u32>::new(); 3];
        for event in &trace.events {
            let worker = event.worker as usize;
            let (held, children) = (&mut held[worker], &mut children[worker]);
            let mut parent = trace.parent_hash(event);
            let mut chain = Vec::new();
            for &hash in trace.hashes(event) {
                chain.push((hash, parent));
                parent = Some(hash);
            }
            if event.stored {
                for (hash, parent) in chain {
                    assert!(held.insert(hash), "stored twice");
                    if let Some(parent) = parent {
                        assert!(held.contains(&parent), "without its parent");
                        *children.entry(parent).or_default() += 1;
                    }
                }
            } else {
                for (hash, parent) in chain.into_iter().rev() {
                    assert!(held.remove(&hash), "removed, not held");
                    assert_eq!(children.get(&hash).copied().unwrap_or_default(), 0, "removed before its child");
                    if let Some(count) = parent.and_then(|parent| children.get_mut(&parent)) {
                        *count -= 1;
                    }
                }
            }
            assert!(held.len() <= 2_500 && (1..=64).contains(&event.blocks));
        }
        assert!(held.iter().all(|held| held.len() > 2_000));
    }

    #[test]
    fn batches_are_of_one_worker_and_prompts_share_and_differ() {
        let trace = make(&Fleet { workers: 4, blocks: 3_000 }, 30_000, 5);
        assert!((0..trace.batches.len()).all(|batch| {
            let events = trace.batch(batch);
            !events.is_empty() && events.iter().all(|event| event.worker == events[0].worker)
        }));
        for prompts in &trace.prompts {
            assert_eq!(prompts.len(), PROMPTS);
            assert_eq!(prompts.iter().collect::<HashSet<_>>().len(), PROMPTS);
            let roots: HashSet<u32> = prompts.iter().map(|&run| trace.chain(run)[0]).collect();
            assert_eq!(roots.len(), SYSTEM_PROMPTS);
        }
    }
}
