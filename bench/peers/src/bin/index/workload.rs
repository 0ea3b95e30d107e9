//! Traces of a fleet that serves conversations: requests, their workers, and the workers' caches.
//!
//! | | |
//! |---|---|
//! | system prompts | 4, of 48 to 128 blocks; each request starts with one |
//! | documents | two for each worker and at least 500, of 32 to 256 blocks, in 4 of 10 conversations; by Zipf's law, exponent 1 |
//! | conversations | 1 to 12 turns; a question of 1 to 32 blocks, an answer of 2 to 24 |
//! | workers | a conversation about a document starts at the document's worker or at any, with even chances; 1 of 10 later turns goes to another worker |
//! | stored | a question and missing blocks of the prompt: up to 64 blocks per event; answers: block by block, up to 4 answers side by side |
//! | removed | least recently used first, leaves before roots: up to 64 blocks per event |

use std::ops::Range;

use dynamo_kv_router::protocols::compute_next_seq_hash;
use fastrand::Rng;
use peers::numbers::Zipf;

use crate::cache::Cache;
use crate::dynamo::block_hashes;
use crate::trace::{Event, NO_PARENT, Run, Trace, block_tokens};

/// The size of a fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fleet {
    pub(crate) workers: u32,
    /// The capacity of each worker's cache, several times that of the longest prompt, which has
    /// about 1,000 blocks.
    pub(crate) blocks: usize,
}

const SYSTEM_PROMPTS: usize = 4;
const MAX_TURNS: u32 = 12;
/// The number of answers that a worker computes side by side.
const ACTIVE_ANSWERS: usize = 4;
const MAX_EVENT_BLOCKS: u32 = 64;
/// The number of open conversations per worker.
const OPEN_CONVERSATIONS: usize = 6;
/// The number of prompts that are recorded each time.
const PROMPTS: usize = 4096;

/// Fills all caches to nine tenths, then continues for `steady` stored and removed blocks.
pub(crate) fn make(fleet: &Fleet, steady: usize, seed: u64) -> Trace {
    let mut workload = Workload::new(fleet, seed);
    let full = fleet.workers as usize * fleet.blocks / 10 * 9;
    while workload.workers.iter().map(|worker| worker.cache.blocks()).sum::<usize>() < full {
        // Computing the sum costs as much as some requests.
        for _ in 0..1 + fleet.workers / 8 {
            workload.request();
        }
    }
    workload.trace.fill = workload.trace.batches.len();
    let mut prompts = Vec::with_capacity(PROMPTS);
    let fill = workload.changed;
    while workload.changed - fill < steady || prompts.len() < PROMPTS {
        let prompt = workload.request();
        if prompts.len() < PROMPTS {
            prompts.push(prompt);
        }
    }
    // The next prompts need runs, but their events are not part of the trace.
    let events = workload.trace.events.len();
    let batches = workload.trace.batches.len();
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
    /// The number of requests so far.
    now: u32,
    /// The number of stored and removed blocks so far.
    changed: usize,
}

#[derive(Clone, Copy)]
struct Conversation {
    last_run: u32,
    remaining_turns: u32,
    worker: usize,
}

struct Worker {
    cache: Cache,
    /// The answers that are being computed, oldest first.
    active: Vec<u32>,
}

impl Workload {
    fn new(fleet: &Fleet, seed: u64) -> Self {
        let worker = |_| Worker { cache: Cache::new(fleet.blocks), active: Vec::new() };
        let documents = (2 * fleet.workers).max(500) as usize;
        let mut workload = Self {
            rng: Rng::with_seed(seed),
            trace: Trace { workers: fleet.workers, ..Trace::default() },
            system_prompts: Vec::new(),
            documents: Vec::new(),
            popularity: Zipf::new(documents),
            open: Vec::new(),
            workers: (0..fleet.workers).map(worker).collect(),
            now: 0,
            changed: 0,
        };
        for _ in 0..SYSTEM_PROMPTS {
            let blocks = workload.rng.u32(48..=128);
            let run = workload.add_run(NO_PARENT, blocks);
            workload.system_prompts.push(run);
        }
        for rank in 1..=documents {
            let system_prompt = workload.system_prompts[rank % SYSTEM_PROMPTS];
            let blocks = workload.rng.u32(32..=256);
            let document = workload.add_run(system_prompt, blocks);
            workload.documents.push(document);
        }
        workload
    }

    /// Adds a run with new blocks.
    fn add_run(&mut self, parent: u32, blocks: u32) -> u32 {
        let trace = &mut self.trace;
        let before = trace.runs.get(parent as usize);
        let depth = before.map_or(0, |before| before.depth + before.blocks);
        let first = trace.hashes.len() as u32;
        let mut before = trace.last_hash(parent);
        let tokens: Vec<u32> = (first..first + blocks).flat_map(block_tokens).collect();
        for local in block_hashes(&tokens) {
            // `compute_seq_hash_for_block` can't continue from a parent.
            let hash = before.map_or(local.0, |before| compute_next_seq_hash(before, local));
            trace.hashes.push(hash);
            before = Some(hash);
        }
        trace.runs.push(Run { parent, blocks, first, depth });
        (trace.runs.len() - 1) as u32
    }

