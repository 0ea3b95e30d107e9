//! Blocks that a worker does not hold yet but will, because requests in flight make it compute
//! them.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use chiasm_kv::{BlockKey, BuildBlockKeyHasher};

use crate::worker_handle::WorkerHandle;

/// The maximum number of promised blocks kept for ended requests. A bound on memory (100 MB), not a
/// tuned number: at 16 tokens per block, 16 million prompt tokens that ended within the grace time.
const MAX_LINGERING_BLOCKS: usize = 1 << 20;

/// The number of shards of the table. Each grows by itself, so that no selection waits for a rehash
/// of the whole table.
const SHARDS: usize = 64;

/// The promises of all workers.
///
/// A promise ends when events confirm the block, for all requests that made it, or with the last
/// request that made it. A request that ended well can leave its promises behind for a while, until
/// the events arrive.
pub(crate) struct Promises {
    by_block: Box<[Shard]>,
    blocks: usize,
    lingering: VecDeque<Lingering>,
    lingering_blocks: usize,
}

type Shard = HashMap<BlockKey, BlockPromises, BuildBlockKeyHasher>;

/// The promises of one block, one per worker. Nearly always there is a single one.
struct BlockPromises {
    first: Promise,
    more: Vec<Promise>,
}

#[derive(Clone, Copy)]
struct Promise {
    worker: WorkerHandle,
    requests: u32,
    /// The request that made the promise first. Earlier requests have no part in it: their promise
    /// of the same block was confirmed before this one was made.
    since: RequestNumber,
}

/// The promises of a request that has ended.
struct Lingering {
    until: Duration,
    worker: WorkerHandle,
    request: RequestNumber,
    blocks: Vec<BlockKey>,
}

/// The number of a request, in the order in which requests were routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestNumber(pub(crate) u64);

impl Default for Promises {
    fn default() -> Self {
        let by_block = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { by_block, blocks: 0, lingering: VecDeque::new(), lingering_blocks: 0 }
    }
}

impl Promises {
    /// Returns `true` if no block is promised.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Returns the workers that promise a block, in no order.
    pub(crate) fn workers(&self, block: BlockKey) -> impl Iterator<Item = WorkerHandle> {
        self.by_block[shard_index(block)]
            .get(&block)
            .into_iter()
            .flat_map(BlockPromises::iter)
            .map(|promise| promise.worker)
    }

    /// Returns `true` if a worker promises a block.
    pub(crate) fn contains(&self, worker: WorkerHandle, block: BlockKey) -> bool {
        self.workers(block).any(|other| other == worker)
    }

    /// Returns the end of the run of `keys` that a worker promises, starting at index `from`. The
    /// worker must promise `keys[from]`.
    ///
    /// Promises are made and confirmed in prompt order, so the run has no holes, and a galloping
    /// search followed by a binary search finds its end.
    pub(crate) fn run_end(&self, worker: WorkerHandle, keys: &[BlockKey], from: usize) -> usize {
        let mut step = 1;
        while from + step < keys.len() && self.contains(worker, keys[from + step]) {
            step *= 2;
        }
        // The key at `step / 2` is promised. The one at `step` is not, or the prompt has ended.
        let first = from + step / 2 + 1;
        let last = (from + step).min(keys.len());
        first + keys[first.min(last)..last].partition_point(|key| self.contains(worker, *key))
    }

    /// Returns the number of promised blocks per worker, for reports. Takes time proportional to
    /// all promises.
    pub(crate) fn counts(&self) -> HashMap<WorkerHandle, usize> {
        let mut counts = HashMap::new();
        let all = self.by_block.iter().flat_map(Shard::values).flat_map(BlockPromises::iter);
        all.for_each(|promise| *counts.entry(promise.worker).or_default() += 1);
        counts
    }

    /// Adds the promise that `request` will make a worker hold `blocks`. Called once per request,
    /// with each block once.
    pub(crate) fn add(
        &mut self,
        worker: WorkerHandle,
        request: RequestNumber,
        blocks: &[BlockKey],
    ) {
        for block in blocks {
            let new = Promise { worker, requests: 0, since: request };
            let promises = self.by_block[shard_index(*block)].entry(*block).or_insert_with(|| {
                self.blocks += 1;
                BlockPromises { first: new, more: Vec::new() }
            });
            promises.get_or_insert(new).requests += 1;
        }
    }

