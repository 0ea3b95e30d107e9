//! Continuous batching: the tokens of each request that a step computes.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hash};
use std::ops::Range;

use crate::free_queue::BlockId;
use crate::paged_cache::{BlockTable, PagedCache};

/// The engine around a [`Batch`]: it hashes blocks, encodes items and is notified of changes.
pub trait BatchEngine {
    /// The engine's data of a request.
    type Request;
    /// The engine's hash of a block and everything before it.
    type Hash: Copy + Eq + Hash;
    /// The hasher of the hash table.
    type Hasher: BuildHasher + Default;
    /// An error that ends the engine.
    type Error;

    /// Returns the hash of a request's full block; `block` counts from 0.
    fn hash(request: &Self::Request, block: usize) -> Self::Hash;

    /// Returns `true` if the request may reuse blocks of other requests.
    fn reads_prefix_cache(_request: &Self::Request) -> bool {
        true
    }

    /// Returns the number of leading tokens whose keys and values another engine has computed and
    /// sends to this one. After a preemption the engine computes them itself.
    fn transferred_tokens(_request: &Self::Request) -> usize {
        0
    }

    /// Returns the number under which the blocks of the request are retained after its end, until
    /// [`Batch::release_retained`]. `None` if they are released at its end.
    fn retention_id(_request: &Self::Request) -> Option<u64> {
        None
    }

    /// Prepares the request that is next to be admitted. Called for each attempt to admit it.
    ///
    /// # Errors
    /// If the engine has to end.
    fn before_admission(&mut self, _request: &mut Self::Request) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Encodes the items in a range of tokens, before the tokens are computed. Returning `false`
    /// leaves the request out of this step.
    ///
    /// `admission` is `true` if the request would begin to run with these tokens.
    ///
    /// # Errors
    /// If the engine has to end.
    fn encode(
        &mut self,
        request: &mut Self::Request,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Self::Error>;

    /// Called when a request begins to run, or runs again, with `cached` leading tokens from the
    /// cache.
    fn on_admitted(&mut self, request: &mut Scheduled<Self::Request>, cached: usize);

    /// Called when a running request has released its blocks and waits again.
    fn on_preempted(&mut self, request: &mut Self::Request);

    /// Called when other requests can find these blocks of a request.
    fn on_stored(&mut self, request: &Self::Request, blocks: Range<usize>);

    /// Called when one block with this hash was evicted.
    fn on_evicted(&mut self, hash: Self::Hash);
}

/// A waiting or running request, with its progress.
#[derive(Debug)]
pub struct Scheduled<R> {
    /// The engine's data of the request.
    pub request: R,
    prompt: usize,
    /// The first token after all items. From there on the encoder is not needed.
    items_end: usize,
    tokens: usize,
    computed: usize,
    step: usize,
    preempted: bool,
    table: BlockTable,
}

impl<R> Scheduled<R> {
    /// Creates a request with `prompt` tokens whose items end before token `items_end`.
    pub fn new(request: R, prompt: usize, items_end: usize) -> Self {
        let table = BlockTable::default();
        Self {
            request,
            prompt,
            items_end,
            tokens: prompt,
            computed: 0,
            step: 0,
            preempted: false,
            table,
        }
    }

    /// Returns the number of known tokens: those of the prompt and the generated ones.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of generated tokens.
    pub fn generated(&self) -> usize {
        self.tokens - self.prompt
    }

    /// Returns the number of leading tokens whose keys and values exist.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Returns the number of tokens that the current step computes, after the
    /// [`computed`](Self::computed) ones.
    pub fn step_tokens(&self) -> usize {
        self.step
    }

    /// Returns `true` if the current step computes only the token that was generated last.
    pub fn is_decoding(&self) -> bool {
        self.step == 1 && self.generated() > 0
    }

    /// Returns `true` if the request was preempted at least once.
    pub fn was_preempted(&self) -> bool {
        self.preempted
    }

    /// Returns the number of blocks that other requests can find.
    pub fn stored(&self) -> usize {
        self.table.stored()
    }
}

/// The limits of a step.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// The maximum number of running requests, vLLM's `max_num_seqs`.
    pub max_running: usize,
    /// The maximum number of tokens that a step computes, vLLM's `max_num_batched_tokens`.
    pub max_batched_tokens: usize,
    /// The maximum number of tokens of a request, vLLM's `max_model_len`.
    pub max_model_len: usize,
}

