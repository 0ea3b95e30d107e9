//! Blocks that a worker does not hold yet but will, because requests in flight make it compute
//! them.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use chiasm_kv::{BlockKey, BuildBlockKeyHasher};

use crate::seat::Seat;

/// Promised blocks of ended requests that are kept at most: a bound on memory (100 MB), not a tuned
/// number. At 16 tokens per block these are 16 million prompt tokens ended within the grace time.
const MAX_LINGERING: usize = 1 << 20;

/// Shards of the table: each grows by itself, so that no selection waits for all of it to be moved.
const SHARDS: usize = 64;

/// The promises of all workers.
///
/// A promise ends when events confirm the block, for all who made it, or with the last request that
/// made it. A request that ended well can leave its promises behind for a while, until the events
/// arrive.
pub(crate) struct Promises {
    by_block: Box<[Shard]>,
    blocks: usize,
    lingering: VecDeque<Lingering>,
    lingering_blocks: usize,
}

type Shard = HashMap<BlockKey, Promisers, BuildBlockKeyHasher>;

/// The workers that promise one block: nearly always one.
struct Promisers {
    first: Promise,
    more: Vec<Promise>,
}

#[derive(Clone, Copy)]
struct Promise {
    seat: Seat,
    requests: u32,
    /// The request that made it first. Earlier requests, whose promise of the same block was
    /// confirmed before this one was made, have no part in it.
    since: RequestNumber,
}

struct Lingering {
    until: Duration,
    seat: Seat,
    request: RequestNumber,
    blocks: Vec<BlockKey>,
}

/// Counts requests in the order in which they were routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestNumber(pub(crate) u64);

impl Default for Promises {
    fn default() -> Self {
        let by_block = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { by_block, blocks: 0, lingering: VecDeque::new(), lingering_blocks: 0 }
    }
}

impl Promises {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// The workers that promise a block, in no order.
    pub(crate) fn of(&self, block: BlockKey) -> impl Iterator<Item = Seat> {
        self.by_block[shard_of(block)]
            .get(&block)
            .into_iter()
            .flat_map(Promisers::iter)
            .map(|promise| promise.seat)
    }

    pub(crate) fn contains(&self, seat: Seat, block: BlockKey) -> bool {
        self.of(block).any(|other| other == seat)
    }

    /// The end of the run of `keys` that a worker promises from number `from` on, which it does
    /// promise. Promises are made and confirmed in the order of the prompt, so the run has no
    /// holes, and its end is found by galloping and halving.
    pub(crate) fn run_end(&self, seat: Seat, keys: &[BlockKey], from: usize) -> usize {
        let mut step = 1;
        while from + step < keys.len() && self.contains(seat, keys[from + step]) {
            step *= 2;
        }
        // At `step / 2` it does, at `step` it does not or the prompt has ended.
        let (first, last) = (from + step / 2 + 1, (from + step).min(keys.len()));
        first + keys[first.min(last)..last].partition_point(|key| self.contains(seat, *key))
    }

    /// Per worker, for reports: takes time proportional to all promises.
    pub(crate) fn counts(&self) -> HashMap<Seat, usize> {
        let mut counts = HashMap::new();
        let all = self.by_block.iter().flat_map(Shard::values).flat_map(Promisers::iter);
        all.for_each(|promise| *counts.entry(promise.seat).or_default() += 1);
        counts
    }

    /// `request` will make the worker hold `blocks`. A request promises once, each block once.
    pub(crate) fn make(&mut self, seat: Seat, request: RequestNumber, blocks: &[BlockKey]) {
        for block in blocks {
            let new = Promise { seat, requests: 0, since: request };
            let promisers = self.by_block[shard_of(*block)].entry(*block).or_insert_with(|| {
                self.blocks += 1;
                Promisers { first: new, more: Vec::new() }
            });
            promisers.get_or_insert(new).requests += 1;
        }
    }

    /// The worker holds the block: from here on its events say for how long.
    pub(crate) fn confirm(&mut self, seat: Seat, block: BlockKey) {
        self.remove(seat, block);
    }

    /// `request` has ended. Its unconfirmed promises end `until` then, or now.
    pub(crate) fn end(
        &mut self,
        seat: Seat,
        request: RequestNumber,
        mut blocks: Vec<BlockKey>,
        until: Option<Duration>,
    ) {
        let Some(until) = until else {
            self.release(seat, request, &blocks);
            return;
        };
        blocks.retain(|block| self.part_of(seat, request, *block).is_some());
        if blocks.is_empty() {
            return;
        }
        self.lingering_blocks += blocks.len();
        self.lingering.push_back(Lingering { until, seat, request, blocks });
        while self.lingering_blocks > MAX_LINGERING {
            self.release_oldest();
        }
    }

    /// Ends the promises whose time is over.
    pub(crate) fn expire(&mut self, now: Duration) {
        while self.lingering.front().is_some_and(|oldest| oldest.until <= now) {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        if let Some(oldest) = self.lingering.pop_front() {
            self.lingering_blocks -= oldest.blocks.len();
            self.release(oldest.seat, oldest.request, &oldest.blocks);
        }
    }

    fn release(&mut self, seat: Seat, request: RequestNumber, blocks: &[BlockKey]) {
        for block in blocks {
            if let Some(promise) = self.part_of(seat, request, *block) {
                promise.requests -= 1;
                if promise.requests == 0 {
                    self.remove(seat, *block);
                }
            }
        }
    }

    fn part_of(
        &mut self,
        seat: Seat,
        request: RequestNumber,
        block: BlockKey,
    ) -> Option<&mut Promise> {
        self.by_block[shard_of(block)]
            .get_mut(&block)?
            .get_mut(seat)
            .filter(|promise| promise.since <= request)
    }

    fn remove(&mut self, seat: Seat, block: BlockKey) {
        let shard = &mut self.by_block[shard_of(block)];
        let Some(promisers) = shard.get_mut(&block) else { return };
        if promisers.first.seat != seat {
            promisers.more.retain(|promise| promise.seat != seat);
        } else if let Some(next) = promisers.more.pop() {
            promisers.first = next;
        } else {
            shard.remove(&block);
            self.blocks -= 1;
            // Bursts must not keep their memory.
            if shard.capacity() > 64 && shard.len() < shard.capacity() / 8 {
                shard.shrink_to(2 * shard.len());
            }
        }
    }
}

/// Bits that the tables themselves don't go by.
fn shard_of(block: BlockKey) -> usize {
    (block.get() >> 100) as usize % SHARDS
}

impl Promisers {
    fn iter(&self) -> impl Iterator<Item = &Promise> {
        std::iter::once(&self.first).chain(&self.more)
    }

    fn get_mut(&mut self, seat: Seat) -> Option<&mut Promise> {
        if self.first.seat == seat {
            return Some(&mut self.first);
        }
        self.more.iter_mut().find(|promise| promise.seat == seat)
    }

    /// The promise of `new`'s worker.
    fn get_or_insert(&mut self, new: Promise) -> &mut Promise {
        if self.first.seat == new.seat {
            return &mut self.first;
        }
        let at =
            self.more.iter().position(|promise| promise.seat == new.seat).unwrap_or_else(|| {
                self.more.push(new);
                self.more.len() - 1
            });
        &mut self.more[at]
    }
}

#[cfg(test)]
mod tests;
