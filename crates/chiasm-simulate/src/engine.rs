//! A modelled engine: vLLM's scheduler and caches, in virtual time.

mod cache_events;
mod handover;
mod live;
mod run;

use std::convert::Infallible;
use std::hash::BuildHasherDefault;
use std::ops::Range;

use chiasm_engine_model::{
    Batch, BatchEngine, BatchLimits, EncoderCache, EncoderLookup, Scheduled,
};
use chiasm_kv::event::KvEvent;
use chiasm_router::EngineStats;

use crate::embedding_store::EmbeddingStore;
use crate::model::EngineModel;
use crate::sequence::{Item, Sequence};
use crate::virtual_time::{Nanos, nanos, seconds};
use cache_events::{BlockHash, CacheEvents, IdentityHasher};
pub(crate) use live::{LiveRequest, Stage};
use run::DecodeRun;

/// An observer of the tokens that an engine generates.
pub(crate) trait Observer {
    /// Called when the whole prompt of a request is computed.
    fn on_first_token(&mut self, live: &mut LiveRequest, now: Nanos);
    /// Called when the whole prompt of a request is computed for another engine.
    fn on_prefilled(&mut self, live: LiveRequest, now: Nanos);
    /// Called with the last token of a request.
    fn on_finished(&mut self, live: LiveRequest, now: Nanos);
    /// Called when `tokens` tokens of decoding requests followed their previous tokens after `gap`.
    fn on_gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos);
}

/// A modelled engine: the continuous batching of [`Batch`], with durations.
///
/// Consecutive steps that only decode are computed as one [`DecodeRun`]. It ends when a request
/// ends, when a request is delivered, or when no block is free. No waiting request is admitted
/// during the run. So the model ignores that a waiting request might find the blocks that the run
/// fills.
pub(crate) struct Engine {
    model: EngineModel,
    batch: Batch<Executor>,
    executor: Executor,
    /// The load of the running steps.
    load: Load,
    activity: Activity,
    work: f64,
}

#[derive(Clone, Copy, Debug)]
enum Activity {
    Idle,
    /// A step that computes prompt tokens. `work` is the part of its duration that counts as work,
    /// in seconds.
    Step {
        start: Nanos,
        end: Nanos,
        work: f64,
    },
    Run(DecodeRun),
}

/// The load of a step.
#[derive(Clone, Copy, Default)]
struct Load {
    /// Decoding requests. Each computes the token that it generated last.
    decoding: u64,
    /// Tokens in the contexts of these requests.
    context: u64,
    /// Other tokens: prompt tokens, and tokens that are computed again after a preemption.
    tokens: usize,
    /// Pairs of one of these tokens and an earlier token.
    pairs: f64,
    /// Embeddings that are encoded.
    embeds: u64,
    /// Embeddings that are read from the store.
    reads: u64,
}

/// The duration of a step, in seconds.
struct StepTime {
    total: f64,
    /// The part that counts as work.
    work: f64,
}

/// A request in the batch.
struct BatchRequest {
    live: Box<LiveRequest>,
    /// Tokens of prompt and answer.
    len: usize,
    has_first_token: bool,
    /// The time of the preemption, if no token was generated since.
    preempted: Option<Nanos>,
}

/// The executor of the batch: encodes images and records cache events.
struct Executor {
    encoder: EncoderCache<u64>,
    /// The store of embeddings of other engines, in a fleet with encoding engines.
    store: Option<EmbeddingStore>,
    events: CacheEvents,
    /// The start of the current step.
    now: Nanos,
    /// Embeddings that the current step encodes.
    embeds: u64,
    /// Embeddings that the current step reads from the store.
    reads: u64,
}

