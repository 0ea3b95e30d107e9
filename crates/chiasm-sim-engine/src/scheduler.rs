//! What each step of the engine computes, and what it gives out.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use chiasm_engine::wire::stats::PrefixCacheStats;
use chiasm_engine::wire::{EngineCoreOutput, FinishReason, SchedulerStats};
use chiasm_engine_model::{Batch, BatchEngine, BatchLimits, Encoded, EncoderCache, Scheduled};
use chiasm_kv::event::KvEvent;

use crate::block_chain::BlockHash;
use crate::cache_events::CacheEvents;
use crate::config::SimConfig;
use crate::embeddings::Embeddings;
use crate::item::Item;
use crate::left_prompts::LeftPrompts;
use crate::lent_slot::CheckedSlots;
use crate::logprobs;
use crate::pace::StepWork;
use crate::sequence::{Media, Moment, Sequence};
use crate::step_outputs::{ClientOutputs, StepOutputs};

/// Something killed the engine; what, in words.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fatal(pub(crate) String);

/// The requests in the engine.
///
/// A step is [`Scheduler::schedule`], then time passes, then [`Scheduler::update`].
pub(crate) struct Scheduler {
    batch: Batch<Executor>,
    executor: Executor,
    ids: HashSet<String>,
    /// Requests whose prompts are got from other engines.
    awaiting: Vec<Sequence>,
    /// Requests ended since the last step: the engine takes one more step for them, even with
    /// nothing to compute.
    ended: bool,
    /// Items of requests that ended since the last step. The worker has them, too, and hears of the
    /// end with the next step (`finished_req_ids`).
    leaving: Vec<Media>,
}

/// What is around the batch: the encoder, and who notes what happens.
struct Executor {
    config: Arc<SimConfig>,
    encoder: EncoderCache<String>,
    events: CacheEvents,
    lookups: PrefixCacheStats,
    /// Requests whose item contradicts the encoder's cache.
    contradicting: Vec<String>,
    /// When the current step was scheduled.
    now: f64,
    /// Images that the current step encodes.
    images: usize,
    /// Slots that the current step has looked at.
    checked: CheckedSlots,
    left_prompts: Option<LeftPrompts>,
    embeddings: Option<Embeddings>,
}

impl Scheduler {
    pub(crate) fn new(config: Arc<SimConfig>, left_prompts: Option<LeftPrompts>) -> Self {
        let limits = BatchLimits {
            max_running: config.max_num_seqs,
            max_batched_tokens: config.max_num_batched_tokens,
            max_model_len: config.max_model_len,
        };
        let block_size = config.block_size.get();
        Self {
            // vLLM's number counts its null block, which is never handed out.
            batch: Batch::new(limits, config.num_blocks.saturating_sub(1), block_size),
            executor: Executor {
                encoder: EncoderCache::new(config.encoder_cache_tokens as u64),
                embeddings: config.embeddings.clone().map(Embeddings::new),
                config,
                events: CacheEvents::new(block_size),
                lookups: PrefixCacheStats::default(),
                contradicting: Vec::new(),
                now: 0.0,
                images: 0,
                checked: CheckedSlots::default(),
                left_prompts,
            },
            awaiting: Vec::new(),
            ids: HashSet::new(),
            ended: false,
            leaving: Vec::new(),
        }
    }

    pub(crate) fn has_unfinished(&self) -> bool {
        !self.ids.is_empty()
    }

    pub(crate) fn has_work(&self) -> bool {
        self.has_unfinished() || self.ended
    }

    /// # Errors
    /// The id is already in use.
    pub(crate) fn add(&mut self, mut sequence: Sequence, now: f64) -> Result<(), Fatal> {
        self.take_note(&mut sequence, now)?;
        self.queue(sequence);
        Ok(())
    }

    /// Adds a request whose prompt is on its way from another engine.
    ///
    /// # Errors
    /// The id is already in use.
    pub(crate) fn wait_for_prompt(
        &mut self,
        mut sequence: Sequence,
        now: f64,
    ) -> Result<(), Fatal> {
        self.take_note(&mut sequence, now)?;
        self.awaiting.push(sequence);
        Ok(())
    }

    /// A prompt has come from another engine, or can't be had any more, and is computed here.
    /// Requests that have ended are passed over.
    pub(crate) fn given(&mut self, id: &str, is_given: bool) {
        let Some(at) = self.awaiting.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.awaiting.swap_remove(at);
        sequence.given = if is_given { sequence.prompt } else { 0 };
        self.queue(sequence);
    }

