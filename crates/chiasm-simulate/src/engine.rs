//! A modelled engine: what vLLM's scheduler and caches do, in virtual time.

mod kv_cache;
mod live;
mod run;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use chiasm_engine_caches::{BlockId, Encoded, EncoderCache};
use chiasm_kv::event::KvEvent;
use chiasm_router::EngineStats;

use crate::model::EngineModel;
use crate::sequence::Sequence;
use crate::virtual_time::{Nanos, nanos, seconds};
use kv_cache::KvCache;
pub(crate) use live::Live;
use run::DecodeRun;

/// Somebody who is told what an engine gives out.
pub(crate) trait Observer {
    /// The whole prompt is computed.
    fn first_token(&mut self, live: &mut Live, now: Nanos);
    /// The last token is there.
    fn finished(&mut self, live: Live, now: Nanos);
    /// `tokens` tokens came `gap` after those before them, one of each request that decodes at a time.
    fn gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos);
}

/// Continuous batching, first come, first served, with prompts in chunks.
///
/// A step computes one token of each request that decodes and, with what is left of its budget, chunks of prompts: first those
/// begun, then those that wait, while there are seats and enough free blocks. Steps that only decode are taken in one go up
/// to the next end of a request or the next delivery. Work per request is constant but for its blocks; nothing is done per
/// token.
///
/// Unlike vLLM, and the simulated engine of `chiasm-sim-engine`, it never preempts: a request is admitted when its prompt *and*
/// its answer fit beside what those that run will still take. So the scheduler is one of its own; the caches are the same.
pub(crate) struct Engine {
    model: EngineModel,
    cache: KvCache,
    encoder: EncoderCache<u64>,
    waiting: VecDeque<Box<Live>>,
    seats: Vec<Option<Box<Live>>>,
    vacant: Vec<u32>,
    /// Seats of prompts that are not wholly computed, in order of admission.
    prefilling: Vec<u32>,
    decoding: u64,
    /// Tokens in the contexts of the requests that decode.
    context: u64,
    /// Blocks that the running requests will still take.
    growth: usize,
    /// Steps done.
    step: u64,
    /// Steps and seats: the next block is needed in that step.
    boundaries: BinaryHeap<Reverse<(u64, u32)>>,
    /// Steps and seats: that step gives the last token.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    activity: Activity,
    work: f64,
    hits: Vec<BlockId>,
}

#[derive(Clone, Copy, Debug)]
enum Activity {
    Idle,
    /// A step that computes prompt tokens, and what of it is work.
    Step {
        start: Nanos,
        end: Nanos,
        work: f64,
    },
    Run(DecodeRun),
}

/// What a step computes besides decode tokens.
#[derive(Default)]
struct Work {
    tokens: usize,
    pairs: f64,
    embeds: u64,
}

impl Engine {
    pub(crate) fn new(model: EngineModel) -> Self {
        Self {
            cache: KvCache::new(model.num_blocks, model.block_size.get()),
            encoder: EncoderCache::new(model.encoder_cache_tokens),
            model,
            waiting: VecDeque::new(),
            seats: Vec::new(),
            vacant: Vec::new(),
            prefilling: Vec::new(),
            decoding: 0,
            context: 0,
            growth: 0,
            step: 0,
            boundaries: BinaryHeap::new(),
            ends: BinaryHeap::new(),
            activity: Activity::Idle,
            work: 0.0,
            hits: Vec::new(),
        }
    }

    /// Whether a request can ever run.
    pub(crate) fn fits(model: &EngineModel, sequence: &Sequence) -> bool {
        sequence.computed().div_ceil(model.block_size.get()) <= model.num_blocks as usize
    }

    /// The time at which [`Engine::wake`] is to be called next; earlier calls are wrong. It changes with every call.
    pub(crate) fn next_wake(&self) -> Option<Nanos> {
        match &self.activity {
            Activity::Idle => None,
            Activity::Step { end, .. } => Some(*end),
            Activity::Run(run) => Some(run.end()),
        }
    }