impl Engine {
    /// Creates an idle engine; `store` has the embeddings of other engines.
    pub(crate) fn new(model: EngineModel, store: Option<EmbeddingStore>) -> Self {
        let block_size = model.block_size.get();
        let limits = BatchLimits {
            max_running: model.max_running,
            max_batched_tokens: model.max_batched_tokens,
            max_model_len: usize::MAX,
        };
        Self {
            batch: Batch::new(limits, model.num_blocks, block_size),
            executor: Executor {
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

    /// Returns `true` if a request fits the KV cache.
    pub(crate) fn fits(model: &EngineModel, sequence: &Sequence) -> bool {
        sequence.computed().div_ceil(model.block_size.get()) <= model.num_blocks as usize
    }

    /// Returns the time at which [`Engine::wake`] must be called next, and not earlier. Each call
    /// of [`Engine::deliver`] or [`Engine::wake`] may change the time.
    pub(crate) fn next_wake(&self) -> Option<Nanos> {
        match &self.activity {
            Activity::Idle => None,
            Activity::Step { end, .. } => Some(*end),
            Activity::Run(run) => Some(run.end()),
        }
    }

    /// Returns the work done so far, in seconds: the time of all steps without their overhead and
    /// the reading of weights.
    pub(crate) fn work(&self) -> f64 {
        self.work
    }

    /// Returns the statistics that the engine reports.
    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.batch.running().len() as u64,
            waiting: self.batch.waiting() as u64,
            kv_usage: self.batch.cache().usage(),
            ..EngineStats::default()
        }
    }

    /// Returns the number of different blocks in the KV cache.
    #[cfg(test)]
    pub(crate) fn distinct_blocks(&self) -> usize {
        self.batch.cache().distinct_hashes()
    }

    /// Queues a request, which must [fit](Engine::fits).
    pub(crate) fn deliver(&mut self, live: LiveRequest, now: Nanos) {
        let sequence = &live.sequence;
        let prompt = sequence.prompt();
        let len = match live.stage {
            Stage::Prefill => prompt + 1,
            Stage::Whole | Stage::Decode => prompt + sequence.answer(),
        };
        let items_end = sequence.items().last().map_or(0, Item::end);
        let request =
            BatchRequest { live: Box::new(live), len, has_first_token: false, preempted: None };
        self.batch.add(Scheduled::new(request, prompt, items_end));
        match &mut self.activity {
            Activity::Idle => self.start_step(now),
            Activity::Step { .. } => {}
            Activity::Run(run) => run.stop_after(now),
        }
    }

    /// Ends the running steps and starts the next ones. Returns the KV events of the ended steps.
    pub(crate) fn wake(&mut self, now: Nanos, observer: &mut impl Observer) -> Vec<KvEvent> {
        match self.activity {
            Activity::Idle => {}
            Activity::Step { start, end, work } => {
                self.work += work;
                self.emit_tokens(1, end - start, now, observer);
            }
            Activity::Run(run) => {
                let duration = run.end() - run.start;
                if let Some(gap) = duration.checked_div(run.steps) {
                    let decoding = self.load.decoding;
                    let weights = self.model.overhead
                        + self.model.weights.max(decoding as f64 * self.model.token);
                    let tokens = (run.steps * decoding) as f64 * self.model.token;
                    self.work += tokens + (seconds(duration) - run.steps as f64 * weights).max(0.0);
                    self.batch.repeat(run.steps as usize - 1, &mut self.executor);
                    self.emit_tokens(run.steps, gap, now, observer);
                }
            }
        }
        let events = self.executor.events.take();
        self.start_step(now);
        events
    }

    /// Ends `steps` steps, each of which took `gap`, and notifies `observer`.
    fn emit_tokens(&mut self, steps: u64, gap: Nanos, now: Nanos, observer: &mut impl Observer) {
        let mut tokens = 0;
        let ended = self.batch.advance(|running| {
            let is_last = running.tokens() == running.request.len;
            let request = &mut running.request;
            let is_first = !std::mem::replace(&mut request.has_first_token, true);
            if request.live.stage == Stage::Prefill {
                // The token of a prefill is discarded.
            } else if is_first {
                observer.on_first_token(&mut request.live, now);
            } else {
                tokens += steps;
                if let Some(preempted) = request.preempted.take() {
                    tokens -= 1;
                    observer.on_gaps(now - preempted - (steps - 1) * gap, 1, now);
                }
            }
            is_last
        });
        if tokens > 0 {
            observer.on_gaps(gap, tokens, now);
        }
        for request in ended {
            match request.live.stage {
                Stage::Prefill => observer.on_prefilled(*request.live, now),
                Stage::Whole | Stage::Decode => observer.on_finished(*request.live, now),
            }
        }
    }

    fn start_step(&mut self, now: Nanos) {
        self.executor.now = now;
        self.executor.embeds = 0;
        self.executor.reads = 0;
        let Ok(()) = self.batch.schedule(&mut self.executor);
        self.load = Load::new(self.batch.running(), &self.executor);
        let StepTime { total, work } = self.step_time();
        self.activity = if self.load.tokens > 0 {
            Activity::Step { start: now, end: now + nanos(total), work }
        } else if self.load.decoding > 0 {
            let remaining =
                |running: &Scheduled<BatchRequest>| running.request.len - running.tokens();
            let until_first_end = self.batch.running().iter().map(remaining).min().unwrap_or(1);
            let steps = 1 + self.batch.repeatable_steps(until_first_end - 1) as u64;
            let growth = self.model.kv_read * self.load.decoding as f64;
            Activity::Run(DecodeRun { start: now, first: total, growth, steps })
        } else {
            Activity::Idle
        };
    }

    /// Returns the duration of the scheduled step.
    fn step_time(&self) -> StepTime {
        let model = &self.model;
        let load = &self.load;
        let tokens = (load.tokens as f64 + load.decoding as f64) * model.token;
        let rest = load.embeds as f64 * model.embed
            + load.context as f64 * model.kv_read
            + load.pairs * model.attention;
        let rest = rest + load.reads as f64 * model.embed_bytes / model.transfer_bandwidth;
        StepTime { total: model.overhead + model.weights.max(tokens) + rest, work: tokens + rest }
    }
}

impl Load {
    /// Computes the load of the scheduled step.
    fn new(running: &[Scheduled<BatchRequest>], executor: &Executor) -> Self {
        let Executor { embeds, reads, .. } = *executor;
        let mut load = Self { embeds, reads, ..Self::default() };
        for running in running {
            let start = running.computed();
            let end = start + running.step_tokens();
            if running.is_decoding() {
                load.decoding += 1;
                load.context += start as u64;
            } else {
                load.tokens += running.step_tokens();
                load.pairs += (end * end - start * start) as f64 / 2.0;
            }
        }
        load
    }
}

impl BatchEngine for Executor {
    type Request = BatchRequest;
    type Hash = BlockHash;
    type Hasher = BuildHasherDefault<IdentityHasher>;
    type Error = Infallible;

