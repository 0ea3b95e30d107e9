//! A modelled engine: what vLLM's scheduler and caches do, in virtual time.

mod cache_events;
mod handover;
mod live;
mod run;

use std::convert::Infallible;
use std::hash::BuildHasherDefault;
use std::ops::Range;

use chiasm_engine_model::{Batch, BatchEngine, BatchLimits, Encoded, EncoderCache, Scheduled};
use chiasm_kv::event::KvEvent;
use chiasm_router::EngineStats;

use crate::embedding_store::EmbeddingStore;
use crate::model::EngineModel;
use crate::sequence::{Item, Sequence};
use crate::virtual_time::{Nanos, nanos, seconds};
use cache_events::{BlockHash, CacheEvents, Uniform};
pub(crate) use live::{Live, Stage};
use run::DecodeRun;

/// Somebody who is told what an engine gives out.
pub(crate) trait Observer {
    /// The whole prompt is computed.
    fn first_token(&mut self, live: &mut Live, now: Nanos);
    /// The whole prompt is computed, for another engine.
    fn prefilled(&mut self, live: Live, now: Nanos);
    /// The last token is there.
    fn finished(&mut self, live: Live, now: Nanos);
    /// `tokens` tokens came `gap` after those before them, one of each request that decodes at a
    /// time.
    fn gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos);
}

/// Continuous batching as [`Batch`] does it, with the time that it takes.
///
/// Steps that only decode are taken in one go, up to the next end of a request or the next
/// delivery, or as long as there are blocks. Meanwhile nobody is admitted who was not before: that
/// the blocks which such steps fill might be found by a request that waits is left out.
pub(crate) struct Engine {
    model: EngineModel,
    batch: Batch<Surroundings>,
    surroundings: Surroundings,
    /// What the steps under way compute.
    load: Load,
    activity: Activity,
    work: f64,
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

/// What a step computes.
#[derive(Clone, Copy, Default)]
struct Load {
    /// Requests that compute the token that they were given last.
    decoding: u64,
    /// Tokens in the contexts of those.
    context: u64,
    /// Other tokens: of prompts, and those that are computed again after a preemption.
    tokens: usize,
    /// Pairs of such a token and one before it.
    pairs: f64,
    embeds: u64,
    /// Embeddings that are read.
    reads: u64,
}

/// A request in the batch.
struct InBatch {
    live: Box<Live>,
    /// Tokens of prompt and answer.
    len: usize,
    has_first_token: bool,
    /// When it was preempted, if it got no token since.
    preempted: Option<Nanos>,
}

/// What is around the batch.
struct Surroundings {
    encoder: EncoderCache<u64>,
    /// Where embeddings are that other engines have left, in a fleet where some encode alone.
    store: Option<EmbeddingStore>,
    events: CacheEvents,
    /// When the current step began.
    now: Nanos,
    /// Embeddings that the current step makes.
    embeds: u64,
    /// Embeddings that it reads.
    reads: u64,
}

impl Engine {
    /// An engine that has nothing to do; `store` is where it finds embeddings that others have
    /// left.
    pub(crate) fn new(model: EngineModel, store: Option<EmbeddingStore>) -> Self {
        let block_size = model.block_size.get();
        let limits = BatchLimits {
            max_running: model.max_running,
            max_batched_tokens: model.max_batched_tokens,
            max_model_len: usize::MAX,
        };
        Self {
            batch: Batch::new(limits, model.num_blocks, block_size),
            surroundings: Surroundings {
                encoder: EncoderCache::new(model.encoder_cache_tokens),
                store,
                events: CacheEvents::new(block_size),
                now: 0,
                embeds: 0,
                reads: 0,
            },
            model,
            load: Load::default(),
            activity: Activity::Idle,
            work: 0.0,
        }
    }

    /// Whether a request can ever run.
    pub(crate) fn fits(model: &EngineModel, sequence: &Sequence) -> bool {
        sequence.computed().div_ceil(model.block_size.get()) <= model.num_blocks as usize
    }

    /// The time at which [`Engine::wake`] is to be called next; earlier calls are wrong. It changes
    /// with every call.
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
            running: self.batch.running().len() as u64,
            waiting: self.batch.waiting() as u64,
            kv_usage: self.batch.cache().usage(),
            ..EngineStats::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn distinct_blocks(&self) -> usize {
        self.batch.cache().distinct()
    }

    /// Queues a request that [`Engine::fits`].
    pub(crate) fn deliver(&mut self, live: Live, now: Nanos) {
        let sequence = &live.sequence;
        let prompt = sequence.prompt();
        let len = match live.stage {
            Stage::Prefill => prompt + 1,
            Stage::Whole | Stage::Decode => prompt + sequence.answer(),
        };
        let items_end = sequence.items().last().map_or(0, Item::end);
        let request =
            InBatch { live: Box::new(live), len, has_first_token: false, preempted: None };
        self.batch.add(Scheduled::new(request, prompt, items_end));
        match &mut self.activity {
            Activity::Idle => self.start_step(now),
            Activity::Step { .. } => {}
            Activity::Run(run) => run.stop_after(now),
        }
    }

    /// Ends what is under way and starts what comes next. Returns what happened in the KV cache
    /// meanwhile.
    pub(crate) fn wake(&mut self, now: Nanos, observer: &mut impl Observer) -> Vec<KvEvent> {
        match self.activity {
            Activity::Idle => {}
            Activity::Step { start, end, work } => {
                self.work += work;
                self.give_tokens(1, end - start, now, observer);
            }
            Activity::Run(run) => {
                let took = run.end() - run.start;
                if let Some(gap) = took.checked_div(run.steps) {
                    let decoding = self.load.decoding;
                    let weights = self.model.overhead
                        + self.model.weights.max(decoding as f64 * self.model.token);
                    let tokens = (run.steps * decoding) as f64 * self.model.token;
                    self.work += tokens + (seconds(took) - run.steps as f64 * weights).max(0.0);
                    self.batch.repeat(run.steps as usize - 1, &mut self.surroundings);
                    self.give_tokens(run.steps, gap, now, observer);
                }
            }
        }
        let events = self.surroundings.events.take();
        self.start_step(now);
        events
    }