    /// Ends the promises of a block that the worker holds now. From here on the worker's events
    /// tell how long the block stays.
    pub(crate) fn confirm(&mut self, worker: WorkerHandle, block: BlockKey) {
        self.remove(worker, block);
    }

    /// Ends the unconfirmed promises of a request that has ended: at `until`, or at once if it is
    /// `None`.
    pub(crate) fn end(
        &mut self,
        worker: WorkerHandle,
        request: RequestNumber,
        mut blocks: Vec<BlockKey>,
        until: Option<Duration>,
    ) {
        let Some(until) = until else {
            self.release(worker, request, &blocks);
            return;
        };
        blocks.retain(|block| self.promise_mut(worker, request, *block).is_some());
        if blocks.is_empty() {
            return;
        }
        self.lingering_blocks += blocks.len();
        self.lingering.push_back(Lingering { until, worker, request, blocks });
        while self.lingering_blocks > MAX_LINGERING_BLOCKS {
            self.release_oldest();
        }
    }

    /// Ends the lingering promises whose time is over.
    pub(crate) fn expire(&mut self, now: Duration) {
        while self.lingering.front().is_some_and(|oldest| oldest.until <= now) {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        if let Some(oldest) = self.lingering.pop_front() {
            self.lingering_blocks -= oldest.blocks.len();
            self.release(oldest.worker, oldest.request, &oldest.blocks);
        }
    }

    fn release(&mut self, worker: WorkerHandle, request: RequestNumber, blocks: &[BlockKey]) {
        for block in blocks {
            if let Some(promise) = self.promise_mut(worker, request, *block) {
                promise.requests -= 1;
                if promise.requests == 0 {
                    self.remove(worker, *block);
                }
            }
        }
    }

    /// Returns the promise of a block by a worker, if `request` has a part in it.
    fn promise_mut(
        &mut self,
        worker: WorkerHandle,
        request: RequestNumber,
        block: BlockKey,
    ) -> Option<&mut Promise> {
        self.by_block[shard_index(block)]
            .get_mut(&block)?
            .get_mut(worker)
            .filter(|promise| promise.since <= request)
    }

    fn remove(&mut self, worker: WorkerHandle, block: BlockKey) {
        let shard = &mut self.by_block[shard_index(block)];
        let Some(promises) = shard.get_mut(&block) else { return };
        if promises.first.worker != worker {
            promises.more.retain(|promise| promise.worker != worker);
        } else if let Some(next) = promises.more.pop() {
            promises.first = next;
        } else {
            shard.remove(&block);
            self.blocks -= 1;
            // Gives memory back after a burst.
            if shard.capacity() > 64 && shard.len() < shard.capacity() / 8 {
                shard.shrink_to(2 * shard.len());
            }
        }
    }
}

/// Returns the shard of a block, by bits of the key that the hash tables don't use.
fn shard_index(block: BlockKey) -> usize {
    (block.get() >> 100) as usize % SHARDS
}

impl BlockPromises {
    fn iter(&self) -> impl Iterator<Item = &Promise> {
        std::iter::once(&self.first).chain(&self.more)
    }

    fn get_mut(&mut self, worker: WorkerHandle) -> Option<&mut Promise> {
        if self.first.worker == worker {
            return Some(&mut self.first);
        }
        self.more.iter_mut().find(|promise| promise.worker == worker)
    }

    /// Returns the promise of `new`'s worker, inserting `new` if there is none.
    fn get_or_insert(&mut self, new: Promise) -> &mut Promise {
        if self.first.worker == new.worker {
            return &mut self.first;
        }
        let existing = self.more.iter().position(|promise| promise.worker == new.worker);
        let at = existing.unwrap_or_else(|| {
            self.more.push(new);
            self.more.len() - 1
        });
        &mut self.more[at]
    }
}

#[cfg(test)]
mod tests;