    /// A prompt that was left is not needed any more.
    pub(crate) fn let_go(&mut self, number: u64) {
        self.batch.let_go(number);
        // The next step tells what is in use.
        self.ended = true;
    }

    fn take_note(&mut self, sequence: &mut Sequence, now: f64) -> Result<(), Fatal> {
        if !self.ids.insert(sequence.id.clone()) {
            return Err(Fatal(format!("duplicate request id {}", sequence.id)));
        }
        sequence.record(Moment::Queued, now);
        Ok(())
    }

    fn queue(&mut self, sequence: Sequence) {
        let (prompt, items_end) = (sequence.prompt, sequence.items_end());
        self.batch.add(Scheduled::new(sequence, prompt, items_end));
    }

    /// Forgets these requests without a word. Unknown ids are ignored.
    pub(crate) fn abort(&mut self, ids: &[String]) {
        for id in ids {
            self.remove(|sequence| sequence.id == *id);
        }
    }

    /// Ends every request, as SIGTERM does; their ids by client.
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

    /// Ends the first request for which `is` holds; its client and its id.
    fn remove(&mut self, is: impl Fn(&Sequence) -> bool) -> Option<(u32, String)> {
        let awaiting = self.awaiting.iter().position(&is).map(|at| self.awaiting.swap_remove(at));
        let sequence = awaiting.or_else(|| self.batch.remove(is))?;
        let client = sequence.client;
        Some((client, self.end(sequence)))
    }

    fn end(&mut self, mut sequence: Sequence) -> String {
        self.ids.remove(&sequence.id);
        self.leaving.append(&mut sequence.media);
        self.ended = true;
        sequence.id
    }

    /// Chooses the tokens of the next step.
    ///
    /// # Errors
    /// A request that the worker dies of, or an image in a slot that was written to.
    pub(crate) fn schedule(&mut self, now: f64) -> Result<StepWork, Fatal> {
        self.ended = false;
        self.leaving.clear();
        self.executor.now = now;
        self.executor.images = 0;
        self.executor.checked = CheckedSlots::default();
        self.batch.schedule(&mut self.executor)?;
        let mut work = StepWork { images: self.executor.images, ..StepWork::default() };
        for running in self.batch.running() {
            match running.decodes() {
                true => work.decodes += 1,
                false => work.prefill_tokens += running.step(),
            }
        }
        Ok(work)
    }

    /// Ends the step: each request whose tokens are all computed gets a new one.
    pub(crate) fn update(&mut self, now: f64) -> Vec<ClientOutputs> {
        let config = &self.executor.config;
        let mut outputs = StepOutputs::new(u32::from(config.rank), now);
        let left_prompts = self.executor.left_prompts.as_ref();
        let leaves_embeddings =
            self.executor.embeddings.as_ref().filter(|embeddings| embeddings.leaves());
        let ended = self.batch.advance(|running| {
            if let Some(embeddings) = leaves_embeddings {
                outputs.push(running.request.client, encoded(&mut running.request, embeddings));
                return true;
            }
            let mut output = sample(running, config);
            if output.finish_reason.is_some()
                && let (Some(left), Some(number)) = (left_prompts, running.request.left_as)
            {
                let sequence = &running.request;
                let blocks = sequence.prompt.div_ceil(config.block_size.get());
                output.kv_transfer_params =
                    Some(left.leave(&sequence.id, number, sequence.computed(), blocks));
            }
            let is_last = output.finish_reason.is_some();
            outputs.push(running.request.client, output);
            is_last
        });
        for sequence in ended {
            self.end(sequence);
        }
        self.fail_contradicting(&mut outputs);
        outputs.finish(self.take_stats())
    }

