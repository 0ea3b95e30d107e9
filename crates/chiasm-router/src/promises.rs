//! Blocks that a worker does not hold yet but will, because requests in flight make it compute them.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use chiasm_kv::BlockKey;

/// Promised blocks of ended requests, per worker, that are kept at most: a bound on memory, not a tuned number. At 32
/// tokens per block these are 500,000 prompt tokens ended within the grace time.
const MAX_LINGERING: usize = 16_384;

/// The promises of one worker.
///
/// A promise ends when events confirm the block, for all who made it, or with the last request that made it. A request
/// that ended well can leave its promises behind for a while, until the events arrive.
#[derive(Default)]
pub(crate) struct Promises {
    promised: HashMap<BlockKey, Promise>,
    lingering: VecDeque<Lingering>,
    lingering_blocks: usize,
}

struct Promise {
    /// The request that made it first. Earlier requests, whose promise of the same block was confirmed before this one
    /// was made, have no part in it.
    since: RequestNumber,
    requests: u32,
}

struct Lingering {
    until: Instant,
    request: RequestNumber,
    blocks: Vec<BlockKey>,
}

/// Counts requests in the order in which they were routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestNumber(pub(crate) u64);

impl Promises {
    pub(crate) fn contains(&self, block: BlockKey) -> bool {
        self.promised.contains_key(&block)
    }

    pub(crate) fn len(&self) -> usize {
        self.promised.len()
    }

    /// `request` will leave `blocks` behind. A request promises once, each block once.
    pub(crate) fn make(&mut self, request: RequestNumber, blocks: &[BlockKey]) {
        for block in blocks {
            self.promised.entry(*block).or_insert(Promise { since: request, requests: 0 }).requests += 1;
        }
    }

    /// The worker holds the block: from here on its events say for how long.
    pub(crate) fn confirm(&mut self, block: BlockKey) {
        self.promised.remove(&block);
    }

    /// `request` has ended. Its unconfirmed promises end `until` then, or now.
    pub(crate) fn end(&mut self, request: RequestNumber, mut blocks: Vec<BlockKey>, until: Option<Instant>) {
        let Some(until) = until else {
            self.release(request, &blocks);
            return;
        };
        blocks.retain(|block| self.part_of(request, *block));
        if blocks.is_empty() {
            return;
        }
        self.lingering_blocks += blocks.len();
        self.lingering.push_back(Lingering { until, request, blocks });
        while self.lingering_blocks > MAX_LINGERING {
            self.release_oldest();
        }
    }

    /// Ends the promises whose time is over.
    pub(crate) fn expire(&mut self, now: Instant) {
        while self.lingering.front().is_some_and(|oldest| oldest.until <= now) {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        if let Some(oldest) = self.lingering.pop_front() {
            self.lingering_blocks -= oldest.blocks.len();
            self.release(oldest.request, &oldest.blocks);
        }
    }

    fn release(&mut self, request: RequestNumber, blocks: &[BlockKey]) {
        for block in blocks {
            if !self.part_of(request, *block) {
                continue;
            }
            if let Some(promise) = self.promised.get_mut(block) {
                promise.requests -= 1;
                if promise.requests == 0 {
                    self.promised.remove(block);
                }
            }
        }
    }

    fn part_of(&self, request: RequestNumber, block: BlockKey) -> bool {
        self.promised.get(&block).is_some_and(|promise| promise.since <= request)
    }
}

#[cfg(test)]
mod tests;
