//! Chooses what each step of the engine computes, and collects its outputs.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use chiasm_engine::wire::stats::PrefixCacheStats;
use chiasm_engine::wire::{EngineCoreOutput, FinishReason, SchedulerStats};
use chiasm_engine_model::{
    Batch, BatchEngine, BatchLimits, EncoderCache, EncoderLookup, Scheduled,
};
use chiasm_kv::event::KvEvent;

use crate::block_chain::BlockHash;
use crate::cache_events::CacheEvents;
use crate::config::SimConfig;
use crate::embeddings::Embeddings;
use crate::item::Item;
use crate::lent_slot::CheckedSlots;
use crate::logprobs;
use crate::pace::StepWork;
use crate::prompt_store::PromptStore;
use crate::sequence::{EventKind, Media, Sequence};
use crate::step_outputs::{ClientOutputs, StepOutputs};

/// The reason that the engine dies.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fatal(pub(crate) String);

/// The requests of the engine.
///
/// A step is [`Scheduler::schedule`], then a wait, then [`Scheduler::update`].
pub(crate) struct Scheduler {
    batch: Batch<Executor>,
    executor: Executor,
    ids: HashSet<String>,
    /// The requests whose prompts are fetched from other engines.
    awaiting: Vec<Sequence>,
    /// `true` if requests ended since the last step. The engine then takes one more step, even with
    /// nothing to compute.
    has_ended: bool,
    /// The items of requests that ended since the last step. The worker also holds them, and learns
    /// of the end with the next step (`finished_req_ids`).
    leaving: Vec<Media>,
}

/// The state around the batch: the encoder, and the records of what happens.
struct Executor {
    config: Arc<SimConfig>,
    encoder: EncoderCache<String>,
    events: CacheEvents,
    lookups: PrefixCacheStats,
    /// The requests whose item has another size than the encoder cache's item of that identifier.
    mismatched: Vec<String>,
    /// The time at which the current step was scheduled.
    now: f64,
    /// The number of images that the current step encodes.
    images: usize,
    /// The slots that the current step has checked.
    checked: CheckedSlots,
    prompt_store: Option<PromptStore>,
    embeddings: Option<Embeddings>,
}

impl Scheduler {
    pub(crate) fn new(config: Arc<SimConfig>, prompt_store: Option<PromptStore>) -> Self {
        let limits = BatchLimits {
            max_running: config.max_num_seqs,
            max_batched_tokens: config.max_num_batched_tokens,
            max_model_len: config.max_model_len,
        };
        let block_size = config.block_size.get();
        Self {
            // vLLM's number counts its null block, which is never allocated.
            batch: Batch::new(limits, config.num_blocks.saturating_sub(1), block_size),
            executor: Executor {
                encoder: EncoderCache::new(config.encoder_cache_tokens as u64),
                embeddings: config.embeddings.clone().map(Embeddings::new),
                config,
                events: CacheEvents::new(block_size),
                lookups: PrefixCacheStats::default(),
                mismatched: Vec::new(),
                now: 0.0,
                images: 0,
                checked: CheckedSlots::default(),
                prompt_store,
            },
            awaiting: Vec::new(),
            ids: HashSet::new(),
            has_ended: false,
            leaving: Vec::new(),
        }
    }

    pub(crate) fn has_unfinished(&self) -> bool {
        !self.ids.is_empty()
    }

    pub(crate) fn has_work(&self) -> bool {
        self.has_unfinished() || self.has_ended
    }

    /// Adds a request.
    ///
    /// # Errors
    /// Returns [`Fatal`] if the id is already in use.
    pub(crate) fn add(&mut self, mut sequence: Sequence, now: f64) -> Result<(), Fatal> {
        self.register(&mut sequence, now)?;
        self.enqueue(sequence);
        Ok(())
    }

    /// Adds a request whose prompt is fetched from another engine.
    ///
    /// # Errors
    ///
    /// Returns [`Fatal`] if the id is already in use.
    pub(crate) fn wait_for_prompt(
        &mut self,
        mut sequence: Sequence,
        now: f64,
    ) -> Result<(), Fatal> {
        self.register(&mut sequence, now)?;
        self.awaiting.push(sequence);
        Ok(())
    }

