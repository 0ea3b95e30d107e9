//! Continuous batching: which tokens of which requests each step computes.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hash};
use std::ops::Range;

use crate::free_queue::BlockId;
use crate::paged_cache::{BlockTable, PagedCache};

/// The engine around a [`Batch`]: what it calls blocks, what it does with items, and who is told
/// what happens.
pub trait BatchEngine {
    /// What the engine knows of a request.
    type Request;
    /// The engine's hash of a block and everything before it.
    type Hash: Copy + Eq + Hash;
    /// How the table of hashes hashes those.
    type Hasher: BuildHasher + Default;
    /// What the engine dies of.
    type Error;

    /// The hash of a request's full block; `block` counts from 0.
    fn hash(request: &Self::Request, block: usize) -> Self::Hash;

    /// Whether the request may take over blocks of others.
    fn reads_prefix_cache(_request: &Self::Request) -> bool {
        true
    }

    /// Leading tokens of a request whose keys and values another engine has computed and this one
    /// is given, as long as it has not given its blocks back.
    fn given(_request: &Self::Request) -> usize {
        0
    }

    /// The number under which the blocks of a request that has ended are kept, until
    /// [`Batch::let_go`].
    fn kept_as(_request: &Self::Request) -> Option<u64> {
        None
    }

    /// Looks at the request that is next to be admitted, each time it is.
    ///
    /// # Errors
    /// What the engine dies of.
    fn look(&mut self, _request: &mut Self::Request) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Encodes what the tokens of a range need, before they are computed. False leaves the request
    /// as it is for this step. `admission` says that the request would begin to run with it.
    ///
    /// # Errors
    /// What the engine dies of.
    fn encode(
        &mut self,
        request: &mut Self::Request,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Self::Error>;

    /// A request begins to run, or runs again, with so many leading tokens from the cache.
    fn admitted(&mut self, request: &mut Scheduled<Self::Request>, cached: usize);

    /// A running request gave its blocks back and waits again.
    fn preempted(&mut self, request: &mut Self::Request);

    /// Others can find these blocks of a request from now on.
    fn stored(&mut self, request: &Self::Request, blocks: Range<usize>);

    /// One block of this hash is gone.
    fn evicted(&mut self, hash: Self::Hash);
}

/// A request that waits or runs, and how far it is.
#[derive(Debug)]
pub struct Scheduled<R> {
    /// What the engine knows of it.
    pub request: R,
    prompt: usize,
    /// The first token after all items: from there on nothing is encoded.
    items_end: usize,
    tokens: usize,
    computed: usize,
    step: usize,
    preempted: bool,
    table: BlockTable,
}

impl<R> Scheduled<R> {
    /// A request with `prompt` tokens, whose items end before token `items_end`.
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

    /// Number of tokens known: the prompt's, and those generated.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of tokens generated.
    pub fn generated(&self) -> usize {
        self.tokens - self.prompt
    }

    /// Number of leading tokens whose keys and values exist.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Number of tokens after these that the current step computes.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Whether the current step computes the token that was generated last, and nothing else.
    pub fn decodes(&self) -> bool {
        self.step == 1 && self.generated() > 0
    }

    /// Whether it gave its blocks back at least once.
    pub fn was_preempted(&self) -> bool {
        self.preempted
    }

    /// Number of its blocks that other requests can find.
    pub fn stored(&self) -> usize {
        self.table.stored()
    }
}

/// How much fits into a step.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Requests that run at once, vLLM's `max_num_seqs`.
    pub max_running: usize,
    /// Tokens that a step computes, vLLM's `max_num_batched_tokens`.
    pub max_batched_tokens: usize,
    /// Tokens of a request, vLLM's `max_model_len`.
    pub max_model_len: usize,
}

/// First come, first served, as vLLM 0.32's `Scheduler` with one group of full-attention layers.
///
/// A step is [`Batch::schedule`], then time passes, then [`Batch::advance`]. Running requests come
/// first, one token each or the next chunk of their prompt; if blocks run out, the request that
/// came last is preempted. Then waiting requests are admitted while there are tokens, seats and
/// enough free blocks for their whole prompt.
pub struct Batch<E: BatchEngine> {
    limits: BatchLimits,
    block_size: usize,
    cache: PagedCache<E::Hash, E::Hasher>,
    running: Vec<Scheduled<E::Request>>,
    waiting: VecDeque<Scheduled<E::Request>>,
    /// Somebody was preempted in the step that was scheduled last, so that nobody was looked at who
    /// waits.
    preempted: bool,
    hits: Vec<BlockId>,
    /// Blocks of requests that have ended.
    kept: Vec<(u64, BlockTable)>,
}