/// A first-come, first-served scheduler like vLLM 0.32's `Scheduler` with one group of
/// full-attention layers.
///
/// A step is [`Batch::schedule`], then time passes, then [`Batch::advance`]. Running requests come
/// first, with one token each or the next chunk of their prompt. If blocks run out, the request
/// that was admitted last is preempted. Then waiting requests are admitted, within the limits on
/// tokens and running requests, while enough blocks are free for their whole prompt.
pub struct Batch<E: BatchEngine> {
    limits: BatchLimits,
    block_size: usize,
    cache: PagedCache<E::Hash, E::Hasher>,
    running: Vec<Scheduled<E::Request>>,
    waiting: VecDeque<Scheduled<E::Request>>,
    /// `true` if a request was preempted in the step that was scheduled last. Then no waiting
    /// request was considered.
    preempted: bool,
    hits: Vec<BlockId>,
    /// The retained blocks of ended requests, by retention id.
    retained: Vec<(u64, BlockTable)>,
}

impl<E: BatchEngine> Batch<E> {
    /// Creates a batch without requests and an empty cache of `num_blocks` blocks of `block_size`
    /// tokens.
    pub fn new(limits: BatchLimits, num_blocks: u32, block_size: usize) -> Self {
        Self {
            limits,
            block_size,
            cache: PagedCache::new(num_blocks, block_size),
            running: Vec::new(),
            waiting: VecDeque::new(),
            preempted: false,
            hits: Vec::new(),
            retained: Vec::new(),
        }
    }

    /// Returns the running requests, in the order of their admission.
    pub fn running(&self) -> &[Scheduled<E::Request>] {
        &self.running
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the KV cache.
    pub fn cache(&self) -> &PagedCache<E::Hash, E::Hasher> {
        &self.cache
    }

    /// Queues a request.
    pub fn add(&mut self, request: Scheduled<E::Request>) {
        self.waiting.push_back(request);
    }

    /// Removes the first running or waiting request that matches, and releases its blocks.
    pub fn remove(&mut self, matches: impl Fn(&E::Request) -> bool) -> Option<E::Request> {
        let mut removed = match self.running.iter().position(|running| matches(&running.request)) {
            Some(at) => self.running.remove(at),
            None => {
                let at = self.waiting.iter().position(|waiting| matches(&waiting.request))?;
                self.waiting.remove(at)?
            }
        };
        self.cache.release(&mut removed.table);
        Some(removed.request)
    }

    /// Schedules the next step; [`Scheduled::step_tokens`] returns its tokens.
    ///
    /// # Errors
    /// If the engine has to end.
    pub fn schedule(&mut self, engine: &mut E) -> Result<(), E::Error> {
        let mut budget = self.limits.max_batched_tokens;
        self.preempted = false;
        self.schedule_running(&mut budget, engine)?;
        if !self.preempted {
            self.admit_waiting(&mut budget, engine)?;
        }
        Ok(())
    }

    fn schedule_running(&mut self, budget: &mut usize, engine: &mut E) -> Result<(), E::Error> {
        let mut at = 0;
        while let Some(running) = self.running.get_mut(at) {
            at += 1;
            running.step = 0;
            // One position is reserved for the sampled token. A prompt of max_model_len tokens that
            // did not fit one step therefore never ends, in vLLM too.
            let positions = (self.limits.max_model_len - 1).saturating_sub(running.computed);
            let tokens = (running.tokens - running.computed).min(*budget).min(positions);
            let end = running.computed + tokens;
            let is_left_out = tokens == 0
                || running.computed < running.items_end
                    && !engine.encode(&mut running.request, running.computed..end, false)?;
            if is_left_out {
                continue;
            }
            // Preempts from the last request on; eventually that is this one.
            while let Some(running) = self.running.get_mut(at - 1) {
                if self.cache.fits(&running.table, &[], end) {
                    compute(&mut self.cache, running, &[], tokens, engine);
                    *budget -= tokens;
                    break;
                }
                self.preempt_last(engine);
            }
        }
        Ok(())
    }

    /// Preempts the request that was admitted last: it waits again, in front of all others. Returns
    /// `false` if no request runs.
    pub fn preempt_last(&mut self, engine: &mut E) -> bool {
        let Some(mut last) = self.running.pop() else {
            return false;
        };
        self.cache.release(&mut last.table);
        engine.on_preempted(&mut last.request);
        self.preempted = true;
        self.waiting.push_front(Scheduled { computed: 0, step: 0, preempted: true, ..last });
        true
    }

    fn admit_waiting(&mut self, budget: &mut usize, engine: &mut E) -> Result<(), E::Error> {
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(next) = self.waiting.front_mut() else {
                break;
            };
            engine.before_admission(&mut next.request)?;
            // The last token is computed even if its block is cached: its logits are needed.
            let findable = if E::reads_prefix_cache(&next.request) {
                next.tokens.saturating_sub(1)
            } else {
                0
            };
            self.cache.find(
                (0..).map(|block| E::hash(&next.request, block)),
                findable,
                &mut self.hits,
            );
            let transferred =
                if next.preempted { 0 } else { E::transferred_tokens(&next.request).min(findable) };
            let cached = transferred.max(self.hits.len() * self.block_size);
            let tokens = (next.tokens - cached).min(*budget);
            let is_admitted = self.cache.fits(&next.table, &self.hits, next.tokens)
                && engine.encode(&mut next.request, cached..cached + tokens, true)?;
            if !is_admitted {
                break;
            }
            let Some(mut next) = self.waiting.pop_front() else {
                break;
            };
            next.computed = cached;
            compute(&mut self.cache, &mut next, &self.hits, tokens, engine);
            *budget -= tokens;
            engine.on_admitted(&mut next, cached);
            self.running.push(next);
        }
        Ok(())
    }