    /// Starts a request whose prompt was fetched from another engine, or not found there and so
    /// computed here. Ignores requests that have ended.
    pub(crate) fn prompt_fetched(&mut self, id: &str, found: bool) {
        let Some(at) = self.awaiting.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.awaiting.swap_remove(at);
        sequence.transferred_tokens = if found { sequence.prompt } else { 0 };
        self.enqueue(sequence);
    }

    /// Releases the blocks of a prompt that another engine has fetched or that has expired.
    pub(crate) fn release_retained(&mut self, retention_id: u64) {
        self.batch.release_retained(retention_id);
        // The next step reports the usage.
        self.has_ended = true;
    }

    fn register(&mut self, sequence: &mut Sequence, now: f64) -> Result<(), Fatal> {
        if !self.ids.insert(sequence.id.clone()) {
            return Err(Fatal(format!("duplicate request id {}", sequence.id)));
        }
        sequence.record(EventKind::Queued, now);
        Ok(())
    }

    fn enqueue(&mut self, sequence: Sequence) {
        let prompt = sequence.prompt;
        let items_end = sequence.items_end();
        self.batch.add(Scheduled::new(sequence, prompt, items_end));
    }

    /// Removes these requests without outputs. Unknown ids are ignored.
    pub(crate) fn abort(&mut self, ids: &[String]) {
        for id in ids {
            self.remove(|sequence| sequence.id == *id);
        }
    }

    /// Ends every request, as SIGTERM does, and returns their ids by client.
    pub(crate) fn abort_all(&mut self) -> Vec<(u32, Vec<String>)> {
        let mut ended: Vec<(u32, Vec<String>)> = Vec::new();
        while let Some((client, id)) = self.remove(|_| true) {
            match ended.iter_mut().find(|(known, _)| *known == client) {
                Some((_, ids)) => ids.push(id),
                None => ended.push((client, vec![id])),
            }
        }
        ended
    }

    /// Ends the first request that matches `predicate`, and returns its client and its id.
    fn remove(&mut self, predicate: impl Fn(&Sequence) -> bool) -> Option<(u32, String)> {
        let awaiting = self.awaiting.iter().position(&predicate);
        let awaiting = awaiting.map(|at| self.awaiting.swap_remove(at));
        let sequence = awaiting.or_else(|| self.batch.remove(predicate))?;
        let client = sequence.client;
        Some((client, self.end(sequence)))
    }

    fn end(&mut self, mut sequence: Sequence) -> String {
        self.ids.remove(&sequence.id);
        self.leaving.append(&mut sequence.media);
        self.has_ended = true;
        sequence.id
    }

    /// Chooses the tokens of the next step.
    ///
    /// # Errors
    ///
    /// Returns [`Fatal`] for a request that the worker dies of, or an overwritten slot.
    pub(crate) fn schedule(&mut self, now: f64) -> Result<StepWork, Fatal> {
        self.has_ended = false;
        self.leaving.clear();
        self.executor.now = now;
        self.executor.images = 0;
        self.executor.checked = CheckedSlots::default();
        self.batch.schedule(&mut self.executor)?;
        let mut work = StepWork { images: self.executor.images, ..StepWork::default() };
        for running in self.batch.running() {
            if running.is_decoding() {
                work.decodes += 1;
            } else {
                work.prefill_tokens += running.step_tokens();
            }
        }
        Ok(work)
    }

    /// Ends the step: each request whose tokens are all computed gets a new one.
    pub(crate) fn update(&mut self, now: f64) -> Vec<ClientOutputs> {
        let config = &self.executor.config;
        let mut outputs = StepOutputs::new(u32::from(config.rank), now);
        let prompt_store = self.executor.prompt_store.as_ref();
        let encode_only =
            self.executor.embeddings.as_ref().filter(|embeddings| embeddings.encode_only());
        let ended = self.batch.advance(|running| {
            if let Some(embeddings) = encode_only {
                let output = encoded_output(&mut running.request, embeddings);
                outputs.push(running.request.client, output);
                return true;
            }
            let mut output = sample(running, config);
            if output.finish_reason.is_some()
                && let (Some(store), Some(id)) = (prompt_store, running.request.retention_id)
            {
                let sequence = &running.request;
                let blocks = sequence.prompt.div_ceil(config.block_size.get());
                output.kv_transfer_params =
                    Some(store.keep(&sequence.id, id, sequence.prompt_digest(), blocks));
            }
            let is_last = output.finish_reason.is_some();
            outputs.push(running.request.client, output);
            is_last
        });
        for sequence in ended {
            self.end(sequence);
        }
        self.fail_mismatched(&mut outputs);
        outputs.finish(self.take_stats())
    }