    /// Computes a turn of a conversation. Returns the last run of its prompt.
    fn request(&mut self) -> u32 {
        self.now += 1;
        let mut conversation = if self.open.len() >= OPEN_CONVERSATIONS * self.workers.len() {
            let conversation = self.rng.usize(..self.open.len());
            self.open.swap_remove(conversation)
        } else {
            self.new_conversation()
        };
        let is_later = conversation.remaining_turns < MAX_TURNS;
        if is_later && self.rng.u32(..10) == 0 {
            conversation.worker = self.rng.usize(..self.workers.len());
        }
        // Short questions are more frequent.
        let blocks = 1 + self.rng.u32(..32).min(self.rng.u32(..32));
        let question = self.add_run(conversation.last_run, blocks);
        let blocks = self.rng.u32(2..=24);
        conversation.last_run = self.add_run(question, blocks);
        self.admit(conversation.worker, question);
        self.workers[conversation.worker].active.push(conversation.last_run);
        while self.workers[conversation.worker].active.len() >= ACTIVE_ANSWERS {
            self.step(conversation.worker);
        }
        conversation.remaining_turns -= 1;
        if conversation.remaining_turns > 0 {
            self.open.push(conversation);
        }
        question
    }

    fn new_conversation(&mut self) -> Conversation {
        let remaining_turns = self.rng.u32(1..=MAX_TURNS);
        let mut worker = self.rng.usize(..self.workers.len());
        if self.rng.u32(..10) < 6 {
            // Earlier system prompts are more popular.
            let [first, second] = [0, 1].map(|_| self.rng.usize(..SYSTEM_PROMPTS));
            let last_run = self.system_prompts[first.min(second)];
            return Conversation { last_run, remaining_turns, worker };
        }
        let document = self.popularity.draw(&mut self.rng);
        if self.rng.bool() {
            worker = document % self.workers.len();
        }
        Conversation { last_run: self.documents[document], remaining_turns, worker }
    }

    /// Stores the blocks of a prompt that a worker does not hold.
    fn admit(&mut self, worker: usize, prompt: u32) {
        let chain = self.trace.chain(prompt);
        // A prompt waits for an active answer that it continues.
        while self.workers[worker].active.iter().any(|answer| chain.contains(answer)) {
            self.step(worker);
        }
        let now = self.now;
        let cache = &mut self.workers[worker].cache;
        chain.iter().for_each(|&run| cache.touch(run, now));
        let missing = |&run: &u32| {
            let missing = cache.held(run)..self.trace.runs[run as usize].blocks;
            (!missing.is_empty()).then_some((run, missing))
        };
        let missing: Vec<(u32, Range<u32>)> = chain.iter().filter_map(missing).collect();
        self.make_room(worker, missing.iter().map(|(_, blocks)| blocks.len()).sum());
        for (run, blocks) in missing {
            self.store(worker, run, blocks, now);
        }
        self.end_batch();
    }

    /// Computes a block of each active answer of a worker.
    fn step(&mut self, worker: usize) {
        for answer in std::mem::take(&mut self.workers[worker].active) {
            let run = self.trace.runs[answer as usize];
            self.make_room(worker, 1);
            let cache = &self.workers[worker].cache;
            let held = cache.held(answer);
            let question = run.parent;
            // An answer is as old as its prompt, so that the prompt outlives it. An answer whose
            // prompt was evicted is dropped.
            let is_whole = cache.held(question) == self.trace.runs[question as usize].blocks;
            let Some(used) = cache.used(question).filter(|_| is_whole) else { continue };
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
            // The last blocks are removed first.
            let mut end = evicted.start + evicted.blocks;
            while end > evicted.start {
                let blocks = MAX_EVENT_BLOCKS.min(end - evicted.start);
                end -= blocks;
                self.add_event(worker, evicted.run, end..end + blocks, false);
            }
        }
    }

    fn store(&mut self, worker: usize, run: u32, blocks: Range<u32>, now: u32) {
        let depth = self.trace.runs[run as usize].depth;
        self.workers[worker].cache.store(run, depth, blocks.len() as u32, now);
        for start in blocks.clone().step_by(MAX_EVENT_BLOCKS as usize) {
            let end = blocks.end.min(start + MAX_EVENT_BLOCKS);
            self.add_event(worker, run, start..end, true);
        }
    }

    fn add_event(&mut self, worker: usize, run: u32, blocks: Range<u32>, stored: bool) {
        let Range { start, end } = blocks;
        self.changed += blocks.len();
        let event = Event { worker: worker as u32, run, start, blocks: end - start, stored };
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
    fn caches_hold_blocks_with_parents_within_capacity() {
        let trace = make(&Fleet { workers: 3, blocks: 2_500 }, 100_000, 3);
        let mut held = vec![HashSet::new(); 3];
        let mut children = vec![HashMap::<u64, u32>::new(); 3];
        for event in &trace.events {
            let held = &mut held[event.worker as usize];
            let children = &mut children[event.worker as usize];
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
                    let count = children.get(&hash).copied().unwrap_or_default();
                    assert_eq!(count, 0, "removed before its child");
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
    fn batches_have_one_worker_while_prompts_differ() {
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