    fn hash(request: &BatchRequest, block: usize) -> BlockHash {
        cache_events::block_hash(request.live.keys[block])
    }

    fn transferred_tokens(request: &BatchRequest) -> usize {
        match request.live.stage {
            Stage::Decode => request.live.sequence.prompt(),
            Stage::Whole | Stage::Prefill => 0,
        }
    }

    fn retention_id(request: &BatchRequest) -> Option<u64> {
        (request.live.stage == Stage::Prefill).then_some(request.live.number)
    }

    fn encode(
        &mut self,
        request: &mut BatchRequest,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Infallible> {
        let LiveRequest { sequence, next_item, encoded, .. } = &mut *request.live;
        if admission {
            // Images that lie wholly within cached blocks need no embeddings.
            *next_item = sequence.items().partition_point(|item| item.end() <= tokens.start);
        }
        while let Some(item) =
            sequence.items().get(*next_item).filter(|item| item.start < tokens.end)
        {
            *next_item += 1;
            let embeds = u64::from(item.image.embeds);
            if self.encoder.encode(&item.image.id, embeds) != EncoderLookup::Miss {
                continue;
            }
            if self.store.as_ref().is_some_and(|store| store.touch(item.image)) {
                self.reads += embeds;
            } else {
                *encoded += embeds;
                self.embeds += embeds;
            }
        }
        Ok(true)
    }

    fn on_admitted(&mut self, running: &mut Scheduled<BatchRequest>, cached: usize) {
        // Transferred blocks do not count as cached.
        if !running.was_preempted() && running.request.live.stage != Stage::Decode {
            running.request.live.cached = cached;
        }
    }

    fn on_preempted(&mut self, request: &mut BatchRequest) {
        if request.has_first_token {
            request.preempted.get_or_insert(self.now);
        }
    }

    fn on_stored(&mut self, request: &BatchRequest, blocks: Range<usize>) {
        self.events.stored(&request.live.sequence, &request.live.keys, blocks);
    }

    fn on_evicted(&mut self, hash: BlockHash) {
        self.events.evicted(hash);
    }
}

#[cfg(test)]
mod tests;