    fn fail_contradicting(&mut self, outputs: &mut StepOutputs) {
        for contradicting in std::mem::take(&mut self.executor.contradicting) {
            let Some((client, request_id)) = self.remove(|sequence| sequence.id == contradicting)
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

    /// What happened in the KV cache since the last call.
    pub(crate) fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.executor.events.take()
    }

    /// Empties the prefix cache; with `preempt`, running requests start over. False while requests
    /// hold blocks.
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

/// What an engine says that only encodes: no token, and what it has left.
fn encoded(sequence: &mut Sequence, embeddings: &Embeddings) -> EngineCoreOutput {
    let items = sequence.media.iter().map(|media| media.identifier.as_str());
    EngineCoreOutput {
        request_id: sequence.id.clone(),
        finish_reason: Some(FinishReason::Stop),
        ec_transfer_params: Some(embeddings.said(items)),
        events: sequence.take_events(),
        ..EngineCoreOutput::default()
    }
}

/// Gives a request its next token.
fn sample(running: &mut Scheduled<Sequence>, config: &SimConfig) -> EngineCoreOutput {
    let stored = running.stored() * config.block_size.get();
    let sequence = &mut running.request;
    let sampled = sequence.sample(config);
    let prefill_stats = sequence.take_prefill(stored);
    // vLLM gives no part of a prompt's log probabilities before the first token.
    let asked = sequence.params.prompt_logprobs.filter(|_| prefill_stats.is_some());
    EngineCoreOutput {
        request_id: sequence.id.clone(),
        new_token_ids: vec![sampled.token],
        new_logprobs: sequence
            .params
            .logprobs
            .map(|top| logprobs::of(&[sampled.token], top, config.vocab_size)),
        prompt_logprobs: asked
            .map(|top| logprobs::of(&sequence.tokens[1..sequence.prompt], top, config.vocab_size)),
        finish_reason: sampled.finish,
        stop_reason: sampled.stop_reason,
        events: sequence.take_events(),
        prefill_stats,
        ..EngineCoreOutput::default()
    }
}

impl Executor {
    /// Whether another engine has left the embeddings of an item, or this one, before it had to
    /// make room for others.
    fn finds(&self, item: &str, embeds: usize) -> Result<bool, Fatal> {
        self.embeddings
            .as_ref()
            .map_or(Ok(false), |embeddings| embeddings.find(item, embeds))
            .map_err(|error| Fatal(error.to_string()))
    }

    /// Leaves the embeddings of an item for other engines, if that is what this one is there for.
    fn leave(&mut self, item: &str, embeds: usize) -> Result<(), Fatal> {
        let left =
            self.embeddings.as_mut().map_or(Ok(()), |embeddings| embeddings.leave(item, embeds));
        left.map_err(|error| Fatal(format!("embeddings can't be left: {error}")))
    }

    /// Looks whether an item is still what it was lent as.
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

    fn given(sequence: &Sequence) -> usize {
        sequence.given
    }

    fn kept_as(sequence: &Sequence) -> Option<u64> {
        sequence.left_as
    }

    fn look(&mut self, sequence: &mut Sequence) -> Result<(), Fatal> {
        sequence.look(&self.config).map_err(|error| Fatal(error.to_string()))
    }

    /// Encodes the images among the tokens that are not encoded yet. False if an image contradicts
    /// the one that its identifier stood for before.
    ///
    /// # Errors
    /// The image's slot was written to.
    fn encode(
        &mut self,
        sequence: &mut Sequence,
        tokens: Range<usize>,
        admission: bool,
    ) -> Result<bool, Fatal> {
        if admission {
            // Whether or not they are encoded in this step: what the receiver cache gave must be
            // what it was sent.
            sequence.media.iter().try_for_each(|media| self.check(media.item.as_ref()))?;
        }
        for media in &sequence.media {
            let position = &media.placeholder;
            if position.offset < tokens.end && tokens.start < position.offset + position.length {
                let embeds = crate::image::embedding_tokens(position);
                match self.encoder.encode(media.identifier.as_str(), embeds as u64) {
                    Encoded::Before => self.leave(&media.identifier, embeds)?,
                    Encoded::Now => {
                        self.check(media.item.as_ref())?;
                        self.images += usize::from(!self.finds(&media.identifier, embeds)?);
                        self.leave(&media.identifier, embeds)?;
                    }
                    Encoded::Mismatch => {
                        self.contradicting.push(sequence.id.clone());
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    fn admitted(&mut self, running: &mut Scheduled<Sequence>, cached: usize) {
        let (again, tokens) = (running.was_preempted(), running.tokens() as u64);
        let sequence = &mut running.request;
        sequence.record(Moment::Scheduled, self.now);
        if !again {
            sequence.note_prefill(cached);
        }
        if !sequence.reads_prefix_cache() {
            return;
        }
        let stats = &mut self.lookups;
        let (requests, queries, hits) = match again {
            true => (
                &mut stats.preempted_requests,
                &mut stats.preempted_queries,
                &mut stats.preempted_hits,
            ),
            false => (&mut stats.requests, &mut stats.queries, &mut stats.hits),
        };
        *requests += 1;
        *queries += tokens;
        *hits += cached as u64;
    }

    fn preempted(&mut self, sequence: &mut Sequence) {
        sequence.record(Moment::Preempted, self.now);
    }

    fn stored(&mut self, sequence: &Sequence, blocks: Range<usize>) {
        self.events.stored(&sequence.chain, &sequence.tokens, blocks);
    }

    fn evicted(&mut self, hash: BlockHash) {
        self.events.evicted(hash);
    }
}

#[cfg(test)]
mod tests;