    /// Ends `steps` steps, each of which took `gap`.
    fn give_tokens(&mut self, steps: u64, gap: Nanos, now: Nanos, observer: &mut impl Observer) {
        let mut tokens = 0;
        let ended = self.batch.advance(|running| {
            let is_last = running.tokens() == running.request.len;
            let request = &mut running.request;
            let is_first = !std::mem::replace(&mut request.has_first_token, true);
            if request.live.stage == Stage::Prefill {
                // Nobody sees its token.
            } else if is_first {
                observer.first_token(&mut request.live, now);
            } else {
                tokens += steps;
                if let Some(preempted) = request.preempted.take() {
                    tokens -= 1;
                    observer.gaps(now - preempted - (steps - 1) * gap, 1, now);
                }
            }
            is_last
        });
        if tokens > 0 {
            observer.gaps(gap, tokens, now);
        }
        for request in ended {
            match request.live.stage {
                Stage::Prefill => observer.prefilled(*request.live, now),
                Stage::Whole | Stage::Decode => observer.finished(*request.live, now),
            }
        }
    }

    fn start_step(&mut self, now: Nanos) {
        self.surroundings.now = now;
        (self.surroundings.embeds, self.surroundings.reads) = (0, 0);
        let Ok(()) = self.batch.schedule(&mut self.surroundings);
        self.load = Load::of(self.batch.running(), &self.surroundings);
        let (first, work) = self.step_seconds();
        self.activity = if self.load.tokens > 0 {
            Activity::Step { start: now, end: now + nanos(first), work }
        } else if self.load.decoding > 0 {
            let to_go = |running: &Scheduled<InBatch>| running.request.len - running.tokens();
            let until_first_end = self.batch.running().iter().map(to_go).min().unwrap_or(1);
            let steps = 1 + self.batch.repeatable(until_first_end - 1) as u64;
            let growth = self.model.kv_read * self.load.decoding as f64;
            Activity::Run(DecodeRun { start: now, first, growth, steps })
        } else {
            Activity::Idle
        };
    }

    /// What the step takes, and what of it counts as work.
    fn step_seconds(&self) -> (f64, f64) {
        let (model, load) = (&self.model, &self.load);
        let tokens = (load.tokens as f64 + load.decoding as f64) * model.token;
        let rest = load.embeds as f64 * model.embed
            + load.context as f64 * model.kv_read
            + load.pairs * model.attention;
        let rest = rest + load.reads as f64 * model.embed_bytes / model.transfer_bandwidth;
        (model.overhead + model.weights.max(tokens) + rest, tokens + rest)
    }
}

impl Load {
    fn of(running: &[Scheduled<InBatch>], surroundings: &Surroundings) -> Self {
        let Surroundings { embeds, reads, .. } = *surroundings;
        let mut load = Self { embeds, reads, ..Self::default() };
        for running in running {
            let (start, end) = (running.computed(), running.computed() + running.step());
            if running.decodes() {
                load.decoding += 1;
                load.context += start as u64;
            } else {
                load.tokens += running.step();
                load.pairs += (end * end - start * start) as f64 / 2.0;
            }
        }
        load
    }
}

impl BatchEngine for Surroundings {
    type Request = InBatch;
    type Hash = BlockHash;
    type Hasher = BuildHasherDefault<Uniform>;
    type Error = Infallible;

    fn hash(request: &InBatch, block: usize) -> BlockHash {
        cache_events::hash(request.live.keys[block])
    }

    fn given(request: &InBatch) -> usize {
        match request.live.stage {
            Stage::Decode => request.live.sequence.prompt(),
            Stage::Whole | Stage::Prefill => 0,
        }
    }

    fn kept_as(request: &InBatch) -> Option<u64> {
        (request.live.stage == Stage::Prefill).then_some(request.live.number)
    }

    fn encode(
        &mut self,
        request: &mut InBatch,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Infallible> {
        let Live { sequence, next_item, encoded, .. } = &mut *request.live;
        if admission {
            // Images that lie wholly in what was found need no embeddings.
            *next_item = sequence.items().partition_point(|item| item.end() <= tokens.start);
        }
        while let Some(item) =
            sequence.items().get(*next_item).filter(|item| item.start < tokens.end)
        {
            *next_item += 1;
            let embeds = u64::from(item.image.embeds);
            if self.encoder.encode(&item.image.id, embeds) != Encoded::Now {
                continue;
            }
            if self.store.as_ref().is_some_and(|store| store.has(item.image)) {
                self.reads += embeds;
            } else {
                *encoded += embeds;
                self.embeds += embeds;
            }
        }
        Ok(true)
    }

    fn admitted(&mut self, running: &mut Scheduled<InBatch>, cached: usize) {
        // What an engine is given was not found.
        if !running.was_preempted() && running.request.live.stage != Stage::Decode {
            running.request.live.cached = cached;
        }
    }

    fn preempted(&mut self, request: &mut InBatch) {
        if request.has_first_token {
            request.preempted.get_or_insert(self.now);
        }
    }

    fn stored(&mut self, request: &InBatch, blocks: Range<usize>) {
        self.events.stored(&request.live.sequence, &request.live.keys, blocks);
    }

    fn evicted(&mut self, hash: BlockHash) {
        self.events.evicted(hash);
    }
}

#[cfg(test)]
mod tests;