    fn fail_mismatched(&mut self, outputs: &mut StepOutputs) {
        for mismatched in std::mem::take(&mut self.executor.mismatched) {
            let Some((client, request_id)) = self.remove(|sequence| sequence.id == mismatched)
            else {
                continue;
            };
            let finish_reason = Some(FinishReason::Error);
            outputs.push(
                client,
                EngineCoreOutput { request_id, finish_reason, ..EngineCoreOutput::default() },
            );
        }
    }

    fn take_stats(&mut self) -> SchedulerStats {
        let stages = ["waiting_to_start", "in_progress", "completed_waiting"];
        SchedulerStats {
            num_running_reqs: self.batch.running().len() as u64,
            num_waiting_reqs: self.batch.waiting() as u64,
            num_kv_fetch_reqs_by_stage: stages.map(|stage| (stage.to_owned(), 0)).into(),
            kv_cache_usage: self.batch.cache().usage(),
            prefix_cache_stats: std::mem::take(&mut self.executor.lookups),
            ..SchedulerStats::default()
        }
    }

    /// Takes the events of the KV cache since the last call.
    pub(crate) fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.executor.events.take()
    }

    /// Empties the prefix cache; with `preempt`, running requests start over. Returns `false` if
    /// requests hold blocks.
    pub(crate) fn reset_prefix_cache(&mut self, preempt: bool, now: f64) -> bool {
        self.executor.now = now;
        while preempt && self.batch.preempt_last(&mut self.executor) {}
        let emptied = self.batch.reset_cache();
        if emptied {
            self.executor.events.cleared();
        }
        self.executor.lookups.reset |= emptied;
        emptied
    }

    pub(crate) fn reset_encoder_cache(&mut self) {
        self.executor.encoder.clear();
    }
}

/// Builds the output of an engine that only encodes: no token, and the stored embeddings.
fn encoded_output(sequence: &mut Sequence, embeddings: &Embeddings) -> EngineCoreOutput {
    let items = sequence.media.iter().map(|media| media.identifier.as_str());
    EngineCoreOutput {
        request_id: sequence.id.clone(),
        finish_reason: Some(FinishReason::Stop),
        ec_transfer_params: Some(embeddings.transfer_params(items)),
        events: sequence.take_events(),
        ..EngineCoreOutput::default()
    }
}

/// Generates the next token of a request.
fn sample(running: &mut Scheduled<Sequence>, config: &SimConfig) -> EngineCoreOutput {
    let stored = running.stored() * config.block_size.get();
    let sequence = &mut running.request;
    let sampled = sequence.sample(config);
    let prefill_stats = sequence.take_prefill(stored);
    // vLLM returns a prompt's log probabilities only with the first token.
    let prompt_top = sequence.params.prompt_logprobs.filter(|_| prefill_stats.is_some());
    EngineCoreOutput {
        request_id: sequence.id.clone(),
        new_token_ids: vec![sampled.token],
        new_logprobs: sequence
            .params
            .logprobs
            .map(|top| logprobs::generate(&[sampled.token], top, config.vocab_size)),
        prompt_logprobs: prompt_top.map(|top| {
            let prompt = &sequence.tokens[1..sequence.prompt];
            logprobs::generate(prompt, top, config.vocab_size)
        }),
        finish_reason: sampled.finish,
        stop_reason: sampled.stop_reason,
        events: sequence.take_events(),
        prefill_stats,
        ..EngineCoreOutput::default()
    }
}

impl Executor {
    /// Returns `true` if the embeddings of an item are stored, by another engine or by this one
    /// before its own encoder cache evicted them.
    fn has_embeddings(&self, item: &str, embeds: usize) -> Result<bool, Fatal> {
        self.embeddings
            .as_ref()
            .map_or(Ok(false), |embeddings| embeddings.find(item, embeds))
            .map_err(|error| Fatal(error.to_string()))
    }