impl<E: BatchEngine> Batch<E> {
    /// A batch without requests, over an empty cache of `num_blocks` blocks of `block_size` tokens.
    pub fn new(limits: BatchLimits, num_blocks: u32, block_size: usize) -> Self {
        Self {
            limits,
            block_size,
            cache: PagedCache::new(num_blocks, block_size),
            running: Vec::new(),
            waiting: VecDeque::new(),
            preempted: false,
            hits: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// The requests that run, in the order in which they were admitted.
    pub fn running(&self) -> &[Scheduled<E::Request>] {
        &self.running
    }

    /// Number of requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The KV cache.
    pub fn cache(&self) -> &PagedCache<E::Hash, E::Hasher> {
        &self.cache
    }

    /// Queues a request.
    pub fn add(&mut self, request: Scheduled<E::Request>) {
        self.waiting.push_back(request);
    }

    /// Takes the first request out that runs or waits and for which `is` holds, and its blocks
    /// back.
    pub fn remove(&mut self, is: impl Fn(&E::Request) -> bool) -> Option<E::Request> {
        let found = match self.running.iter().position(|running| is(&running.request)) {
            Some(at) => self.running.remove(at),
            None => self
                .waiting
                .remove(self.waiting.iter().position(|waiting| is(&waiting.request))?)?,
        };
        Some(self.end(found))
    }

    fn end(&mut self, mut request: Scheduled<E::Request>) -> E::Request {
        self.cache.release(&mut request.table);
        request.request
    }

    /// Chooses the tokens of the next step; [`Scheduled::step`] says which.
    ///
    /// # Errors
    /// What the engine dies of.
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
            // One position is kept for the token that is sampled. A prompt of max_model_len tokens
            // that did not fit one step therefore never ends, in vLLM too.
            let positions = (self.limits.max_model_len - 1).saturating_sub(running.computed);
            let tokens = (running.tokens - running.computed).min(*budget).min(positions);
            let end = running.computed + tokens;
            let is_left_out = tokens == 0
                || running.computed < running.items_end
                    && !engine.encode(&mut running.request, running.computed..end, false)?;
            if is_left_out {
                continue;
            }
            // Whoever is preempted came last, and in the end that is this one.
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

    /// Makes the request that came last wait again, before all others. False if none runs.
    pub fn preempt_last(&mut self, engine: &mut E) -> bool {
        let Some(mut last) = self.running.pop() else {
            return false;
        };
        self.cache.release(&mut last.table);
        engine.preempted(&mut last.request);
        self.preempted = true;
        self.waiting.push_front(Scheduled { computed: 0, step: 0, preempted: true, ..last });
        true
    }

    fn admit_waiting(&mut self, budget: &mut usize, engine: &mut E) -> Result<(), E::Error> {
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(next) = self.waiting.front_mut() else {
                break;
            };
            engine.look(&mut next.request)?;
            // The last token is computed even when its block is cached: its logits are needed.
            let findable = match E::reads_prefix_cache(&next.request) {
                true => next.tokens.saturating_sub(1),
                false => 0,
            };
            self.cache.find(
                (0..).map(|block| E::hash(&next.request, block)),
                findable,
                &mut self.hits,
            );
            let given = if next.preempted { 0 } else { E::given(&next.request).min(findable) };
            let cached = given.max(self.hits.len() * self.block_size);
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
            engine.admitted(&mut next, cached);
            self.running.push(next);
        }
        Ok(())
    }

    /// How many more steps like the one that was scheduled last can follow it, up to `most`; each
    /// running request must compute one token in that step. There may be blocks for a few more.
    /// After a step in which somebody was preempted there is none: the next one may admit those who
    /// wait.
    pub fn repeatable(&self, most: usize) -> usize {
        if self.preempted {
            return 0;
        }
        let fits = |more: usize| {
            let missing =
                |running: &Scheduled<_>| self.cache.missing(&running.table, running.tokens + more);
            self.running.iter().map(missing).sum::<usize>() <= self.cache.free()
        };
        std::iter::successors(Some(most), |more| Some(more / 2))
            .find(|&more| more == 0 || fits(more))
            .unwrap_or(0)
    }

    /// Makes `more` steps more of the one that was scheduled last, at most as many as are
    /// [`repeatable`](Self::repeatable).
    pub fn repeat(&mut self, more: usize, engine: &mut E) {
        for running in &mut self.running {
            debug_assert!(running.decodes(), "only decoding is repeated");
            running.tokens += more;
            compute(&mut self.cache, running, &[], running.step + more, engine);
        }
    }

    /// Ends the step: each request whose tokens are all computed gets a new one, by `sample`, which
    /// says whether that was the last. Returns the requests whose last it was.
    pub fn advance(
        &mut self,
        mut sample: impl FnMut(&mut Scheduled<E::Request>) -> bool,
    ) -> Vec<E::Request> {
        let Self { running, cache, kept, .. } = self;
        let is_last = |running: &mut Scheduled<_>| {
            running.computed += std::mem::take(&mut running.step);
            let is_sampled = running.computed == running.tokens;
            running.tokens += usize::from(is_sampled);
            is_sampled && sample(running)
        };
        let ended = running.extract_if(.., is_last).map(|mut ended| {
            match E::kept_as(&ended.request) {
                Some(number) => kept.push((number, ended.table)),
                None => cache.release(&mut ended.table),
            }
            ended.request
        });
        ended.collect()
    }

    /// Gives back the blocks that a request which has ended was to keep.
    pub fn let_go(&mut self, number: u64) {
        for (_, mut table) in self.kept.extract_if(.., |(kept, _)| *kept == number) {
            self.cache.release(&mut table);
        }
    }

    /// Forgets all cached blocks. False, and nothing is changed, while a request holds some.
    pub fn reset_cache(&mut self) -> bool {
        self.cache.reset()
    }
}

/// Gives a request `hits` and room for `tokens` tokens more, for which there are blocks, and plans
/// to compute them.
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
    cache.grow(table, *computed + tokens, |hash| engine.evicted(hash));
    let stored = cache.store(table, *computed + tokens, |block| E::hash(request, block));
    if !stored.is_empty() {
        engine.stored(request, stored);
    }
}

#[cfg(test)]
mod tests;