    /// Seconds of its steps that requests caused: all but the overhead and the reading of weights.
    pub(crate) fn work(&self) -> f64 {
        self.work
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            running: (self.seats.len() - self.vacant.len()) as u64,
            waiting: self.waiting.len() as u64,
            kv_usage: self.cache.usage(),
        }
    }

    #[cfg(test)]
    pub(crate) fn distinct_blocks(&self) -> usize {
        self.cache.distinct()
    }

    /// Queues a request that [`Engine::fits`].
    pub(crate) fn deliver(&mut self, live: Live, now: Nanos) {
        self.waiting.push_back(Box::new(live));
        match &mut self.activity {
            Activity::Idle => self.start_step(now),
            Activity::Step { .. } => {}
            Activity::Run(run) => run.stop_after(now),
        }
    }

    /// Ends what is under way and starts what comes next. Returns what happened in the KV cache meanwhile.
    pub(crate) fn wake(&mut self, now: Nanos, observer: &mut impl Observer) -> Vec<KvEvent> {
        match self.activity {
            Activity::Idle => {}
            Activity::Step { start, end, work } => {
                self.work += work;
                self.advance(1, end - start, now, observer);
                self.give_first_tokens(now, observer);
            }
            Activity::Run(run) => {
                let took = run.end() - run.start;
                if let Some(gap) = took.checked_div(run.steps) {
                    let weights = self.model.overhead + self.model.weights.max(self.decoding as f64 * self.model.token);
                    let tokens = (run.steps * self.decoding) as f64 * self.model.token;
                    self.work += tokens + (seconds(took) - run.steps as f64 * weights).max(0.0);
                    self.advance(run.steps, gap, now, observer);
                }
            }
        }
        self.end_requests(now, observer);
        let events = self.cache.take_events();
        self.start_step(now);
        events
    }

    fn advance(&mut self, steps: u64, gap: Nanos, now: Nanos, observer: &mut impl Observer) {
        self.step += steps;
        self.context += steps * self.decoding;
        if self.decoding > 0 {
            observer.gaps(gap, steps * self.decoding, now);
        }
        self.pass_boundaries(self.step);
    }

    /// Gives decoding requests the blocks that they need up to a step, in the order in which they need them.
    fn pass_boundaries(&mut self, step: u64) {
        let block_size = self.model.block_size.get();
        while let Some(&Reverse((at, seat))) = self.boundaries.peek().filter(|Reverse((at, _))| *at <= step) {
            self.boundaries.pop();
            let Some(live) = self.seats[seat as usize].as_mut() else { continue };
            let Live { table, sequence, keys, first_step, .. } = &mut **live;
            let computed = sequence.prompt() + (at - *first_step) as usize;
            self.cache.store(table, sequence, keys, computed - 1);
            self.growth -= self.cache.grow(table, computed);
            let next = live.next_boundary(block_size);
            if live.table.len() * block_size < live.sequence.computed() {
                self.boundaries.push(Reverse((next, seat)));
            }
        }
    }

    fn give_first_tokens(&mut self, now: Nanos, observer: &mut impl Observer) {
        let (step, block_size) = (self.step, self.model.block_size.get());
        let Self { seats, prefilling, boundaries, ends, decoding, context, .. } = self;
        prefilling.retain(|&seat| {
            let Some(live) = seats[seat as usize].as_mut() else { return false };
            if live.computed < live.sequence.prompt() {
                return true;
            }
            live.first_step = step;
            observer.first_token(live, now);
            ends.push(Reverse((step + live.sequence.answer() as u64 - 1, seat)));
            if live.table.len() * block_size < live.sequence.computed() {
                boundaries.push(Reverse((live.next_boundary(block_size), seat)));
            }
            *decoding += 1;
            *context += live.sequence.prompt() as u64;
            false
        });
    }

    fn end_requests(&mut self, now: Nanos, observer: &mut impl Observer) {
        while let Some(&Reverse((_, seat))) = self.ends.peek().filter(|Reverse((at, _))| *at <= self.step) {
            self.ends.pop();
            let Some(mut live) = self.seats[seat as usize].take() else { continue };
            self.vacant.push(seat);
            self.decoding -= 1;
            let Live { table, sequence, keys, .. } = &mut *live;
            self.context -= sequence.computed() as u64;
            self.cache.store(table, sequence, keys, sequence.computed());
            self.cache.release(table);
            observer.finished(*live, now);
        }
    }

    fn start_step(&mut self, now: Nanos) {
        self.pass_boundaries(self.step + 1);
        let mut work = Work::default();
        let mut budget = self.model.max_batched_tokens - self.decoding as usize;
        for at in 0..self.prefilling.len() {
            let seat = self.prefilling[at] as usize;
            if let Some(mut live) = self.seats[seat].take() {
                budget -= self.compute_chunk(&mut live, budget, &mut work);
                self.seats[seat] = Some(live);
            }
        }
        self.admit(&mut budget, &mut work);
        let (first, work_seconds) = self.step_seconds(&work);
        self.activity = if work.tokens > 0 {
            Activity::Step { start: now, end: now + nanos(first), work: work_seconds }
        } else if let Some(Reverse((end, _))) = self.ends.peek() {
            let growth = self.model.kv_read * self.decoding as f64;
            Activity::Run(DecodeRun { start: now, first, growth, steps: end - self.step })
        } else {
            Activity::Idle
        };
    }

    /// What a step takes, and what of it counts as work.
    fn step_seconds(&self, work: &Work) -> (f64, f64) {
        let model = &self.model;
        let tokens = (work.tokens as f64 + self.decoding as f64) * model.token;
        let rest =
            work.embeds as f64 * model.embed + self.context as f64 * model.kv_read + work.pairs * model.attention;
        (model.overhead + model.weights.max(tokens) + rest, tokens + rest)
    }

    fn admit(&mut self, budget: &mut usize, work: &mut Work) {
        let block_size = self.model.block_size.get();
        while *budget > 0 && self.seats.len() - self.vacant.len() < self.model.max_running {
            let Some(live) = self.waiting.front() else { break };
            self.cache.find(&live.keys, live.sequence.prompt() - 1, &mut self.hits);
            let missing = live.sequence.computed().div_ceil(block_size) - self.hits.len();
            if missing + self.cache.idle(&self.hits) + self.growth > self.cache.free() {
                break;
            }
            let Some(mut live) = self.waiting.pop_front() else { break };
            self.cache.take(&mut live.table, &self.hits);
            self.growth += missing;
            live.cached = self.hits.len() * block_size;
            live.computed = live.cached;
            // Images that lie wholly in what was found need no embeddings.
            live.next_item = live.sequence.items().partition_point(|item| item.end() <= live.cached);
            *budget -= self.compute_chunk(&mut live, *budget, work);
            let seat = self.vacant.pop().unwrap_or_else(|| {
                self.seats.push(None);
                self.seats.len() as u32 - 1
            });
            self.prefilling.push(seat);
            self.seats[seat as usize] = Some(live);
        }
    }

    /// Computes the next tokens of a prompt, at most `budget`; returns how many.
    fn compute_chunk(&mut self, live: &mut Live, budget: usize, work: &mut Work) -> usize {
        let tokens = budget.min(live.sequence.prompt() - live.computed);
        let end = live.computed + tokens;
        while let Some(item) = live.sequence.items().get(live.next_item).filter(|item| item.start < end) {
            live.next_item += 1;
            let (id, embeds) = (item.image.id, u64::from(item.image.embeds));
            if self.encoder.encode(&id, embeds) == Encoded::Now {
                live.encoded += embeds;
                work.embeds += embeds;
            }
        }
        work.tokens += tokens;
        work.pairs += (end * end - live.computed * live.computed) as f64 / 2.0;
        self.growth -= self.cache.grow(&mut live.table, end);
        self.cache.store(&mut live.table, &live.sequence, &live.keys, end);
        live.computed = end;
        tokens
    }
}

#[cfg(test)]
mod tests;