    /// Stores the embeddings of an item for other engines, if this engine only encodes.
    fn store_embeddings(&mut self, item: &str, embeds: usize) -> Result<(), Fatal> {
        let stored =
            self.embeddings.as_mut().map_or(Ok(()), |embeddings| embeddings.store(item, embeds));
        stored.map_err(|error| Fatal(format!("the embeddings can't be stored: {error}")))
    }

    /// Checks that an item's slots still have their first contents.
    fn check(&mut self, item: Option<&Item>) -> Result<(), Fatal> {
        let slots = item.into_iter().flat_map(Item::slots);
        self.checked.check(slots).map_err(|overwritten| Fatal(overwritten.to_string()))
    }
}

impl BatchEngine for Executor {
    type Request = Sequence;
    type Hash = BlockHash;
    type Hasher = std::hash::RandomState;
    type Error = Fatal;

    fn hash(sequence: &Sequence, block: usize) -> BlockHash {
        sequence.chain.hashes()[block]
    }

    fn reads_prefix_cache(sequence: &Sequence) -> bool {
        sequence.reads_prefix_cache()
    }

    fn transferred_tokens(sequence: &Sequence) -> usize {
        sequence.transferred_tokens
    }

    fn retention_id(sequence: &Sequence) -> Option<u64> {
        sequence.retention_id
    }

    fn before_admission(&mut self, sequence: &mut Sequence) -> Result<(), Fatal> {
        sequence.inspect(&self.config).map_err(|error| Fatal(error.to_string()))
    }

    /// Encodes the images among the tokens that are not encoded yet. Returns `false` if an image
    /// has another size than the earlier one with its identifier.
    ///
    /// # Errors
    ///
    /// Returns [`Fatal`] if the image's slot was overwritten.
    fn encode(
        &mut self,
        sequence: &mut Sequence,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Fatal> {
        if admission {
            // Checked even if nothing is encoded in this step: the item from the receiver cache
            // must be unchanged.
            sequence.media.iter().try_for_each(|media| self.check(media.item.as_ref()))?;
        }
        for media in &sequence.media {
            let position = &media.placeholder;
            if position.offset < tokens.end && tokens.start < position.offset + position.length {
                let embeds = crate::image::embedding_tokens(position);
                match self.encoder.encode(media.identifier.as_str(), embeds as u64) {
                    EncoderLookup::Hit => self.store_embeddings(&media.identifier, embeds)?,
                    EncoderLookup::Miss => {
                        self.check(media.item.as_ref())?;
                        let is_stored = self.has_embeddings(&media.identifier, embeds)?;
                        self.images += usize::from(!is_stored);
                        self.store_embeddings(&media.identifier, embeds)?;
                    }
                    EncoderLookup::Mismatch => {
                        self.mismatched.push(sequence.id.clone());
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    fn on_admitted(&mut self, running: &mut Scheduled<Sequence>, cached: usize) {
        let was_preempted = running.was_preempted();
        let tokens = running.tokens() as u64;
        let sequence = &mut running.request;
        sequence.record(EventKind::Scheduled, self.now);
        if !was_preempted {
            sequence.note_prefill(cached);
        }
        if !sequence.reads_prefix_cache() {
            return;
        }
        let stats = &mut self.lookups;
        let (requests, queries, hits) = if was_preempted {
            (&mut stats.preempted_requests, &mut stats.preempted_queries, &mut stats.preempted_hits)
        } else {
            (&mut stats.requests, &mut stats.queries, &mut stats.hits)
        };
        *requests += 1;
        *queries += tokens;
        *hits += cached as u64;
    }

    fn on_preempted(&mut self, sequence: &mut Sequence) {
        sequence.record(EventKind::Preempted, self.now);
    }

    fn on_stored(&mut self, sequence: &Sequence, blocks: Range<usize>) {
        self.events.stored(&sequence.chain, &sequence.tokens, blocks);
    }

    fn on_evicted(&mut self, hash: BlockHash) {
        self.events.evicted(hash);
    }
}

#[cfg(test)]
mod tests;