    /// Returns the number of times that the last scheduled step can be repeated, up to `limit`.
    ///
    /// Each running request must compute one token in that step. The result is a lower bound: the
    /// free blocks may suffice for a few more. It is 0 after a step that preempted a request,
    /// because the next one may admit waiting requests.
    pub fn repeatable_steps(&self, limit: usize) -> usize {
        if self.preempted {
            return 0;
        }
        let fits = |more: usize| {
            let missing =
                |running: &Scheduled<_>| self.cache.missing(&running.table, running.tokens + more);
            self.running.iter().map(missing).sum::<usize>() <= self.cache.free()
        };
        std::iter::successors(Some(limit), |more| Some(more / 2))
            .find(|&more| more == 0 || fits(more))
            .unwrap_or(0)
    }

    /// Repeats the last scheduled step `more` times, at most
    /// [`repeatable_steps`](Self::repeatable_steps).
    pub fn repeat(&mut self, more: usize, engine: &mut E) {
        for running in &mut self.running {
            debug_assert!(running.is_decoding(), "only decoding is repeated");
            running.tokens += more;
            compute(&mut self.cache, running, &[], running.step + more, engine);
        }
    }

    /// Ends the step and returns the requests that have ended.
    ///
    /// Each request whose tokens are all computed gets a new one. `sample` is called with it and
    /// returns `true` if that was its last token.
    pub fn advance(
        &mut self,
        mut sample: impl FnMut(&mut Scheduled<E::Request>) -> bool,
    ) -> Vec<E::Request> {
        let Self { running, cache, retained, .. } = self;
        let is_last = |running: &mut Scheduled<_>| {
            running.computed += std::mem::take(&mut running.step);
            let is_sampled = running.computed == running.tokens;
            running.tokens += usize::from(is_sampled);
            is_sampled && sample(running)
        };
        let ended = running.extract_if(.., is_last).map(|mut ended| {
            match E::retention_id(&ended.request) {
                Some(id) => retained.push((id, ended.table)),
                None => cache.release(&mut ended.table),
            }
            ended.request
        });
        ended.collect()
    }

    /// Releases the blocks that were retained under a retention id.
    pub fn release_retained(&mut self, id: u64) {
        for (_, mut table) in self.retained.extract_if(.., |(retained, _)| *retained == id) {
            self.cache.release(&mut table);
        }
    }

    /// Removes all cached blocks. Returns `false`, without a change, while a request holds blocks.
    pub fn reset_cache(&mut self) -> bool {
        self.cache.reset()
    }
}

/// Gives a request `hits` and blocks for `tokens` further tokens, and schedules these tokens.
/// Enough blocks must be free.
fn compute<E: BatchEngine>(
    cache: &mut PagedCache<E::Hash, E::Hasher>,
    request: &mut Scheduled<E::Request>,
    hits: &[BlockId],
    tokens: usize,
    engine: &mut E,
) {
    let Scheduled { request, table, computed, step, .. } = request;
    *step = tokens;
    if !hits.is_empty() {
        cache.take(table, hits);
    }
    cache.grow(table, *computed + tokens, |hash| engine.on_evicted(hash));
    let stored = cache.store(table, *computed + tokens, |block| E::hash(request, block));
    if !stored.is_empty() {
        engine.on_stored(request, stored);
    }
}

#[cfg(test)]
mod tests;
